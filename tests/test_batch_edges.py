"""Batch listeners at their edges: what a call must not do to the events of its neighbours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, transaction

import django_outbox as outbox
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream
from django_outbox.signals import events_claimed
from django_outbox.worker.drain import _Drain
from tests.table import PLACED, in_thread, insert, keyed, listening, now, row, write
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
def test_an_awaited_batch_grows_while_all_places_are_taken(settings: Any) -> None:
    settings.OUTBOX = {"ASYNC_CONCURRENCY": 1}
    sizes, over = list[int](), threading.Event()

    async def work(events: list[outbox.Event]) -> None:
        sizes.append(len(events))
        await asyncio.to_thread(over.wait, 30)

    with listening(work, batch=10), working():
        write(1)
        wait_until(lambda: sizes == [1])
        for leased in range(2, 7):
            write(1)
            wait_until(lambda: OutboxEvent.objects.exclude(locked_by=None).count() == leased)  # noqa: B023
        over.set()
        wait_until(all_are(Status.DONE))
    assert sizes == [1, 5]


@outside
def test_a_lane_whose_listener_is_gone_keeps_its_events() -> None:
    """The events wait for more when their listener is removed, as a test may do."""
    bulk, other = Bulk(), Bulk()
    with working():
        with listening(bulk, name="bulk", batch=5, within=1.0):
            ids = write(2)
            wait_until(lambda: OutboxEvent.objects.filter(locked_by__isnull=False).count() == 2)
        with listening(other, name="other", batch=5):
            wait_until(lambda: len(other.ids) == 2)
    assert sorted(other.ids) == sorted(ids)
    assert bulk.ids == []


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
    with listening(call, batch=3, within=1.0, retry=FAR, atomic=kind == "atomic"):
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
@everywhere
@pytest.mark.parametrize(
    "places",
    [[0, 499], [248, 249], [3, 4, 200], [0, 1, 2, 3, 4]],
    ids=["ends", "middle", "three", "five"],
)
def test_several_bad_events_leave_the_others_at_one_attempt_or_two(
    run: str, places: list[int]
) -> None:
    ids = write(500)
    bad = {ids[place] for place in places}
    bulk, done = poisoned(*bad), []

    def work(events: list[outbox.Event]) -> None:
        bulk(events)
        done.extend(ids_of(events))

    with listening(work, batch=500, retry=outbox.Fixed(0, max_attempts=4)):
        deliver(run, lambda: {*statuses().values()} == {Status.DONE, Status.DEAD})
    assert {each for each, status in statuses().items() if status == Status.DEAD} == bad
    assert sorted(done) == sorted({*ids} - bad)  # each once
    assert max(attempts()[each] for each in {*ids} - bad) <= 2


@outside
@everywhere
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_small_batch_in_an_outage_counts_one_attempt(run: str, count: int) -> None:
    def work(events: list[outbox.Event]) -> None:
        raise ConnectionError("away")

    bulk = Bulk(work)
    write(count)
    with listening(bulk, batch=count, within=1.0, retry=FAR):
        deliver(run, all_are(Status.RETRY))
    assert len(bulk.sizes) <= 3
    assert {*attempts().values()} == {1}


@outside
@everywhere
def test_retry_after_holds_for_the_last_shared_execution(run: str) -> None:
    def work(events: list[outbox.Event]) -> None:
        raise outbox.RetryAfter(600)

    ids = write(2)
    with listening(Bulk(work), batch=2, retry=outbox.Fixed(0, max_attempts=1)):
        deliver(run, all_are(Status.RETRY))
    due = row(ids[0]).available_at
    assert due is not None
    assert due > now() + timedelta(seconds=500)


@outside
def test_what_a_stop_leaves_of_a_batch_counts_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be good: only the next calls would have told."""
    ids = write(8)
    bulk = poisoned(ids[0])
    monkeypatch.setattr(_Drain, "_tidy", lambda drain, lease: False)  # as at a stop
    with listening(bulk, batch=8, retry=FAR):
        outbox.drain()
    assert bulk.sizes == [8]
    assert {*statuses().values()} == {Status.NEW}
    assert {*attempts().values()} == {0}


