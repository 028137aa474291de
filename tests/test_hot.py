"""The way of an event from a commit to a listener of the same process."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.backends.signals import connection_created
from django.test import Client

import django_outbox as outbox
from django_outbox import signals
from django_outbox.models import OutboxEvent, OutboxWorker
from django_outbox.worker import gate, ready
from django_outbox.worker.polling import ClaimThrottle, Wakeup
from tests.surroundings import heard
from tests.table import PLACED, insert, listening, now, statuses, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


# -- what goes wrong -------------------------------------------------------------------------------


def test_j3_354_a_full_hot_queue_is_no_error_and_loses_nothing(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = quiet(
        HOT_QUEUE_CAPACITY=1, WORKERS=1, COLD_QUEUE_CAPACITY=1, ASYNC_CONCURRENCY=1
    )
    started, go_on = threading.Event(), threading.Event()

    def hold(event: outbox.Event) -> None:
        started.set()
        go_on.wait(30)

    calls = Calls(hold)
    with caplog.at_level(logging.WARNING, "django_outbox"), listening(calls), outbox.Worker():
        try:
            with heard(signals.event_dropped) as dropped:
                ids = write(60) + [each for _ in range(20) for each in write()]
            assert started.wait(15)
            assert OutboxEvent.objects.pending().count() == 80
        finally:
            go_on.set()
        wait_until(settled(80), what="DONE")
    assert calls.once_each(ids)
    assert dropped
    assert {"hot", "cold"} == {*calls.sources}
    assert any("hot queue" in each.getMessage() for each in caplog.records)


def test_x6_a_foreign_callback_that_raises_before_ours(settings: Any) -> None:
    """Django drops the callbacks that follow one that raised; the event is delivered at once."""
    settings.OUTBOX = quiet()

    def fail() -> None:
        raise LookupError("a callback of somebody else")

    calls = Calls()
    with listening(calls), outbox.Worker():
        with pytest.raises(LookupError), transaction.atomic():
            transaction.on_commit(fail)
            event_id = outbox.write(PLACED)
        wait_until(settled(1), what="DONE")
        assert calls.ids == [event_id]
        with pytest.raises(LookupError), transaction.atomic():
            outbox.write(PLACED)
            transaction.on_commit(fail)  # after ours
        wait_until(settled(2), what="DONE")
    assert len({*calls.ids}) == len(calls.ids) == 2


@pytest.mark.urls("tests.reach.urls")
def test_x6_atomic_requests(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.OUTBOX = quiet()
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    client, calls = Client(raise_request_exception=False), Calls()
    with listening(calls, "reach.noted"), resting():
        assert client.post("/fail").status_code == 500
        answer = client.post("/bare")
        assert answer.status_code == 200
        wait_until(settled(1), what="DONE")
    assert calls.ids == answer.json()["ids"]
    assert calls.sources == ["hot"]


# -- a full queue ----------------------------------------------------------------------------------


def test_a_full_hot_queue_is_told_once_a_minute_and_for_each_queue(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 5000.0
    monkeypatch.setattr(ready, "monotonic", lambda: now)
    one, other = (
        ready.Offers(2, most_bytes=10**6, lock=nullcontext(), wakeup=Wakeup()) for _ in range(2)
    )

    def offer(queue: ready.Offers, count: int) -> int:
        """Offer events; return the number of log lines so far."""
        with caplog.at_level(logging.WARNING, "django_outbox"):
            for _ in range(count):
                event = outbox.Event(event_type=PLACED)
                queue.offer(ready.Offer(event.event_id, PLACED, event))
        lines = [each.getMessage() for each in caplog.records]
        assert {*lines} <= {"hot queue full; further events arrive by the cold route capacity=2"}
        return len(lines)

    assert offer(one, 2) == 0
    assert offer(one, 50) == 1
    now += 59
    assert offer(one, 50) == 1
    assert offer(other, 3) == 2  # each queue logs separately
    now += 1
    assert offer(one, 50) == 3
    assert offer(other, 1) == 3
    one.take(1)
    now += 60
    assert offer(one, 1) == 3  # the queue has capacity again


def test_158_a_nearer_due_time_wakes_the_claimer_that_waits_for_a_later_one(settings: Any) -> None:
    settings.OUTBOX = quiet()
    calls = Calls()
    with listening(calls), resting():
        with transaction.atomic():
            outbox.write(PLACED, deliver_after=3600)
        with transaction.atomic():
            near = outbox.write(PLACED, deliver_after=0.3)
        wait_until(lambda: calls.ids, what="the nearer one")
    assert calls.ids == [near]


# -- sharing ---------------------------------------------------------------------------------------


def test_j15_hot_and_cold_share_two_to_one(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one slot and one thread each claim takes one event, so the order shows the claims."""
    monkeypatch.setattr(gate, "BUSY_AFTER", 3600)  # seconds; the hold is longer at times
    settings.OUTBOX = quiet(WORKERS=1, COLD_QUEUE_CAPACITY=1, ASYNC_CONCURRENCY=1)
    started, go_on = threading.Event(), threading.Event()

    def hold_the_first(event: outbox.Event) -> None:
        if event.payload == "first":
            started.set()
            go_on.wait(30)

    calls = Calls(hold_the_first)
    with listening(calls), resting() as worker:
        try:
            write(payload="first")
            assert started.wait(15)
            insert(30)
            write(60)
            worker.poll()
        finally:
            go_on.set()
        wait_until(settled(91), within=40, what="DONE")
    assert len({*calls.ids}) == len(calls.ids)
    mixed = calls.sources[6:66]  # both had events; without those claimed during the hold
    assert 36 <= mixed.count("hot") <= 44
    runs = "".join(each[0] for each in mixed)
    assert "hhhh" not in runs
    assert "ccc" not in runs


