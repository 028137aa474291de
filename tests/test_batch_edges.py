"""Batch listeners at their edges: what a call must not do to the events of its neighbours."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, transaction

import django_outbox as outbox
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from django_outbox.signals import events_claimed
from django_outbox.worker.drain import Drain
from tests.surroundings import heard
from tests.table import PLACED, insert, keyed, listening, now, row, write
from tests.test_batches import (
    FAR,
    Batched,
    Bulk,
    all_are,
    attempts,
    deliver,
    everywhere,
    note_all,
    outside,
    poisoned,
    statuses,
    working,
)
from tests.testapp.models import Effect
from tests.waiting import MovedClock, wait_until

LONG = '{"text":"' + 989 * "x" + '"}'  # a payload of a thousand characters


def nothing_is_new() -> bool:
    return Status.NEW not in statuses().values()


def ids_of(events: list[outbox.Event]) -> list[str]:
    return [each.event_id for each in events]


# -- sizes -----------------------------------------------------------------------------------------


@outside
@everywhere
def test_what_follows_in_a_key_counts_towards_the_bytes(run: str, settings: Any) -> None:
    settings.OUTBOX = {"BATCH_BYTES": 2500}
    ids = keyed("a", 9, payload=LONG)
    bulk = Bulk()
    with listening(bulk, batch=100, per_key=9):
        deliver(run)
    assert bulk.ids == ids
    assert max(bulk.sizes) == 3


# -- answers ---------------------------------------------------------------------------------------


@outside
def test_a_backlog_of_two_listeners_comes_in_whole_batches() -> None:
    """Each lane is filled, though the events of the other listener are claimed with its own."""
    one, two = Bulk(), Bulk()
    for _ in range(40):
        insert(5, event_type="one")
        insert(5, event_type="two")
    with (
        listening(one, "one", batch=100, within=1.0),
        listening(two, "two", batch=100, within=1.0),
        working(),
    ):
        wait_until(all_are(Status.DONE))
    assert one.sizes == two.sizes == [100, 100]


@outside
@everywhere
@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_what_would_end_a_thread_is_a_failure(
    run: str, kind: str, error: type[BaseException]
) -> None:
    ids = write(4)

    def work(events: list[outbox.Event]) -> None:
        if ids[1] in ids_of(events):
            raise error

    bulk = Bulk(work)

    async def awaited(events: list[outbox.Event]) -> Any:
        return bulk(events)

    with listening(awaited if kind == "async" else bulk, batch=4, retry=FAR):
        deliver(run, nothing_is_new)
    assert [statuses()[each] for each in ids] == [1, 2, 1, 1]


# -- failures --------------------------------------------------------------------------------------


@outside
@everywhere
@pytest.mark.parametrize("atomic", [False, True])
def test_each_call_gets_unchanged_payloads(run: str, atomic: bool) -> None:
    """A listener may take its payloads apart; what it left of them must not fail good events."""
    ids = write(8)

    def work(events: list[outbox.Event]) -> None:
        for each in events:
            each.payload.pop("n")
        if ids[5] in ids_of(events):
            raise LookupError("no")

    with listening(Bulk(work), batch=8, retry=FAR, atomic=atomic):
        deliver(run, nothing_is_new)
    assert attempts() == {each: int(each == ids[5]) for each in ids}


@outside
def test_what_a_stop_leaves_of_a_batch_counts_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be good: only the next calls would have told."""
    ids = write(8)
    bulk = poisoned(ids[0])
    monkeypatch.setattr(Drain, "tidy", lambda drain: False)  # as at a stop
    with listening(bulk, batch=8, retry=FAR):
        outbox.drain()
    assert bulk.sizes == [8]
    assert {*statuses().values()} == {Status.NEW}
    assert {*attempts().values()} == {0}


@outside
def test_half_of_a_batch_is_called_without_what_another_worker_has_by_now(settings: Any) -> None:
    """Its lease is not renewed, and has ended once all the others have been renewed twice."""
    settings.OUTBOX = {"LEASE": 1.0}
    ids = write(8)
    lost, kept, bad = ids[4:7]

    def work(events: list[outbox.Event]) -> None:
        if len(bulk.batches) == 1:
            until = now() + timedelta(seconds=2.0)
            hour = now() + timedelta(hours=1)
            OutboxEvent.objects.filter(pk=lost).update(locked_by="thief", available_at=hour)
            wait_until(lambda: OutboxEvent.objects.filter(pk=kept, available_at__gt=until).exists())
        if bad in ids_of(events):
            raise LookupError(bad)

    bulk = Bulk(work)
    with listening(bulk, batch=8, within=1.0, retry=FAR):
        deliver("worker", lambda: [*statuses().values()].count(Status.NEW) == 1)
    assert bulk.sizes[0] == 8
    assert lost not in bulk.ids[8:]
    assert {statuses()[each] for each in ids if each not in (lost, bad)} == {Status.DONE}


@outside
def test_a_second_call_that_hangs_fails_alone(clock: MovedClock) -> None:
    """The thread that replaces it goes on with the other half."""
    ids = write(8)
    over = threading.Event()

    def work(events: list[outbox.Event]) -> None:
        if len(events) == 8:
            raise LookupError("no")
        if ids[0] in ids_of(events) and len(bulk.batches) < 4:
            clock.advance(6)
            over.wait(60)

    bulk = Bulk(work)
    with listening(bulk, batch=8, within=1.0, timeout=5, retry=FAR), working():
        wait_until(nothing_is_new)
        over.set()
    assert bulk.sizes == [8, 4, 4]
    assert [statuses()[each] for each in ids] == 4 * [Status.RETRY] + 4 * [Status.DONE]
    assert attempts() == {each: int(each in ids[:4]) for each in ids}


