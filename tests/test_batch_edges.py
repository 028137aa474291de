"""Batch listeners at their edges: what a call must not do to the events of its neighbours."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause
from django_outbox.signals import events_claimed
from tests.table import PLACED, keyed, listening, now, row, write
from tests.test_batches import (
    FAR,
    Bulk,
    all_are,
    attempts,
    deliver,
    everywhere,
    outside,
    statuses,
    working,
)
from tests.waiting import wait_until

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


@outside
@everywhere
def test_the_heads_of_many_keys_count_towards_the_bytes(run: str, settings: Any) -> None:
    settings.OUTBOX = {"BATCH_BYTES": 2500}
    for key in "abcdefghi":
        keyed(key, 1, payload=LONG)
    bulk = Bulk()
    with listening(bulk, batch=100):
        deliver(run)
    assert max(bulk.sizes) <= 3


@outside
def test_a_batch_does_not_wait_for_the_listeners_of_another_queue(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 1, "QUEUES": {"slow": {"WORKERS": 1}}}
    over, reached = threading.Event(), threading.Event()

    def work(events: list[outbox.Event]) -> None:
        over.wait(0.01)  # so long that the thread waits for the settle

    bulk = Bulk(work)

    def slow(event: outbox.Event) -> None:
        reached.set()
        over.wait(30)

    with listening(bulk, name="bulk", batch=5), listening(slow, name="slow", queue="slow"):
        write(5)
        with working():
            wait_until(reached.is_set)
            more = write(5)
            wait_until(lambda: {*more} <= {*bulk.ids}, within=10)
            over.set()


# -- answers ---------------------------------------------------------------------------------------


@outside
@everywhere
@pytest.mark.parametrize("kind", ["plain", "async", "atomic"])
def test_a_returned_exception_is_not_an_answer(run: str, kind: str) -> None:
    """Otherwise ``return error`` would end all events as done."""
    bulk = Bulk(lambda events: ValueError("no"))

    async def awaited(events: list[outbox.Event]) -> Any:
        return bulk(events)

    ids = write(3)
    call = awaited if kind == "async" else bulk
    with listening(call, batch=3, retry=FAR, atomic=kind == "atomic"):
        deliver(run, all_are(Status.RETRY))
    assert bulk.sizes == [3]
    assert "answered ValueError" in (row(ids[0]).last_error or "")


@outside
@everywhere
@pytest.mark.parametrize(
    "error",
    [SystemExit(1), asyncio.CancelledError(), GeneratorExit(), outbox.RetryAfter(600)],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_any_exception_is_an_answer(run: str, kind: str, error: BaseException) -> None:
    ids = write(3)
    bulk = Bulk(lambda events: [error if each.event_id == ids[1] else None for each in events])

    async def awaited(events: list[outbox.Event]) -> Any:
        return bulk(events)

    with listening(awaited if kind == "async" else bulk, batch=3, retry=FAR):
        deliver(run, nothing_is_new)
    assert [statuses()[each] for each in ids] == [Status.DONE, Status.RETRY, Status.DONE]


@outside
@everywhere
@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
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


# -- keys ------------------------------------------------------------------------------------------


@outside
def test_a_batch_may_follow_an_ordinary_event_of_its_key(settings: Any) -> None:
    """Without another claim: the thread that delivered the first event passes the second on."""
    settings.OUTBOX = {"WORKERS": 1}
    claims: list[int] = []

    def count(sender: str, count: int, **kwargs: Any) -> None:
        claims.append(count)

    ids = [keyed("a", 1, event_type=f"mixed.{n % 2}")[0] for n in range(10)]
    seen: list[str] = []
    events_claimed.connect(count)
    try:
        with (
            listening(lambda event: seen.append(event.event_id), "mixed.0"),
            listening(lambda events: seen.extend(ids_of(events)), "mixed.1", batch=5),
            working(),
        ):
            wait_until(all_are(Status.DONE))
    finally:
        events_claimed.disconnect(count)
    assert seen == ids
    assert sum(claims) == 10


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
def test_an_awaited_fallback_that_cannot_be_called_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from django_outbox.worker import event_loop

    async def unable(fallback: Any) -> None:
        raise RuntimeError("no connection")

    monkeypatch.setattr(event_loop, "acall_fallback", unable)

    async def work(events: list[outbox.Event]) -> list[Exception]:
        return [outbox.Unrecoverable("no")] * len(events)

    async def instead(event: outbox.Event, failure: outbox.Failure) -> None:
        pass

    ids = write(3)
    with listening(work, batch=3):
        registry.fallback(work, instead)
        with working():
            wait_until(lambda: all(row(each).locked_by is None for each in ids)
                       and row(ids[0]).available_at > now() + timedelta(seconds=1))  # fmt: skip
    assert {*attempts().values()} == {0}


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
        with pytest.raises(AssertionError, match="1 events failed"), listening(
            Bulk(lambda events: [LookupError("no")]), name="bad", batch=2, retry=FAR
        ):  # fmt: skip
            testing.drain()
        bulk([testing.make_event(PLACED, {"n": 1})])
    assert bulk.sizes == [3, 1, 1]


@outside
@everywhere
def test_a_pause_in_the_middle_of_a_batch_holds_for_the_next(run: str) -> None:
    title = f"{PLACED} bulk"

    def work(events: list[outbox.Event]) -> None:
        OutboxPause.objects.pause("listener", title)

    bulk = Bulk(work)
    write(2)
    with listening(bulk, name="bulk", batch=2):
        deliver(run, lambda: Status.DONE in statuses().values())
        write(2)
        if run == "drain":
            outbox.drain()
    assert [*statuses().values()].count(Status.DONE) == 2