# -- polls take turns ------------------------------------------------------------------------------


def test_workers_of_one_table_poll_about_one_at_a_time() -> None:
    """A notification wakes all workers; fifty polls cost the database as much as many events."""
    alone, among_four = ClaimThrottle(), ClaimThrottle()
    began = time.monotonic()
    for _ in range(1000):
        alone.count_poll(0.01, others=0)
        among_four.count_poll(0.01, others=3)
    assert alone.next_poll() < time.monotonic()
    assert 25 < among_four.next_poll() - began < 35  # seconds, for 10 s of polling of its own


def test_the_heartbeat_tells_a_worker_how_many_others_there_are() -> None:
    OutboxWorker.objects.create(
        id="other",
        hostname="elsewhere",
        pid=1,
        started_at=now(),
        heartbeat_at=now(),
        info='{"streams": 0}',
    )
    with outbox.Worker() as worker:
        wait_until(lambda: worker._gates.others == 1, what="the other is known")


def test_polls_wait_for_their_turn_but_offered_events_do_not(settings: Any) -> None:
    settings.OUTBOX = quiet()
    with listening(lambda event: None), outbox.Worker() as worker:
        at_rest(worker)
        worker._engine.claimer._throttle._turn = time.monotonic() + FAR
        insert(due=-1)
        worker.poll()
        write(2)
        wait_until(lambda: statuses() == {"NEW": 1, "DONE": 2}, what="what was offered, at once")
        worker._engine.claimer._throttle._turn = 0.0
        worker.poll()
        wait_until(lambda: statuses() == {"DONE": 3}, what="the rest in its turn")


FAR = 60.0  # seconds: no poll and no probe can explain what a test observes


class Calls:
    """A listener that keeps the events it received."""

    def __init__(self, then: Callable[[outbox.Event], object] = lambda event: None) -> None:
        self.events: list[outbox.Event] = []
        self._then = then

    def __call__(self, event: outbox.Event) -> object:
        self.events.append(event)
        return self._then(event)

    @property
    def ids(self) -> list[str]:
        return [event.event_id for event in self.events]

    @property
    def sources(self) -> list[str]:
        return [event.source for event in self.events]

    def once_each(self, ids: list[str]) -> bool:
        return Counter(self.ids) == Counter(ids)


