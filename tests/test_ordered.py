"""Events with a key are delivered in order through failures, delays, lost workers, late commits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream, OutboxWorker
from django_outbox.signals import event_rescued, event_settled
from django_outbox.sql import dialect_of
from django_outbox.sql.values import Branch, StreamClaim
from django_outbox.worker.stream_claims import MAX_EVENTS
from tests.table import (
    end_stream_leases,
    keyed,
    listening,
    now,
    row,
    statuses,
    stream,
    stream_due_in,
    write,
)
from tests.waiting import MovedClock, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

QUICK = {
    "POLL_INTERVAL": 0.3,
    "PROBE_INTERVAL": 0.05,
    "DRAIN_TIMEOUT": 1,
    "RETRY": {"policy": "fixed", "delay": 0.05, "max_attempts": 5},
}


@contextmanager
def worker(**settings: Any) -> Iterator[outbox.Worker]:
    with override_settings(OUTBOX={**QUICK, **settings}), outbox.Worker(purge=False) as running:
        yield running


class Seen:
    """A listener that records its events and returns or raises the given answers."""

    def __init__(self, **answers: Any) -> None:
        self.order: dict[str, list[int]] = defaultdict(list)
        self.ids: list[str] = []
        self.answers = {key: [*each] for key, each in answers.items()}
        self._lock = threading.Lock()

    def __call__(self, event: outbox.Event) -> Any:
        assert event.key is not None
        with self._lock:
            self.ids.append(event.event_id)
            self.order[event.key].append(event.payload["n"])
            told = self.answers.get(f"n{event.payload['n']}", [])
            answer = told.pop(0) if told else None
        if isinstance(answer, Exception):
            raise answer
        return answer


def put(key: str, count: int, first: int = 0) -> list[str]:
    with transaction.atomic():
        return outbox.write_many(
            [
                outbox.Event(event_type="order.placed", payload={"n": n}, key=key)
                for n in range(first, first + count)
            ]
        )


def all_done(within: float = 20) -> None:
    wait_until(lambda: [*statuses()] == ["DONE"], within=within, what="all done")


def idle() -> bool:
    """Return whether no stream is leased or due."""
    return not OutboxStream.objects.exclude(due_at=None, locked_by=None).exists()


def test_keys_are_delivered_in_parallel_and_events_of_a_key_are_not() -> None:
    """The listener waits until the heads of three keys run at once."""
    together, running, met = threading.Barrier(3), set[str](), list[str]()

    def meet(event: outbox.Event) -> None:
        assert event.key is not None
        met.extend({event.key} & running)
        running.add(event.key)
        together.wait(20)
        running.discard(event.key)
        seen(event)

    seen = Seen()
    for key in "abc":
        put(key, 5)
    with listening(meet), worker(WORKERS=9):
        all_done()
    assert (seen.order, met) == ({key: [*range(5)] for key in "abc"}, [])


def test_an_idle_stream_is_woken_by_a_write() -> None:
    seen = Seen()
    with listening(seen), worker(POLL_INTERVAL=30, PROBE_INTERVAL=30):
        for n in range(5):
            put("a", 1, n)
            wait_until(lambda n=n: len(seen.ids) == n + 1, within=5)  # type: ignore[misc]
            wait_until(idle)
    assert seen.order == {"a": [0, 1, 2, 3, 4]}


PASS: dict[str, Any] = {"STOP_ON_FIRST_FAILURE": False}


@pytest.mark.parametrize(
    ("answers", "given", "order", "ended"),
    [
        ([ValueError("once"), ValueError("twice")], {}, [0, 1, 1, 1, 2, 3], {"DONE": 4}),
        ([outbox.RetryAfter(1)], PASS, [0, 1, 2, 3, 1], {"DONE": 4}),
        ([outbox.Defer(0.05), outbox.Defer(0.05)], {}, [0, 1, 1, 1, 2, 3], {"DONE": 4}),
        ([outbox.Defer(0.05), outbox.Defer(0.05)], PASS, [0, 1, 1, 1, 2, 3], {"DONE": 4}),
        ([outbox.Dead("no")], {}, [0, 1, 2, 3], {"DONE": 3, "DEAD": 1}),
    ],
    ids=["failed", "failed, passed", "deferred", "deferred, not passed", "dead"],
)
def test_n2_the_order_behind_an_event_that_is_not_done(
    answers: list[Any], given: dict[str, Any], order: list[int], ended: dict[str, int]
) -> None:
    seen = Seen(n1=answers)
    put("a", 4)
    put("b", 2, 10)
    with listening(seen), worker(**given):
        wait_until(lambda: statuses() == {**ended, "DONE": ended["DONE"] + 2})
        wait_until(idle)
    assert seen.order == {"a": order, "b": [10, 11]}


def test_the_stream_is_due_when_its_head_is() -> None:
    seen = Seen(n0=[outbox.RetryAfter(60)])
    first, second = put("a", 2)
    with listening(seen), worker():
        wait_until(lambda: row(first).status == Status.RETRY)
        wait_until(lambda: stream("a").locked_by is None)
        put("b", 3, 10)
        wait_until(lambda: len(seen.order["b"]) == 3)
    assert 50 < stream_due_in("a") <= 60
    assert row(first).available_at is None
    assert row(second).status == Status.NEW


@pytest.mark.parametrize("end", ["replay", "discard"])
def test_a_dead_head_blocks_its_stream_on_demand(end: str) -> None:
    seen = Seen(n1=[outbox.Dead("no")])
    ids = put("a", 3)
    with listening(seen), worker(ON_DEAD="block"):
        wait_until(lambda: statuses() == {"DONE": 1, "NEW": 1, "DEAD": 1})
        wait_until(idle)
        put("a", 1, 3)  # the write makes the stream due, but the claim finds it blocked
        put("b", 1)
        wait_until(lambda: seen.order["b"] == [0])
        wait_until(idle)
        assert seen.order["a"] == [0, 1]
        getattr(OutboxEvent.objects.filter(pk=ids[1]), end)()
        all_done()
    again = [1] if end == "replay" else []
    assert seen.order["a"] == [0, 1, *again, 2, 3]


@pytest.mark.parametrize("behind", ["nothing", "a failure"])
def test_a_retry_before_a_dead_one_that_blocks_is_not_forgotten(behind: str) -> None:
    """A dead event has no due time; if it replaced that of the retry, the stream would be stuck."""
    seen = Seen(n0=[ValueError("once")], n1=[outbox.Dead("no")])
    ids = put("a", 3)
    if behind == "a failure":  # it is behind the dead event, so nothing may wait for it
        OutboxEvent.objects.filter(pk=ids[2]).update(status=Status.RETRY, deliver_at=now())
    with listening(seen), worker(ON_DEAD="block", STOP_ON_FIRST_FAILURE=False):
        left = "RETRY" if behind == "a failure" else "NEW"
        wait_until(lambda: statuses() == {"DONE": 1, left: 1, "DEAD": 1})
        wait_until(idle)
    assert seen.order["a"] == [0, 1, 0]


def test_a_stop_hands_the_streams_over_at_once() -> None:
    running, go = threading.Event(), threading.Event()

    def wait(event: outbox.Event) -> None:
        running.set()
        go.wait(20)

    put("a", 5)
    put("b", 5)
    with listening(wait), worker(WORKERS=1, LEASE=30, DRAIN_TIMEOUT=10) as one:
        running.wait(20)
        stopping = threading.Thread(target=one.stop)
        stopping.start()
        go.set()
        stopping.join(20)
    assert statuses() == {"DONE": 1, "NEW": 9}
    assert OutboxStream.objects.exclude(locked_by=None).count() == 0
    assert OutboxStream.objects.filter(due_at__lte=now()).count() == 2


# -- blocked streams and lost leases ---------------------------------------------------------------


def test_an_unroutable_head_holds_its_stream_and_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """During the grace it is deferred, which costs no attempt, and shown as blocked."""
    seen, started = Seen(), []

    def note(*, event: outbox.Event, outcome: str, **facts: Any) -> None:
        started.append((event.event_type, outcome))

    (head,) = write(event_type="order.unheard_of", key="a")
    put("a", 2)
    put("b", 2, 10)
    event_settled.connect(note)
    try:
        with caplog.at_level("INFO", "django_outbox"), listening(seen), worker(UNROUTABLE_GRACE=60):
            wait_until(lambda: len(seen.order["b"]) == 2)
            for _ in range(3):
                wait_until(lambda: started.count(("order.unheard_of", "deferred")) > 0)
                wait_until(lambda: stream("a").locked_by is None)
                started.clear()
                OutboxEvent.objects.filter(pk=head).update(deliver_at=None)
                end_stream_leases("a")
            wait_until(lambda: [each.key for each in OutboxStream.objects.blocked()] == ["a"])
    finally:
        event_settled.disconnect(note)
    assert (row(head).status, row(head).attempts, seen.order["a"]) == (Status.NEW, 0, [])
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len([each for each in warnings if "order.unheard_of" in each]) == 1


def test_an_unroutable_head_past_its_grace_is_dead_and_its_stream_goes_on() -> None:
    seen = Seen()
    (head,) = write(event_type="order.unheard_of", key="a")
    put("a", 2)
    OutboxEvent.objects.filter(pk=head).update(first_due_at=now() - timedelta(seconds=61))
    with listening(seen), worker(UNROUTABLE_GRACE=60):
        wait_until(lambda: seen.order["a"] == [0, 1])
    assert row(head).status == Status.DEAD


def test_an_async_listener_past_its_timeout_is_retried_in_place(clock: MovedClock) -> None:
    async def wait(event: outbox.Event) -> None:
        seen(event)
        if event.payload["n"] == 1 and not event.attempts:
            clock.advance(6)
            await asyncio.Event().wait()

    seen = Seen()
    ids = put("a", 4)
    with listening(wait, timeout=5), worker():
        all_done()
    assert seen.order["a"] == [0, 1, 1, 2, 3]
    assert [row(each).attempts for each in ids] == [0, 1, 0, 0]
    assert "ListenerTimeout" in str(row(ids[1]).last_error)


def test_after_a_refused_settle_nothing_of_the_stream_is_started() -> None:
    """The refusal alone must stop the worker: its next heartbeat is far off."""

    def steal(event: outbox.Event) -> None:
        seen(event)
        if event.key == "a":
            OutboxStream.objects.filter(key="a").update(
                locked_by="another", due_at=now() + timedelta(seconds=60)
            )
            time.sleep(0.01)  # long enough for the worker to wait for the settle

    seen = Seen()
    put("a", 5)
    with listening(steal), worker(LEASE=60, WORKERS=1):
        wait_until(lambda: seen.order["a"])
        for n in range(3):
            put("b", 1, first=n)
            wait_until(lambda n=n: len(seen.order["b"]) > n)  # type: ignore[misc]
    assert seen.order["a"] == [0]
    assert (stream("a").locked_by, statuses()) == ("another", {"DONE": 3, "NEW": 5})


def test_long_streams_do_not_starve_short_ones() -> None:
    done_before: list[int] = []

    def look(event: outbox.Event) -> None:
        seen(event)
        if event.key and event.key.startswith("long"):
            time.sleep(0.002)  # the listener's work
        elif len(seen.order) == 54:
            done_before.append(sum(len(each) for key, each in seen.order.items() if "long" in key))

    seen = Seen()
    for n in range(4):
        put(f"long-{n}", 300)
    for n in range(50):
        put(f"short-{n}", 1)
    with listening(look), worker(WORKERS=4):
        all_done(60)
    assert min(done_before) < 1200 / 2
    assert all(seen.order[f"long-{n}"] == [*range(300)] for n in range(4))


def test_what_is_left_to_others_and_not_taken_comes_back() -> None:
    """Streams left to a worker that claims nothing come back: its row guides only the sharing."""
    seen, given = Seen(), []
    OutboxWorker.objects.create(
        id="idle",
        hostname="h",
        pid=1,
        started_at=now(),
        heartbeat_at=now() + timedelta(seconds=60),
        info='{"mode": "multi_node", "held": 0, "streams": 0}',
    )

    def slow(event: outbox.Event) -> None:
        seen(event)
        time.sleep(0.02)  # the listener's work

    for key in "abcdefgh":
        put(key, 30)
    with listening(slow), worker(LEASE=1.5, WORKERS=2, POLL_INTERVAL=60, MODE="multi_node"):
        wait_until(lambda: OutboxStream.objects.leased().count() == 8)
        given.append(wait_until(lambda: OutboxStream.objects.due().filter(locked_by=None).count()))
        all_done()
    assert 0 < given[0] <= 4
    assert seen.order == {key: [*range(30)] for key in "abcdefgh"}


def test_a_stream_claimed_again_while_it_is_released_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The claimer may claim it before the settler has recorded the release that it committed."""
    dialect, seen, met = type(dialect_of(connection)), Seen(), []
    release = dialect.release_streams

    def released(self: Any, connection: Any, *, me: str, streams: Any) -> set[str]:
        freed: set[str] = release(self, connection, me=me, streams=streams)
        if freed and OutboxEvent.objects.pending().exists() and not met:
            running.poll()
            wait_until(lambda: stream("a").locked_by)
            met.append(freed)
        return freed

    monkeypatch.setattr(dialect, "release_streams", released)
    put("a", MAX_EVENTS + 8)
    with listening(seen), worker(LEASE=60) as running:
        all_done()
    assert met == [{"a"}]
    assert seen.order["a"] == [*range(MAX_EVENTS + 8)]


