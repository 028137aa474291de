"""Requirements that no other test module covers: claims, leases, threads, purges and logs."""

from __future__ import annotations

import io
import logging
import math
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.db.backends.signals import connection_created

import django_outbox as outbox
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import DONE, Decision, Status
from django_outbox.models import OutboxEvent, OutboxWorker
from django_outbox.sql import dialect_of, engine_connection
from django_outbox.sql.values import RescueState
from django_outbox.worker import prefetch
from django_outbox.worker.statistics import Statistics
from django_outbox.worker.throttle import Throttle
from tests.table import (
    PLACED,
    claim,
    elsewhere,
    end_leases,
    in_thread,
    insert,
    lease_ends_in,
    listening,
    now,
    row,
    statuses,
    steal,
    write,
)
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parents[2]
FAR = 3600.0  # seconds; an interval that no test waits for
SOON = {"POLL_INTERVAL": 0.2, "PROBE_INTERVAL": 0.05, "LOCK_WAIT": 1}
LONG_AGO = timedelta(days=30)
DELIVERING_MODES = ["multi_node", "single_node", "ordered"]
DEAD = Decision(status=Status.DEAD, error="it is over", outcome="dead")


@pytest.fixture(autouse=True)
def soon(settings: Any) -> None:
    settings.OUTBOX = SOON


def far(**more: Any) -> dict[str, Any]:
    """Return settings under which a worker polls only when something triggers a poll."""
    return {"DOORBELL": None, "POLL_INTERVAL": FAR, "PROBE_INTERVAL": FAR, **more}


class Gate:
    """A listener whose calls run until ``open`` is set."""

    def __init__(self, work: Callable[[outbox.Event], object] = lambda event: None) -> None:
        self.entered: list[str] = []
        self.open = threading.Event()
        self._work = work

    def __call__(self, event: outbox.Event) -> None:
        self._work(event)
        self.entered.append(event.event_id)
        assert self.open.wait(60)


@contextmanager
def gated(gate: Gate | None = None) -> Iterator[Gate]:
    gate = gate or Gate()
    with listening(gate):
        try:
            yield gate
        finally:
            gate.open.set()


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


def statements(work: Callable[[], object]) -> list[str]:
    """Return the statements on the event table that ``work`` sends on this thread's connection."""
    sent: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        sent.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        work()
    return [sql for sql in sent if "outbox_event" in sql]


def settle(event_id: str, decision: Decision, *, me: str) -> int:
    return dialect_of(connection).settle_all(connection, me=me, decisions=[(event_id, decision)])


def renew(ids: list[str], *, me: str = "me") -> tuple[set[str], set[str]]:
    return dialect_of(connection).renew(connection, me=me, ids=ids, lease=90)


def engine_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("outbox-")]


def names() -> set[str]:
    return {each.name.removeprefix("outbox-default-") for each in engine_threads()}


# -- databases -------------------------------------------------------------------------------------


def test_190_skip_locked_only_where_the_features_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = insert(3)
    has = connection.features.has_select_for_update_skip_locked
    assert any("SKIP LOCKED" in sql for sql in statements(lambda: renew(ids))) is has
    # MySQL claims without locks, except where a wait would be too long: see test_claim.py.
    claims_with = connection.vendor == "postgresql"
    assert any("SKIP LOCKED" in sql for sql in statements(claim)) is claims_with
    if connection.vendor == "postgresql":  # every supported version has it
        return
    monkeypatch.setattr(connection.features, "has_select_for_update_skip_locked", False)
    insert(3)
    sent = [*statements(lambda: renew(ids)), *statements(claim)]
    assert sent
    assert not any("SKIP LOCKED" in sql for sql in sent)
    assert all(lease_ends_in(each) > 80 for each in ids)


def test_182_the_claiming_statement_itself_leases() -> None:
    insert(3)
    sent = statements(lambda: claim(limit=2))
    leasing = " ".join(sent[-1].split())
    assert "SET rescues = " in leasing
    assert ", locked_by = %s, locked_at = " in leasing
    if connection.vendor == "postgresql":
        assert len(sent) == 1
        assert all(each in leasing for each in ("SKIP LOCKED", "RETURNING"))
        once = "ANY(ARRAY(" if connection.pg_version >= 180000 else "AS MATERIALIZED"
        assert once in leasing  # the subquery with the LIMIT runs once
    else:
        select, _ = sent
        assert select.startswith("SELECT") and "FOR UPDATE" not in select
        assert "event_id IN (" in leasing and "available_at <= %s" in leasing