# -- atomic listeners ------------------------------------------------------------------------------


@outside
@everywhere
def test_a_broken_transaction_fails_its_events_alone(run: str) -> None:
    ids = write(4)

    def work(events: list[outbox.Event]) -> None:
        note_all(events)
        if ids[2] in ids_of(events):
            try:
                with transaction.atomic(savepoint=False):
                    raise IntegrityError("swallowed")
            except IntegrityError:
                pass

    with listening(Bulk(work), batch=4, atomic=True, retry=FAR):
        deliver(run, nothing_is_new)
    assert attempts() == {each: int(each == ids[2]) for each in ids}
    found = sorted(Effect.objects.values_list("event_id", flat=True))
    assert found == sorted({*ids} - {ids[2]})


# -- drain, stops, rates ---------------------------------------------------------------------------


@outside
@pytest.mark.parametrize("key", [None, "a"])
def test_ctrl_c_in_a_batch_releases_its_events(key: str | None) -> None:
    if key is None:
        write(6)
    else:
        for each in "abcdef":
            keyed(each, 1)

    def work(events: list[outbox.Event]) -> None:
        raise KeyboardInterrupt

    with listening(Bulk(work), batch=4), pytest.raises(KeyboardInterrupt):
        outbox.drain()
    assert {*statuses().values()} == {Status.NEW}
    bulk = Bulk()
    with listening(bulk, batch=6):
        assert outbox.drain() == 6  # due at once, and by nobody leased
    assert {*attempts().values()} == {0}


@outside
def test_an_awaited_batch_is_handed_back_at_a_stop(settings: Any) -> None:
    settings.OUTBOX = {"DRAIN_TIMEOUT": 0.1}
    began = threading.Event()

    async def work(events: list[outbox.Event]) -> None:
        began.set()
        await asyncio.sleep(60)

    write(5)
    with listening(work, batch=5), working():
        wait_until(began.is_set)
    assert {*statuses().values()} == {Status.NEW}
    assert {*attempts().values()} == {0}
    assert not OutboxEvent.objects.filter(locked_by__isnull=False).exists()


@outside
def test_a_rate_counts_events_and_not_calls(settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"default": {"RATE": "10/s"}}}
    bulk = Bulk()
    write(100)
    with listening(bulk, batch=50), working():
        wait_until(lambda: len(bulk.ids) >= 12)
    assert max(bulk.sizes) <= 10


@pytest.mark.django_db
def test_the_test_kit_delivers_batches() -> None:
    from django_outbox import testing

    bulk = Bulk()
    with listening(bulk, batch=10):
        write(3)
        assert testing.drain() == 3
        write(1)
        with (
            pytest.raises(AssertionError, match="1 deliveries failed"),
            listening(Bulk(lambda events: [LookupError("no")]), name="bad", batch=2, retry=FAR),
        ):
            testing.drain()
        bulk([testing.make_event(PLACED, {"n": 1})])
    assert bulk.sizes == [3, 1, 1]


@outside
@everywhere
def test_a_payload_that_does_not_fit_blocks_its_key(run: str, settings: Any) -> None:
    settings.OUTBOX = {"ON_DEAD": "block"}
    kind = "batch.typed"
    (first,) = keyed("a", 1, event_type=kind, payload='{"number": 1}')
    (bad,) = keyed("a", 1, event_type=kind, payload='{"number": "two"}')
    (last,) = keyed("a", 1, event_type=kind, payload='{"number": 3}')
    bulk = Bulk()
    with listening(bulk, Batched, batch=5, per_key=5):
        deliver(run, lambda: statuses()[bad] == Status.DEAD)
    assert bulk.ids == [first]
    assert statuses()[last] == Status.NEW


@outside
@everywhere
def test_the_good_events_before_a_bad_one_of_their_key_do_not_fail(run: str) -> None:
    ids = keyed("a", 8)
    bulk = poisoned(ids[1])
    with listening(bulk, batch=8, per_key=8, retry=FAR):
        deliver(run, lambda: statuses()[ids[1]] == Status.RETRY)
    assert attempts() == {each: int(each == ids[1]) for each in ids}
    assert statuses()[ids[0]] == Status.DONE


@outside
def test_a_batch_may_follow_an_ordinary_event_of_its_key(settings: Any) -> None:
    """Without another claim: the thread that delivered the first event passes the second on."""
    settings.OUTBOX = {"WORKERS": 1}
    ids = [keyed("a", 1, event_type=f"mixed.{n % 2}")[0] for n in range(10)]
    seen: list[str] = []
    with (
        heard(events_claimed) as claims,
        listening(lambda event: seen.append(event.event_id), "mixed.0"),
        listening(lambda events: seen.extend(ids_of(events)), "mixed.1", batch=5),
        working(),
    ):
        wait_until(all_are(Status.DONE))
    assert seen == ids
    assert sum(each["count"] for each in claims) == 10


@outside
def test_an_awaited_fallback_that_cannot_be_called_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from django_outbox.delivery.call import Call

    make = Call.amake

    async def unable(call: Call) -> Any:
        if call.failure is not None:
            raise RuntimeError("no connection")
        return await make(call)

    monkeypatch.setattr(Call, "amake", unable)

    async def work(events: list[outbox.Event]) -> list[Exception]:
        return [outbox.Unrecoverable("no")] * len(events)

    async def instead(event: outbox.Event, failure: outbox.Failure) -> None:
        pass

    ids = write(3)
    with listening(work, batch=3):
        registry.fallback(work, instead)
        with working():
            wait_until(
                lambda: (
                    all(row(each).locked_by is None for each in ids)
                    and row(ids[0]).available_at > now() + timedelta(seconds=1)
                )
            )
    assert {*attempts().values()} == {0}