@contextmanager
def engine_statements() -> Iterator[list[tuple[str, Any]]]:
    """Collect the statements of every connection that other threads open."""
    seen: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        seen.append((sql, params))
        return execute(sql, params, many, context)

    def made(connection: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            connection.execute_wrappers.append(note)

    connection_created.connect(made)
    try:
        yield seen
    finally:
        connection_created.disconnect(made)


def quiet(**more: Any) -> dict[str, Any]:
    """Return settings under which a worker polls only when it is notified."""
    return {"DOORBELL": None, "POLL_INTERVAL": FAR, "PROBE_INTERVAL": FAR, **more}


def at_rest(worker: outbox.Worker) -> bool:
    """Wait until the worker's first poll is over; from then on only a wakeup makes it poll."""
    return wait_until(
        lambda: worker._gates.by_queue["default"].poll_at > time.monotonic() + FAR / 2,
        what="a worker at rest",
    )


@contextmanager
def resting() -> Iterator[outbox.Worker]:
    with outbox.Worker() as worker:
        at_rest(worker)
        yield worker


def settled(count: int) -> Callable[[], bool]:
    return lambda: statuses() == {"DONE": count}


def test_j2_the_payload_in_memory_is_delivered_without_reading_it_again(settings: Any) -> None:
    """The row changes between the write and the commit, so a second read would show."""
    settings.OUTBOX = quiet()
    calls = Calls()
    with engine_statements() as seen, listening(calls), resting():
        with transaction.atomic():
            event_id = outbox.write(PLACED, {"sku": "in memory"})
            OutboxEvent.objects.filter(pk=event_id).update(payload='{"sku": "in the table"}')
        wait_until(settled(1), what="DONE")
    (event,) = calls.events
    assert (event.source, event.payload) == ("hot", {"sku": "in memory"})
    claims = [sql for sql, params in seen if event_id in repr(params)]  # PostgreSQL takes arrays
    assert claims
    assert not [sql for sql in claims if "payload" in sql]


def test_each_listener_gets_its_row_by_the_hot_way_in_the_thread_of_its_queue(
    settings: Any,
) -> None:
    settings.OUTBOX = quiet(QUEUES={"hooks": {}})
    threads: dict[str, str] = {}

    def note(event: outbox.Event) -> None:
        threads[event.event_id] = threading.current_thread().name

    local, hook = Calls(), Calls(note)
    with (
        listening(local, name="local"),
        listening(hook, name="hook", queue="hooks"),
        heard(signals.event_dropped) as dropped,
        resting(),
    ):
        ids = write(5)
        wait_until(settled(10), what="DONE")
    assert (local.sources, hook.sources, dropped) == (["hot"] * 5, ["hot"] * 5, [])
    assert local.once_each(ids)
    assert hook.once_each(ids)
    assert all(name.startswith("outbox-default-hooks-") for name in threads.values())


def test_an_event_that_the_worker_routes_takes_the_hot_way_to_its_first_listener(
    settings: Any,
) -> None:
    settings.OUTBOX = quiet(ROUTE="worker")
    one, other = Calls(), Calls()
    with listening(one, name="one"), listening(other, name="other"), resting():
        ids = write(3)
        wait_until(settled(6), what="DONE")
    assert (one.sources, other.sources) == (["hot"] * 3, ["cold"] * 3)
    assert one.once_each(ids)
    assert other.once_each(ids)


def test_232_hot_and_cold_events_are_equal_but_for_their_source(settings: Any) -> None:
    settings.OUTBOX = quiet()
    fields = {
        "payload": {"b": 1, "a": [1.5, None, "é"]},
        "headers": {"trace": "t"},
        "tenant_id": "t-1",
        "aggregate_type": "shop.Order",
        "aggregate_id": "7",
        "unique_key": "u-1",
    }
    calls = Calls(lambda event: outbox.Defer(0.01) if event.source == "hot" else None)
    with listening(calls), resting():
        write(**fields)
        wait_until(settled(1), what="DONE")
    hot, cold = calls.events
    assert (hot.source, cold.source) == ("hot", "cold")
    for name in (*fields, "event_id", "event_type", "occurred_at", "created_at", "attempts", "key"):
        assert getattr(hot, name) == getattr(cold, name), name


@pytest.mark.parametrize(("poll", "delay"), [(FAR, 0.5), (0.1, 0.5)])
def test_g12_j6_a_delayed_event_is_not_offered_and_not_early_and_not_late(
    settings: Any, poll: float, delay: float
) -> None:
    settings.OUTBOX = quiet(POLL_INTERVAL=poll, PROBE_INTERVAL=poll)
    times = []
    calls = Calls(lambda event: times.append(now()))
    with heard(signals.event_queued) as offered, listening(calls), outbox.Worker():
        with transaction.atomic():
            outbox.write(PLACED, deliver_after=delay)
        wait_until(settled(1), within=20, what="DONE")
    assert not offered
    (event,) = calls.events
    assert event.source == "cold"
    assert event.is_delayed
    assert event.deliver_at is not None
    assert times[0] >= event.deliver_at


def test_an_event_of_a_slot_is_not_offered_and_its_worker_polls(settings: Any) -> None:
    settings.OUTBOX = quiet()
    calls = Calls()
    with heard(signals.event_queued) as offered, listening(calls), outbox.Worker():
        ids = write(3, coalesce="index")
        wait_until(settled(3), within=20, what="DONE")
    assert not offered
    assert calls.ids[-1] == ids[-1]


def test_g12_a_delayed_event_written_elsewhere_is_found_by_its_due_time(settings: Any) -> None:
    """No notification announces it, so the poll that sees it coming must schedule the wakeup."""
    settings.OUTBOX = quiet()
    (event_id,) = insert(due=1.0)
    calls = Calls()
    with listening(calls), outbox.Worker():
        wait_until(settled(1), within=20, what="DONE")
    assert calls.ids == [event_id]


def test_29_an_event_that_is_offered_and_due_runs_once(settings: Any) -> None:
    """Both routes see every event, because the claimer polls without a pause."""
    settings.OUTBOX = quiet(PROBE_INTERVAL=0.001, POLL_INTERVAL=0.001)
    calls = Calls()
    with listening(calls), outbox.Worker():
        ids = [each for _ in range(60) for each in write(3)]
        wait_until(settled(180), what="DONE")
    assert calls.once_each(ids)


def test_j5_one_callback_for_everything_a_transaction_wrote(settings: Any) -> None:
    settings.OUTBOX = quiet()
    calls = Calls()
    with listening(calls), resting():
        with transaction.atomic():
            ids = outbox.write_many([outbox.Event(event_type=PLACED) for _ in range(50)])
            ids += [str(outbox.write(PLACED)), str(outbox.write(PLACED))]
            assert len(connection.run_on_commit) == 1
        wait_until(settled(52), what="DONE")
    assert calls.once_each(ids)
    assert {*calls.sources} == {"hot"}