def test_182_engine_connections_read_committed() -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one level")
    if connection.vendor == "postgresql":
        question = "SHOW transaction_isolation"
    else:
        is_mariadb = connection.mysql_is_mariadb  # type: ignore[attr-defined]
        # The two servers use different names, and not every version knows both.
        question = f"SELECT @@{'tx' if is_mariadb else 'transaction'}_isolation"

    def ask() -> str:
        own = engine_connection("default", lock_wait=1)
        try:
            with own.cursor() as cursor:
                cursor.execute(question)
                return str(cursor.fetchone()[0]).replace("-", " ").lower()
        finally:
            own.close()

    assert in_thread(ask).result(20) == "read committed"


def test_192_a_lost_race_is_logged_at_debug_and_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if connection.vendor == "postgresql":
        pytest.skip("rows that are locked are skipped: no race to lose")
    ids = insert(4, due=-1)

    def be_faster(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("UPDATE"):  # between our SELECT and our UPDATE
            assert len(in_thread(lambda: claim("other", limit=3)).result(20)) == 3
        return execute(sql, params, many, context)

    with caplog.at_level(logging.DEBUG, "django_outbox"), connection.execute_wrapper(be_faster):
        mine = [each["event_id"] for each in claim("me")]
    assert len(mine) == 1
    owners = {event_id: row(event_id).locked_by for event_id in ids}
    assert sorted(owners.values(), key=str) == ["me", "other", "other", "other"]
    assert owners[mine[0]] == "me"
    assert [each.levelno for each in caplog.records] == [logging.DEBUG]


# -- when a claimer claims -------------------------------------------------------------------------


def test_338_poll_and_probe_are_jittered_within_bounds(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Throttle, "after", lambda self, started: None)  # each poll is a full scan
    settings.OUTBOX = {"DOORBELL": None, "POLL_INTERVAL": 1000, "PROBE_INTERVAL": 100}
    claimer, probes, polls = outbox.Worker()._claimer, [], []
    intake = claimer._intakes["default"]
    claimer._started_at = -math.inf  # its probation is over, so it scans for suspects
    for _ in range(60):
        claimer._scan_at = 0.0
        claimer._wakeup.poll_wanted = True
        started = time.monotonic()
        claimer.step()
        probes.append(intake.poll_at - started)
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
    monkeypatch.setattr(prefetch, "BUSY_AFTER", FAR)  # the gate is closed for longer at times
    settings.OUTBOX = far(WORKERS=1, COLD_QUEUE_CAPACITY=1, ASYNC_CONCURRENCY=1, FAIRNESS=(50, 1))
    sources: list[str] = []
    gate = Gate(lambda event: sources.append(event.source))
    with gated(gate), outbox.Worker() as worker:
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
    intake = worker._claimer._intakes["default"]
    wait_until(lambda: intake.poll_at > time.monotonic() + FAR / 2, what="a long wait")
    started = time.monotonic()
    assert worker.stop() is True
    assert time.monotonic() - started < 15  # a busy machine; its next poll is an hour away


@pytest.mark.parametrize("mode", DELIVERING_MODES)
def test_410_workers_capacities_and_retry_hold_in_all_modes(settings: Any, mode: str) -> None:
    settings.OUTBOX = {
        **SOON,
        "MODE": mode,
        "WORKERS": 2,
        "COLD_QUEUE_CAPACITY": 3,
        "RETRY": {"policy": "fixed", "delay": 0.01, "max_attempts": 2},
    }
    insert(20, due=-1)

    def fail(event: outbox.Event) -> None:
        raise ValueError("always")

    with gated() as gate, listening(fail, "order.failing"), outbox.Worker():
        wait_until(lambda: len(gate.entered) == 2)
        assert OutboxEvent.objects.leased().count() <= 2 + 3
        gate.open.set()
        (failing,) = write(event_type="order.failing")
        wait_until(lambda: statuses() == {"DONE": 20, "DEAD": 1}, what="all settled")
    assert row(failing).attempts == 2


# -- threads ---------------------------------------------------------------------------------------


def test_440_every_thread_is_named_a_daemon_and_one_of_its_kind(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "DOORBELL": "local"}
    with outbox.Worker(workers=3):
        threads = engine_threads()
    kinds = ["claimer", "doorbell", "heartbeat", "loop", "purger", "settler"]
    kinds += ["watchdog", "worker-0", "worker-1", "worker-2"]
    assert sorted(each.name for each in threads) == [f"outbox-default-{kind}" for kind in kinds]
    assert all(each.daemon for each in threads)
    assert not any(each.is_alive() for each in threads)


def test_412_the_heartbeat_goes_last(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "LEASE": 1.2, "DRAIN_TIMEOUT": 30, "DOORBELL": "local"}
    alive_at_the_end: set[str] = set()

    def look(thread: str, sql: str, params: Any) -> None:
        if thread.endswith("heartbeat") and sql.startswith("DELETE") and worker.id in repr(params):
            alive_at_the_end.update(names())

    with watched() as engine, gated() as gate:
        engine.before = look
        worker = outbox.Worker(workers=1)
        worker.start()
        (event_id,) = write()
        wait_until(lambda: gate.entered)
        wait_until(OutboxWorker.objects.exists)
        stopping = in_thread(worker.stop)
        wait_until(lambda: names() == {"worker-0", "loop", "settler", "heartbeat", "watchdog"})
        lease = row(event_id).available_at
        assert lease is not None
        later = lease + timedelta(seconds=1.2)
        wait_until(lambda: (row(event_id).available_at or lease) > later, what="a kept lease")
        gate.open.set()
        assert stopping.result(20) is True
    assert alive_at_the_end == {"heartbeat"}
    assert (row(event_id).status, row(event_id).rescues) == (Status.DONE, 0)


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


# -- leases ----------------------------------------------------------------------------------------


def session_of(made: Any) -> Any:
    """Return the server's id of a connection; SQLite has no server, so the driver's connection."""
    if made.vendor == "sqlite":
        return made.connection
    return (
        made.connection.info.backend_pid
        if made.vendor == "postgresql"
        else made.connection.thread_id()
    )


def break_session(engine: Engine, session: Any) -> None:
    if connection.vendor == "sqlite":  # closed by another thread in mid-statement it crashes Python
        engine.broken.append(session)
        return
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_terminate_backend(%s)", [session])
        else:
            cursor.execute(f"KILL {int(session)}")


def test_n7_a_failed_renewal_is_repeated_on_a_new_connection(
    settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.OUTBOX = {**SOON, "LEASE": 2.4}
    # Statistics use the same connection: they would reconnect first, and no renewal would fail.
    monkeypatch.setattr(Statistics, "write_if_due", lambda statistics: None)
    ids = insert(2, due=-1)
    with watched() as engine, gated() as gate, outbox.Worker(workers=2):
        wait_until(lambda: len(gate.entered) == 2)
        for times in (1, 2):
            session = wait_until(lambda: engine.made("heartbeat"))[-1]
            break_session(engine, session)
            wait_until(lambda: len(engine.made("heartbeat")) > times, what="a new connection")  # noqa: B023
            wait_until(lambda: caplog.text.count("heartbeat works again") >= times)  # noqa: B023
            anew = OutboxEvent.objects.filter(available_at__gt=now() + timedelta(seconds=2.4))
            wait_until(lambda: anew.count() == 2, what="all renewed")  # noqa: B023
        gate.open.set()
        wait_until(lambda: statuses() == {"DONE": 2})
    assert caplog.text.count("heartbeat failed") >= 2
    assert sorted(gate.entered) == sorted(ids)
    assert not OutboxEvent.objects.exclude(rescues=0).exists()


def test_n7_a_late_renewal_does_not_take_back_a_lost_lease() -> None:
    (event_id,) = insert()
    claim("late")
    end_leases([event_id])
    claim("owner", state=RescueState.LOST)
    before = row(event_id).__dict__ | {"_state": 0}
    assert renew([event_id], me="late") == (set(), set())
    assert row(event_id).__dict__ | {"_state": 0} == before


def test_w22_a_late_settle_after_rescue_and_replay_has_no_effect() -> None:
    (event_id,) = insert()
    claim("late")
    end_leases([event_id])
    claim("rescuer", state=RescueState.LOST)
    assert settle(event_id, DEAD, me="rescuer") == 1
    assert settle(event_id, DONE, me="late") == 0
    assert OutboxEvent.objects.dead().replay() == 1
    assert [settle(event_id, DONE, me=each) for each in ("late", "rescuer")] == [0, 0]
    claim("next")
    assert [settle(event_id, DONE, me=each) for each in ("late", "rescuer")] == [0, 0]
    assert (row(event_id).status, row(event_id).locked_by) == (Status.NEW, "next")


def test_w22_a_process_that_claims_its_own_running_event_runs_it_once(settings: Any) -> None:
    settings.OUTBOX = far()
    with gated() as gate, outbox.Worker(workers=2) as worker:
        (event_id,) = write()
        wait_until(lambda: gate.entered)
        end_leases([event_id])
        worker.poll()
        wait_until(lambda: lease_ends_in(event_id) > 0, what="a new lease")
        assert (row(event_id).locked_by, row(event_id).rescues) == (worker.id, 0)
        (other,) = write()  # queued behind it
        wait_until(lambda: len(gate.entered) == 2)
        assert gate.entered == [event_id, other]
        gate.open.set()
        wait_until(lambda: statuses() == {"DONE": 2})
    assert gate.entered == [event_id, other]


def test_8_nothing_depends_on_the_row_of_a_worker(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "LEASE": 0.9, "DRAIN_TIMEOUT": 0.5}
    with listening(lambda event: None), outbox.Worker() as worker:
        wait_until(OutboxWorker.objects.exists)
        shown = OutboxWorker.objects.get()
        assert (shown.id, shown.pid) == (worker.id, os.getpid())
        assert shown.hostname
        assert abs((now() - shown.started_at).total_seconds()) < 10
        assert '"mode": "multi_node"' in (shown.info or "")
        OutboxWorker.objects.all().delete()
        write()
        wait_until(lambda: statuses() == {"DONE": 1})
        wait_until(OutboxWorker.objects.exists, what="the row, written again")
        again = OutboxWorker.objects.get()
        wait_until(lambda: OutboxWorker.objects.get().heartbeat_at > again.heartbeat_at)
    assert not OutboxWorker.objects.exists()


# -- transactions ----------------------------------------------------------------------------------


def open_transactions() -> int:
    """Return how many other sessions of this database are in a transaction."""
    if connection.vendor == "sqlite":
        name = str(connection.settings_dict["NAME"])
        with closing(sqlite3.connect(name, timeout=0, isolation_level=None)) as own:
            try:
                own.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return 1
            own.execute("ROLLBACK")
        return 0
    asks = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND xact_start IS NOT NULL "
        "AND backend_type = 'client backend'",
        "mysql": "SELECT count(*) FROM information_schema.innodb_trx t "
        "JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id "
        "WHERE p.db = database() AND p.id <> connection_id()",
    }
    if connection.vendor == "mysql":
        time.sleep(0.15)  # InnoDB caches this table until it has not been read for 0.1 s
    with connection.cursor() as cursor:
        cursor.execute(asks[connection.vendor])
        return int(cursor.fetchone()[0])


@pytest.mark.parametrize("own", [False, True], ids=["plain listener", "with its own transaction"])
def test_25_no_transaction_is_open_while_a_listener_runs(own: bool) -> None:
    gate = Gate()

    def listener(event: outbox.Event) -> None:
        if not own:
            gate(event)
            return
        with transaction.atomic():  # shows that the check would see an open transaction
            Effect.objects.create(event_id=event.event_id, pid=0, phase="open")
            gate(event)

    with listening(listener), outbox.Worker(workers=1):
        write()
        wait_until(lambda: gate.entered)
        try:
            if own:
                wait_until(lambda: open_transactions() == 1)
            else:  # the heartbeat's last a moment; a listener's would stay open
                wait_until(lambda: open_transactions() == 0)
        finally:
            gate.open.set()
        wait_until(lambda: statuses() == {"DONE": 1})


def test_187_decisions_are_settled_together_in_autocommit_by_the_settler() -> None:
    insert(400, due=-1)
    fails = outbox.Fixed(delay=FAR)

    def listener(event: outbox.Event) -> None:
        raise ValueError("not now")

    write(400, "order.failing")
    with (
        watched() as engine,
        listening(lambda event: None),
        listening(listener, "order.failing", retry=fails),
        outbox.Worker(),
    ):
        wait_until(lambda: statuses() == {"DONE": 400, "RETRY": 400}, within=30)
    settles = [each for each in engine.sent if "done_at = " in each[2]]
    assert {(thread, atomic) for thread, atomic, *_ in settles} == {
        ("outbox-default-settler", False)
    }
    assert 2 <= len(settles) <= 200  # of 800 decisions


# -- purge -----------------------------------------------------------------------------------------


def finished(count: int = 1, **columns: Any) -> list[str]:
    ended = now() - LONG_AGO
    made = LONG_AGO.total_seconds() + 1
    given = {"status": Status.DONE, "due": None, "done_at": ended, "made": made, **columns}
    return insert(count, **given)


@pytest.mark.parametrize("mode", [*DELIVERING_MODES, "writer_only"])
def test_28_a_worker_purges_in_every_mode(settings: Any, mode: str) -> None:
    """It deletes finished old events; in writer_only, where none finishes, all old events."""
    settings.OUTBOX = {**SOON, "MODE": mode, "PURGE_INTERVAL": 0.2, "PURGE_BATCH_SIZE": 10}
    kept = [*finished(done_at=now()), *finished(status=Status.DEAD), *insert(due=FAR)]
    old = {"created_at": now() - LONG_AGO}
    finished(35, **old)
    with outbox.Worker():
        wait_until(lambda: OutboxEvent.objects.count() == 3, what="the first run")
        week = timedelta(days=7)  # newer ids, which the next run reaches
        age = week.total_seconds() + 60
        finished(5, made=age, done_at=now() - week, created_at=now() - week - timedelta(seconds=60))
        wait_until(lambda: OutboxEvent.objects.count() == 3, what="another run")
    assert {*OutboxEvent.objects.values_list("event_id", flat=True)} == {*kept}


def test_457_purges_side_by_side_do_no_harm(settings: Any) -> None:
    settings.OUTBOX = {"PURGE_BATCH_SIZE": 20}
    finished(400)
    (kept,) = insert()
    start = threading.Barrier(3)

    def purge() -> int:
        start.wait(10)
        return OutboxEvent.objects.purge()

    purges = [in_thread(purge) for _ in range(3)]
    assert sum(future.result(60) for future in purges) == 400
    assert [each.event_id for each in OutboxEvent.objects.all()] == [kept]


def test_457_a_worker_may_leave_purging_to_others(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "PURGE_INTERVAL": 0.2}
    finished(10)
    worker = outbox.Worker(purge=False)
    worker._purger.step()
    assert OutboxEvent.objects.count() == 10
    with outbox.Worker():
        wait_until(lambda: OutboxEvent.objects.count() == 0, what="a purge")


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
        wait_until(lambda: "purger failed" in caplog.text, what="the failed run")
    finally:
        rename("outbox_event_away", table)
        if "purger failed" not in caplog.text:
            worker.stop()
    try:
        wait_until(lambda: not OutboxEvent.objects.exists(), what="the next run")
        wait_until(lambda: "purger works again" in caplog.text)
    finally:
        worker.stop()
    assert levels(caplog, "purger failed") == {logging.ERROR}
    assert engine_threads() == []


def test_43_outbox_purge_counts_or_deletes() -> None:
    finished(3)
    insert()

    def said(*arguments: str) -> str:
        out = io.StringIO()
        call_command("outbox_purge", *arguments, stdout=out)
        return out.getvalue().strip()

    assert said("--dry-run") == "would purge events: 3, idle streams: 0, received messages: 0"
    assert OutboxEvent.objects.count() == 4
    assert said() == "purged events: 3, idle streams: 0, received messages: 0"
    assert said("--dry-run") == "would purge events: 0, idle streams: 0, received messages: 0"
    assert OutboxEvent.objects.count() == 1


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize(("prefix", "code"), [("", 0), ("absent_", 1)])
def test_43_outbox_purge_exits_by_its_success(
    database_env: dict[str, str], prefix: str, code: int
) -> None:
    environment = {
        **database_env,
        "DJANGO_SETTINGS_MODULE": "tests.fault_settings",
        "OUTBOX_TEST_SETTINGS": f'{{"TABLE_PREFIX": "{prefix}"}}',
    }
    done = subprocess.run(
        [sys.executable, "-m", "django", "outbox_purge"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr


def test_w2_slow_maintenance_does_not_hold_writers_up() -> None:
    if connection.vendor == "sqlite":
        pytest.skip("an open SQLite transaction keeps every other writer out")
    finished(50)
    with elsewhere(OutboxEvent.objects.purge):
        ids = in_thread(lambda: write(20)).result(5)
        assert len(in_thread(lambda: claim(ids=ids)).result(5)) == 20


# -- the log ---------------------------------------------------------------------------------------


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


def test_435_levels_are_a_matter_of_logging(caplog: pytest.LogCaptureFixture) -> None:
    def fails(event: outbox.Event) -> None:
        raise outbox.RetryAfter(FAR)

    with caplog.at_level(logging.ERROR, "django_outbox"), listening(fails), outbox.Worker():
        write()
        wait_until(lambda: statuses() == {"RETRY": 1})
    assert caplog.records == []


# -- untrusted rows --------------------------------------------------------------------------------


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