def in_each_way(bulk: Bulk, way: str) -> Callable[..., Any]:
    """Return a batch listener that calls this one: on the event loop if it is ``awaited``."""

    async def awaited(events: list[outbox.Event]) -> Any:
        return await asyncio.to_thread(in_thread(lambda: bulk(events)).result)

    return awaited if way == "awaited" else bulk


@outside
@pytest.mark.parametrize("way", ["drain", "worker", "awaited"])
@pytest.mark.parametrize("is_keyed", [False, True])
def test_half_of_a_batch_is_called_without_what_another_worker_has_by_now(
    way: str, is_keyed: bool, settings: Any
) -> None:
    """Its lease is not renewed, and has ended once all the others have been renewed twice."""
    settings.OUTBOX = {"LEASE": 1.0}
    keys = [f"key-{number}" for number in range(8)]
    ids = [keyed(key)[0] for key in keys] if is_keyed else write(8)
    lost, kept, bad = (keys if is_keyed else ids)[4:7]
    rows, end = (
        (OutboxStream.objects, "due_at") if is_keyed else (OutboxEvent.objects, "available_at")
    )

    def work(events: list[outbox.Event]) -> None:
        if len(bulk.batches) == 1:
            until = rows.values_list(end, flat=True).get(pk=lost) + timedelta(seconds=1.0)
            rows.filter(pk=lost).update(**{"locked_by": "thief", end: now() + timedelta(hours=1)})
            wait_until(lambda: rows.filter(pk=kept, **{f"{end}__gt": until}).exists())
        if bad in [each.key or each.event_id for each in events]:
            raise LookupError(bad)

    bulk = Bulk(work)
    with listening(in_each_way(bulk, way), batch=8, within=1.0, retry=FAR):
        deliver(way, lambda: [*statuses().values()].count(Status.NEW) == 1)
    assert bulk.sizes[0] == 8
    assert ids[4] not in bulk.ids[8:]
    assert {statuses()[each] for each in ids if each not in (ids[4], ids[6])} == {Status.DONE}
    assert {each.status for each in OutboxEvent.objects.filter(pk=ids[4])} == {Status.NEW}


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


@contextmanager
def failing(subject: Any) -> Iterator[None]:
    if len(subject) > 2:
        raise LookupError("not so many")
    yield
    raise ValueError("at its end")


failing.batch = True  # type: ignore[attr-defined]


@outside
@everywhere
def test_an_interceptor_that_fails_at_its_begin_fails_the_call(run: str, settings: Any) -> None:
    settings.OUTBOX = {"INTERCEPTORS": [f"{__name__}.failing"]}
    write(4)
    bulk = Bulk()
    with listening(bulk, batch=4, within=1.0, retry=FAR):
        deliver(run, all_are(Status.DONE))
    assert bulk.sizes == [2, 2]


# -- keys ------------------------------------------------------------------------------------------


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
@everywhere
@pytest.mark.parametrize("on_dead", ["block", "continue"])
@pytest.mark.parametrize("atomic", [False, True])
def test_order_holds_beside_dead_events(
    run: str, on_dead: str, atomic: bool, settings: Any
) -> None:
    settings.OUTBOX = {"ON_DEAD": on_dead}
    ids = {key: keyed(key, 6) for key in "abc"}
    done: list[str] = []

    def work(events: list[outbox.Event]) -> list[Any]:
        stopped, answers = set(), list[Any]()
        for each in events:
            if each.event_id == ids["b"][2]:
                stopped.add(each.key)
            elif each.key not in stopped:
                done.append(each.event_id)
            answers.append(outbox.Dead("no") if each.event_id == ids["b"][2] else None)
        return answers

    with listening(work, batch=10, per_key=4, atomic=atomic):
        left = ids["b"][3:] if on_dead == "block" else []
        others = {each for some in ids.values() for each in some} - {*left, ids["b"][2]}
        deliver(run, lambda: all(statuses()[each] == Status.DONE for each in others))
    assert statuses()[ids["b"][2]] == Status.DEAD
    for key, expected in ids.items():
        assert [each for each in done if each in expected] == [
            each for each in expected if each in others
        ], key
    assert [statuses()[each] for each in left] == [Status.NEW] * len(left)


