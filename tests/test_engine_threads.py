"""The threads of a worker on SQLite: when they claim, how they end, what they log and purge."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.db.backends.signals import connection_created

import django_outbox as outbox
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import Decision, Status
from django_outbox.models import OutboxEvent
from django_outbox.worker import gate as gates
from django_outbox.worker.effects import perform
from django_outbox.worker.polling import Throttle
from tests.surroundings import gated, printed
from tests.table import PLACED, in_thread, insert, listening, now, statuses, steal, write
from tests.waiting import Gate, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def soon(settings: Any) -> None:
    settings.OUTBOX = SOON


FAR = 3600.0  # seconds; an interval that no test waits for


SOON = {"POLL_INTERVAL": 0.2, "PROBE_INTERVAL": 0.05, "LOCK_WAIT": 1}


LONG_AGO = timedelta(days=30)


DEAD = Decision(status=Status.DEAD, error="it is over", outcome="dead")


def far(**more: Any) -> dict[str, Any]:
    """Return settings under which a worker polls only when something triggers a poll."""
    return {"DOORBELL": None, "POLL_INTERVAL": FAR, "PROBE_INTERVAL": FAR, **more}


class Engine:
    """The connections that a worker's threads open during a block, and every statement on them."""

    def __init__(self) -> None:
        self.connects: list[tuple[str, Any]] = []  # (thread, what identifies its session)
        self.sent: list[tuple[str, bool, str, Any]] = []  # (thread, in a transaction, SQL, params)
        self.before: Callable[[str, str, Any], None] = lambda thread, sql, params: None
        self.broken: list[Any] = []  # SQLite's, each closed by the thread that uses it

        self._known: list[Any] = []

    def made(self, thread: str) -> list[Any]:
        return [each for name, each in self.connects if name.endswith(thread)]

    def _note(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        thread = threading.current_thread().name
        self.before(thread, sql, params)
        if (driver := context["connection"].connection) in self.broken:
            self.broken.remove(driver)
            driver.close()
        self.sent.append((thread, context["connection"].in_atomic_block, sql, params))
        return execute(sql, params, many, context)

    def _made(self, connection: Any, **facts: Any) -> None:
        if threading.current_thread().name.startswith("outbox-"):
            if not any(each is connection for each in self._known):
                self._known.append(connection)
                connection.execute_wrappers.append(self._note)
            session = session_of(connection)  # only this thread may use the driver's connection
            self.connects.append((threading.current_thread().name, session))


@contextmanager
def watched() -> Iterator[Engine]:
    engine = Engine()
    connection_created.connect(engine._made)
    try:
        yield engine
    finally:
        connection_created.disconnect(engine._made)


def engine_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("outbox-")]


def test_338_poll_and_probe_are_jittered_within_bounds(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Throttle, "after", lambda self, started: None)  # each poll is a full scan
    settings.OUTBOX = {"DOORBELL": None, "POLL_INTERVAL": 1000, "PROBE_INTERVAL": 100}
    worker, probes, polls = outbox.Worker(), [], []
    claimer, default = worker._engine.claimer, worker._gates.by_queue["default"]
    for _ in range(60):
        claimer._scan_at = 0.0
        claimer._wakeup.poll()
        started = time.monotonic()
        while perform(connection, claimer.step()) == 0:
            pass
        probes.append(default.poll_at - started)
        polls.append(claimer._scan_at - started)
    for pauses, interval in ((probes, 100), (polls, 1000)):
        assert 0.8 * interval <= min(pauses) < 0.95 * interval
        assert 1.05 * interval < max(pauses) <= 1.2 * interval + 5  # plus the queries' time


def test_266_a_full_claim_is_followed_by_the_next_at_once(settings: Any) -> None:
    settings.OUTBOX = far(POLL_BATCH_SIZE=5)
    insert(60, due=-1)
    with listening(lambda event: None), outbox.Worker(workers=2):
        wait_until(lambda: statuses() == {"DONE": 60}, what="twelve claims without a poll")


def test_227_a_large_first_number_comes_near_strict_priority(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "BUSY_AFTER", FAR)  # the gate is closed for longer at times
    settings.OUTBOX = far(WORKERS=1, COLD_QUEUE_CAPACITY=1, ASYNC_CONCURRENCY=1, FAIRNESS=(50, 1))
    sources: list[str] = []
    gate = Gate(lambda event: sources.append(event.source))
    with gated(gate=gate), outbox.Worker() as worker:
        write()
        wait_until(lambda: gate.entered)
        insert(20)
        write(50)
        worker.poll()
        gate.open.set()
        wait_until(lambda: statuses() == {"DONE": 71}, within=30, what="DONE")
    while_both_waited = sources[6:46]  # except those claimed while the gate was closed
    assert while_both_waited.count("hot") >= 38


def test_269_a_claimer_that_waits_is_stopped_at_once(settings: Any) -> None:
    settings.OUTBOX = far()
    worker = outbox.Worker()
    worker.start()
    default = worker._gates.by_queue["default"]
    wait_until(lambda: default.poll_at > time.monotonic() + FAR / 2, what="a long wait")
    started = time.monotonic()
    assert worker.stop() is True
    assert time.monotonic() - started < 15  # a busy machine; its next poll is an hour away


def test_440_every_thread_is_named_a_daemon_and_one_of_its_kind(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "DOORBELL": "local"}
    with outbox.Worker(workers=3):
        threads = engine_threads()
    kinds = ["claimer", "doorbell", "heartbeat", "housekeeper", "settler"]
    kinds += ["watchdog", "worker-0", "worker-1", "worker-2"]
    assert sorted(each.name for each in threads) == [f"outbox-default-{kind}" for kind in kinds]
    assert all(each.daemon for each in threads)
    assert not any(each.is_alive() for each in threads)