# -- lost workers ----------------------------------------------------------------------------------


def lose(me: str = "a lost worker", **columns: Any) -> None:
    """Claim every stream as a worker that is lost afterwards."""
    wanted = StreamClaim(me=me, lease=30, branches=[Branch("default", 100)])
    keys = [key for key, *_ in dialect_of(connection).claim_streams(connection, wanted).rows]
    end_stream_leases(*keys)


def test_events_of_a_lost_worker_are_run_one_by_one() -> None:
    rescued: list[tuple[str, int]] = []
    counts: list[int] = []

    def note(*, event: outbox.Event, rescues: int, **facts: Any) -> None:
        rescued.append((event.event_id, rescues))

    def look(event: outbox.Event) -> None:
        counts.append(row(event.event_id).rescues)

    ids = put("a", 3)
    lose()
    event_rescued.connect(note)
    try:
        with listening(look), worker():
            all_done()
    finally:
        event_rescued.disconnect(note)
    assert counts == [1, 1, 1]
    assert rescued == [(each, 1) for each in ids]


def test_after_max_rescues_the_head_is_dead_without_being_run() -> None:
    seen = Seen()
    bad, good = keyed("a", 2, payload='{"n": 0}')
    OutboxEvent.objects.filter(pk=bad).update(rescues=4)
    lose()
    with listening(seen), worker():
        wait_until(lambda: statuses() == {"DONE": 1, "DEAD": 1})
    assert row(bad).last_error == "lost 5 workers"
    assert seen.ids == [good]