@outside
@everywhere
def test_without_stopping_at_a_failure_others_of_a_key_go_on(run: str, settings: Any) -> None:
    settings.OUTBOX = {"STOP_ON_FIRST_FAILURE": False}
    ids = keyed("a", 6)
    bulk = Bulk(
        lambda events: [LookupError("no") if each.event_id == ids[1] else None for each in events]
    )
    with listening(bulk, batch=6, per_key=6, retry=FAR):
        deliver(run, lambda: [*statuses().values()].count(Status.DONE) == 5)
    assert statuses()[ids[1]] == Status.RETRY
    assert attempts() == {each: int(each == ids[1]) for each in ids}


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


@outside
def test_a_failing_key_opens_the_breaker(settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"default": {"BREAKER": {"failures": 1, "pause": 60}}}}
    keyed("a", 3)
    bulk = Bulk(lambda events: [ConnectionError("away")] * len(events))
    with listening(bulk, batch=3, per_key=3, retry=FAR), working():
        wait_until(lambda: OutboxPause.objects.filter(kind="breaker").exists())


@outside
def test_an_unrecoverable_error_does_not_open_the_breaker(settings: Any) -> None:
    """The partner has answered, even if it is not known yet which event it refuses."""
    settings.OUTBOX = {"QUEUES": {"default": {"BREAKER": {"failures": 1, "pause": 60}}}}
    ids = write(4)

    def work(events: list[outbox.Event]) -> None:
        if ids[1] in ids_of(events):
            raise outbox.Unrecoverable("no")

    bulk = Bulk(work)
    with listening(bulk, batch=4, within=1.0), working():
        wait_until(lambda: {*statuses().values()} == {Status.DONE, Status.DEAD})
    assert bulk.sizes == [4, 2, 2, 1, 1]
    assert not OutboxPause.objects.exists()


# -- atomic listeners ------------------------------------------------------------------------------


@outside
@everywhere
def test_a_commit_that_fails_counts_once_beside_other_listeners(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django_outbox.delivery import batch

    settle, calls = batch.settle_together, list[int]()

    def settle_and_fail(*args: Any, **options: Any) -> bool:
        settle(*args, **options)
        calls.append(1)
        raise DatabaseError("the commit failed")

    monkeypatch.setattr(batch, "settle_together", settle_and_fail)
    (only,) = write(1)
    bulk = Bulk(lambda events: [LookupError("no")])
    with (
        listening(lambda event: None, name="one"),
        listening(bulk, name="bulk", batch=5, atomic=True, retry=FAR),
    ):
        deliver(run, all_are(Status.RETRY))
    assert calls == [1]
    assert attempts() == {only: 1}


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


@outside
@everywhere
def test_an_atomic_listener_has_atomic_fallbacks(run: str) -> None:
    ids = write(4)
    bulk = Bulk(
        lambda events: [
            outbox.Unrecoverable("no") if each.event_id in ids[:2] else None for each in events
        ]
    )
    with listening(bulk, batch=4, atomic=True):
        registry.fallback(bulk, lambda event, failure: note_all([event]))
        deliver(run, all_are(Status.DONE))
    assert sorted(Effect.objects.values_list("event_id", flat=True)) == sorted(ids[:2])


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
            wait_until(
                lambda: (
                    all(row(each).locked_by is None for each in ids)
                    and row(ids[0]).available_at > now() + timedelta(seconds=1)
                )
            )
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
        with (
            pytest.raises(AssertionError, match="1 events failed"),
            listening(Bulk(lambda events: [LookupError("no")]), name="bad", batch=2, retry=FAR),
        ):
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
