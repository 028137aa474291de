"""The hot route, from the commit to a listener in the same process, and its safeguards."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.backends.signals import connection_created

import django_outbox as outbox
from django_outbox import signals
from django_outbox.models import OutboxEvent
from tests.reach.children import Site, workers_show
from tests.table import PLACED, insert, listening, now, row, statuses, write
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

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
def hearing(signal: Any) -> Iterator[list[dict[str, Any]]]:
    """Collect what a signal sends during a block."""
    heard: list[dict[str, Any]] = []

    def receive(**facts: Any) -> None:
        heard.append(facts)

    signal.connect(receive)
    try:
        yield heard
    finally:
        signal.disconnect(receive)


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
        lambda: worker._claimer._intakes["default"].poll_at > time.monotonic() + FAR / 2,
        what="a worker at rest",
    )


@contextmanager
def resting() -> Iterator[outbox.Worker]:
    with outbox.Worker() as worker:
        at_rest(worker)
        yield worker


def settled(count: int) -> Callable[[], bool]:
    return lambda: statuses() == {"DONE": count}


# -- from the commit to the listener ---------------------------------------------------------------


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


# -- what was undone -------------------------------------------------------------------------------


def by_api(sid: str) -> None:
    connection.savepoint_rollback(sid)


def by_sql(sid: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(connection.ops.savepoint_rollback_sql(sid))


@pytest.mark.parametrize("undo", [by_api, by_sql])
def test_65_a_raw_savepoint_rollback_makes_no_ghost(
    settings: Any, undo: Callable[[str], None]
) -> None:
    """Django does not notice it, so the undone event is offered; its claim finds no row."""
    settings.OUTBOX = quiet()
    calls = Calls()
    with hearing(signals.event_queued) as offered, listening(calls), resting():
        with transaction.atomic():
            sid = connection.savepoint()
            ghost = outbox.write(PLACED)
            undo(sid)
            real = outbox.write(PLACED)
        wait_until(settled(1), what="DONE")
        last = write()[0]  # a claimed ghost would have run before this one
        wait_until(settled(2), what="DONE")
    assert ghost in [each["event"].event_id for each in offered]
    assert calls.ids == [real, last]


def test_x5_a_savepoint_takes_only_its_own_events_along(settings: Any) -> None:
    settings.OUTBOX = quiet()
    calls = Calls()
    with hearing(signals.event_queued) as offered, listening(calls), resting():
        with transaction.atomic():
            before = outbox.write(PLACED)
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                outbox.write(PLACED)
                raise ZeroDivisionError
            with transaction.atomic():
                kept = outbox.write(PLACED)
            after = outbox.write(PLACED)
        wait_until(settled(3), what="DONE")
    expected = [str(before), str(kept), str(after)]
    assert sorted(each["event"].event_id for each in offered) == sorted(expected)
    assert calls.once_each(expected)
    assert {*calls.sources} == {"hot"}


def test_a_rolled_back_transaction_offers_nothing(settings: Any) -> None:
    settings.OUTBOX = quiet()
    calls = Calls()
    with hearing(signals.event_queued) as offered, listening(calls), resting():
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            outbox.write(PLACED)
            raise ZeroDivisionError
        (kept,) = write()
        wait_until(settled(1), what="DONE")
    assert [each["event"].event_id for each in offered] == calls.ids == [kept]


# -- delays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("poll", "delay"), [(FAR, 0.5), (0.1, 0.5)])
def test_g12_a_delayed_event_is_not_offered_and_not_early_and_not_late(
    settings: Any, poll: float, delay: float
) -> None:
    settings.OUTBOX = quiet(POLL_INTERVAL=poll, PROBE_INTERVAL=poll)
    times = []
    calls = Calls(lambda event: times.append(now()))
    with hearing(signals.event_queued) as offered, listening(calls), outbox.Worker():
        with transaction.atomic():
            outbox.write(PLACED, deliver_after=delay)
        wait_until(settled(1), within=20, what="DONE")
    assert not offered
    (event,) = calls.events
    assert event.source == "cold"
    assert event.is_delayed
    assert event.deliver_at is not None
    assert times[0] >= event.deliver_at


def test_g12_a_delayed_event_written_elsewhere_is_found_by_its_due_time(settings: Any) -> None:
    """No notification announces it, so the poll that sees it coming must schedule the wakeup."""
    settings.OUTBOX = quiet()
    (event_id,) = insert(due=1.0)
    calls = Calls()
    with listening(calls), outbox.Worker():
        wait_until(settled(1), within=20, what="DONE")
    assert calls.ids == [event_id]


# -- sharing ---------------------------------------------------------------------------------------


def test_29_an_event_that_is_offered_and_due_runs_once(settings: Any) -> None:
    """Both routes see every event, because the claimer polls without a pause."""
    settings.OUTBOX = quiet(PROBE_INTERVAL=0.001, POLL_INTERVAL=0.001)
    calls = Calls()
    with listening(calls), outbox.Worker():
        ids = [each for _ in range(60) for each in write(3)]
        wait_until(settled(180), what="DONE")
    assert calls.once_each(ids)


def test_j8_two_worker_processes_share_a_table(database_env: dict[str, str], tmp_path: Any) -> None:
    site = Site(database_env, tmp_path)
    small = {"POLL_BATCH_SIZE": 5, "COLD_QUEUE_CAPACITY": 5, "WORKERS": 2}
    with site.worker(**small) as one, site.worker(**small) as two:
        workers_show(2)
        with transaction.atomic():
            ids = outbox.write_many(
                outbox.Event(event_type="reach.slow", payload={"seconds": 0.01}) for _ in range(150)
            )
        wait_until(settled(150), within=40, what="DONE")
        assert [one.stop(), two.stop()] == [0, 0]
    ends = Effect.objects.filter(phase="end")
    assert Counter(ends.values_list("event_id", flat=True)) == Counter(ids)
    assert {*ends.values_list("pid", flat=True)} == {one.pid, two.pid}
    assert not any(row(each).locked_by for each in ids)