# -- drain() ---------------------------------------------------------------------------------------


@pytest.fixture(params=["outside", "inside"])
def place(request: Any) -> Any:
    """Return where ``drain()`` is called: inside a transaction, as in a TestCase, or outside."""
    return transaction.atomic if request.param == "inside" else ExitStack


@override_settings(OUTBOX=QUICK)
def test_drain_keeps_to_its_limit(place: Any) -> None:
    seen = Seen()
    put("a", 10)
    with listening(seen), place():
        assert outbox.drain(limit=4) == 4
        assert outbox.drain(limit=1) == 1
        assert outbox.drain() == 5
    assert seen.order == {"a": [*range(10)]}
    assert idle()


@override_settings(OUTBOX=QUICK)
def test_drain_delivers_what_a_listener_writes_to_the_same_key(place: Any) -> None:
    seen: list[int] = []

    def follow(event: outbox.Event) -> None:
        seen.append(event.payload["n"])
        if event.payload["n"] < 3:
            put("a", 1, event.payload["n"] + 1)

    put("a", 1)
    with listening(follow), place():
        assert outbox.drain() == 4
    assert seen == [0, 1, 2, 3]
    assert idle()


@override_settings(OUTBOX=QUICK)
def test_drain_runs_nothing_twice_after_a_delay_of_zero(place: Any) -> None:
    seen = Seen(n0=[outbox.Defer(0), outbox.Defer(0)])
    put("a", 2)
    with listening(seen), place():
        assert outbox.drain() == 1
        assert outbox.drain() == 1
        assert outbox.drain() == 2
    assert seen.order == {"a": [0, 0, 0, 1]}


@override_settings(OUTBOX=QUICK)
def test_drain_goes_by_the_instant_that_it_is_given(place: Any) -> None:
    seen = Seen(n0=[outbox.Defer(60)])
    put("a", 2)
    with listening(seen), place():
        assert outbox.drain() == 1
        assert outbox.drain() == 0
        assert outbox.drain(at=now() + timedelta(seconds=90)) == 2
    assert seen.order == {"a": [0, 0, 1]}


@override_settings(OUTBOX=QUICK)
def test_drain_runs_a_suspect_too(place: Any) -> None:
    seen = Seen()
    keyed("a", payload='{"n": 0}', rescues=1)
    keyed("b", payload='{"n": 0}', rescues=4)
    with listening(seen), place():
        outbox.drain()
    assert seen.order == {"a": [0]}
    assert statuses() == {"DONE": 1, "DEAD": 1}