def test_439_the_registry_is_safe_to_read_from_all_threads() -> None:
    ended, reading = threading.Event(), threading.Barrier(5, timeout=20)

    def read() -> None:
        reading.wait()
        while not ended.is_set():
            registry.route.cache_clear()
            assert len(registry.route(outbox.GLOBAL, PLACED)) == 1
            registry.similar_types("order.paced")

    pause = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with listening(lambda event: None):
            readers = [in_thread(read) for _ in range(4)]
            reading.wait()
            for n in range(300):  # as a test or a late import may do
                with listening(lambda event: None, f"other.type-{n}"):
                    pass
            ended.set()
            for each in readers:
                each.result(20)  # raises what failed there
    finally:
        ended.set()
        sys.setswitchinterval(pause)


def session_of(made: Any) -> Any:
    """Return the server's id of a connection; SQLite has no server, so the driver's connection."""
    if made.vendor == "sqlite":
        return made.connection
    return (
        made.connection.info.backend_pid
        if made.vendor == "postgresql"
        else made.connection.thread_id()
    )


def finished(count: int = 1, **columns: Any) -> list[str]:
    ended = now() - LONG_AGO
    made = LONG_AGO.total_seconds() + 1
    given = {"status": Status.DONE, "due": None, "done_at": ended, "made": made, **columns}
    return insert(count, **given)


def test_457_a_worker_may_leave_purging_to_others(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "PURGE_INTERVAL": 0.2}
    finished(10)
    worker = outbox.Worker(purge=False)
    perform(connection, worker._engine.housekeeper.step())
    assert OutboxEvent.objects.count() == 10
    with outbox.Worker():
        wait_until(lambda: OutboxEvent.objects.count() == 0, what="a purge")


def test_43_outbox_purge_counts_or_deletes() -> None:
    finished(3)
    insert()
    purge = partial(printed, "outbox_purge")
    assert purge("--dry-run") == "would purge events: 3, idle streams: 0, received messages: 0"
    assert OutboxEvent.objects.count() == 4
    assert purge() == "purged events: 3, idle streams: 0, received messages: 0"
    assert purge("--dry-run") == "would purge events: 0, idle streams: 0, received messages: 0"
    assert OutboxEvent.objects.count() == 1


def levels(caplog: pytest.LogCaptureFixture, text: str) -> set[int]:
    return {
        each.levelno
        for each in caplog.records
        if each.name == "django_outbox" and text in each.getMessage()
    }


def test_433_what_costs_nothing_warns_and_what_is_lost_is_an_error(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = {**SOON, "HOT_QUEUE_CAPACITY": 1, "COLD_QUEUE_CAPACITY": 1}

    def fails(event: outbox.Event) -> None:
        raise {"retry": outbox.RetryAfter(FAR)}.get(event.payload) or outbox.Unrecoverable("no")

    def stolen(event: outbox.Event) -> None:
        steal(event.event_id)

    gate = Gate()
    with (
        listening(gate, "order.slow"),
        listening(fails),
        listening(stolen, "order.stolen"),
        outbox.Worker(workers=1),
    ):
        try:
            for _ in range(10):
                write(event_type="order.slow")
            wait_until(lambda: levels(caplog, "hot queue full"))
        finally:
            gate.open.set()
        insert(due=-1, headers="{damaged")
        write(payload="retry")
        write(payload="dead")
        write(event_type="order.stolen")
        wait_until(lambda: levels(caplog, "lost leases"))
        wait_until(lambda: statuses().get("DEAD") == 2 and statuses().get("RETRY") == 1)
    assert levels(caplog, "hot queue full") == {logging.WARNING}
    assert levels(caplog, "lost leases") == {logging.WARNING}
    assert levels(caplog, "retry event_id") == {logging.WARNING}
    assert levels(caplog, "dead event_id") == {logging.ERROR}
    assert any("PayloadError" in each.getMessage() for each in caplog.records)


def test_398_a_row_that_names_types_imports_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_by_a_row.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "named_by_a_row.Type"
    payload = f'{{"__class__": "{name}", "py/object": "{name}", "!": "!!python/object:{name}"}}'
    insert(
        event_type=name,
        aggregate_type=name,
        aggregate_id=name,
        payload=payload,
        headers=f'{{"type": "{name}"}}',
    )
    seen: list[outbox.Event] = []
    with listening(seen.append, name), outbox.Worker():
        wait_until(lambda: statuses() == {"DONE": 1})
    (event,) = seen
    assert {type(each) for each in event.payload.values()} == {str}
    assert event.aggregate_type == name
    assert "named_by_a_row" not in sys.modules


def rename(old: str, new: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")


def test_456_a_purge_error_is_logged_and_the_next_run_comes(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = {**SOON, "PURGE_INTERVAL": 0.2}
    finished(3)
    table = connection.ops.quote_name(OutboxEvent._meta.db_table)
    rename(table, "outbox_event_away")
    worker = outbox.Worker()
    try:
        worker.start()
        wait_until(lambda: "housekeeper failed" in caplog.text, what="the failed run")
    finally:
        rename("outbox_event_away", table)
        if "housekeeper failed" not in caplog.text:
            worker.stop()
    try:
        wait_until(lambda: not OutboxEvent.objects.exists(), what="the next run")
        wait_until(lambda: "housekeeper works again" in caplog.text)
    finally:
        worker.stop()
    assert levels(caplog, "housekeeper failed") == {logging.ERROR}
    assert engine_threads() == []
