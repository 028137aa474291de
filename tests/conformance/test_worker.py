"""A worker in this process on each database: what it delivers, settles and survives."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError, connection, connections, transaction
from django.utils import timezone, translation

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from django_outbox.worker.effects import act
from django_outbox.worker.threads import Loop
from tests.sessions import terminate_other_sessions
from tests.surroundings import gated
from tests.table import PLACED, elsewhere, in_thread, listening, row, sessions, write
from tests.test_worker import AT_ONCE, SOON, soon, wait_for_statuses
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


__all__ = ["soon"]  # fixtures

SQLITE = os.environ.get("OUTBOX_TEST_DB", "sqlite") == "sqlite"


# -- the database refuses --------------------------------------------------------------------------


def lock_row(event_id: str) -> None:
    OutboxEvent.objects.filter(pk=event_id).update(tenant_id="locked")


@pytest.mark.skipif(SQLITE, reason="an open SQLite transaction keeps every writer out")
def test_w5_a_locked_row_holds_up_no_other(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A lock left on one row, such as by a manual SELECT FOR UPDATE, delays only its own settle."""
    settings.OUTBOX = {**SOON, "LOCK_WAIT": 0.3}
    told = threading.Event()

    def listener(event: outbox.Event) -> Any:
        if event.payload["n"]:
            told.wait(30)
        return outbox.Dead("over") if event.payload["n"] == 3 else None

    with gated() as gate, listening(listener, "order.shipped"), outbox.Worker(workers=5):
        (locked,) = write()
        wait_until(lambda: gate.entered)
        write(4, event_type="order.shipped")
        with elsewhere(lambda: lock_row(locked)):
            gate.open.set()
            wait_until(lambda: "settler failed" in caplog.text, what="a refused settle")
            told.set()
            wait_for_statuses(NEW=1, DONE=3, DEAD=1)
        wait_for_statuses(DONE=4, DEAD=1)
    assert "settler works again" in caplog.text


NO_SERVER = pytest.mark.skipif(SQLITE, reason="SQLite has no sessions that could be ended")


@NO_SERVER
def test_ended_sessions_fail_no_event_that_comes_after(settings: Any) -> None:
    """Each thread has a dead connection; one event could spend all its attempts on them."""
    settings.OUTBOX = {**SOON, "LEASE": 8.0}
    together = threading.Barrier(4)

    def listener(event: outbox.Event) -> None:
        Effect.objects.create(event_id=event.event_id, pid=0, phase="end")
        if event.payload["n"] < 4:
            together.wait(20)

    with listening(listener, atomic=True, retry=AT_ONCE), outbox.Worker(workers=4) as worker:
        write(4)
        wait_for_statuses(DONE=4)
        before = time.monotonic()
        terminate_other_sessions()
        wait_until(lambda: worker._engine.sessions.broke_at > before, what="somebody has noticed")
        with transaction.atomic():
            outbox.write_many(outbox.Event(event_type=PLACED, payload={"n": 9}) for _ in range(20))
        wait_for_statuses(DONE=24)
    assert not OutboxEvent.objects.exclude(attempts=0).exists()


@NO_SERVER
def test_a_session_that_ends_in_a_listener_is_told_to_all_threads() -> None:
    ends = {
        "postgresql": "SELECT pg_terminate_backend(pg_backend_pid())",
        "mysql": "KILL CONNECTION_ID()",
    }

    def listener(event: outbox.Event) -> None:
        if not event.attempts:
            connection.cursor().execute(ends[connection.vendor])

    for atomic in (False, True):
        with listening(listener, atomic=atomic, retry=AT_ONCE), outbox.Worker(workers=1) as worker:
            assert worker._engine.sessions.broke_at < 0
            (event_id,) = write()
            wait_until(lambda event_id=event_id: row(event_id).status == Status.DONE)
            assert worker._engine.sessions.broke_at > 0


CONFLICT = {  # as two nodes of a cluster that wrote the same rows
    "postgresql": "DO $$ BEGIN RAISE EXCEPTION 'beaten' USING ERRCODE = '40001'; END $$",
    "mysql": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'beaten'",
}


@NO_SERVER
@pytest.mark.parametrize(("times", "levels"), [(10, set()), (11, {"ERROR", "WARNING"})])
def test_a_step_that_another_node_has_beaten_is_no_error(
    caplog: pytest.LogCaptureFixture, times: int, levels: set[str]
) -> None:
    left, pauses = [None] * times, list[float]()

    def answer() -> float:
        if left:
            left.pop()
            connection.cursor().execute(CONFLICT[connection.vendor])
        return 0.0

    loop = Loop("outbox-default-claimer", lambda: act(answer), alias="default")
    while left:
        pauses.append(loop._run_step())
    loop._run_step()
    assert {each.levelname for each in caplog.records if each.levelname != "DEBUG"} == levels
    assert max(pauses[:10]) < 0.1
    assert loop.unready_reason(60.0) is None


FULL = {
    "sqlite": "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END",
    "postgresql": "EXECUTE FUNCTION no_room()",
    "mysql": "IF NEW.status = 1 THEN "
    "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1021, MESSAGE_TEXT = 'Disk full'; END IF",
}


NO_ROOM = (
    "CREATE OR REPLACE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$"
)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let the database refuse to mark events as done, as if its disk were full."""
    table, vendor = connection.ops.quote_name(OutboxEvent._meta.db_table), connection.vendor
    when = "" if vendor == "mysql" else "WHEN (NEW.status = 1) "
    with connection.cursor() as cursor:
        if vendor == "postgresql":
            cursor.execute(NO_ROOM)
        cursor.execute(
            f"CREATE TRIGGER full_disk BEFORE UPDATE ON {table} FOR EACH ROW {when}{FULL[vendor]}"
        )
        try:
            yield
        finally:
            cursor.execute(f"DROP TRIGGER full_disk{f' ON {table}' * (vendor == 'postgresql')}")


def test_j13_x9_what_a_full_disk_refuses_is_kept_and_settled_later(settings: Any) -> None:
    """Meanwhile no event runs twice, and the worker claims no more than it has room for."""
    settings.OUTBOX = {**SOON, "COLD_QUEUE_CAPACITY": 10, "ASYNC_CONCURRENCY": 1}
    called: list[str] = []
    with listening(lambda event: called.append(event.event_id)), outbox.Worker(workers=2) as worker:
        with full_disk():
            write(200)
            wait_until(lambda: worker._settler_loop._errors >= 2, what="a settle refused again")
            assert 0 < len(called) <= 2 * 10 + 2 + 1
            assert not OutboxEvent.objects.filter(status=Status.DONE).exists()
        wait_for_statuses(DONE=200)
    assert len({*called}) == len(called) == 200


@NO_SERVER
def test_a_connection_whose_making_failed_half_way_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Django silently keeps such a connection, and every later use of it fails."""
    kind = type(connections["default"])
    whole = kind.init_connection_state
    broken: list[str] = []

    def interrupted(self: Any) -> None:
        whole(self)
        name = threading.current_thread().name
        if "worker-" in name and not broken:
            broken.append(name)
            self.connection.close()
            raise OperationalError("its session was ended meanwhile")

    monkeypatch.setattr(kind, "init_connection_state", interrupted)

    def listener(event: outbox.Event) -> None:
        Effect.objects.create(event_id=event.event_id, pid=0, phase="end")

    with listening(listener, retry=AT_ONCE), outbox.Worker(workers=1):
        write(3)
        wait_for_statuses(DONE=3)
    assert broken
    assert sorted(OutboxEvent.objects.values_list("attempts", flat=True)) == [0, 0, 1]


# -- connection cleanup ----------------------------------------------------------------------------


def leave_transaction_open(event: outbox.Event) -> None:
    transaction.atomic().__enter__()
    Effect.objects.create(event_id=event.event_id, pid=0, phase="left open")


def leave_autocommit_off(event: outbox.Event) -> None:
    connection.set_autocommit(False)
    Effect.objects.create(event_id=event.event_id, pid=0, phase="left open")


def leave_transaction_broken(event: outbox.Event) -> None:
    transaction.atomic().__enter__()
    with suppress(IntegrityError):
        OutboxEvent.objects.create(id=event.event_id)


def leave_a_time_zone(event: outbox.Event) -> None:
    timezone.activate("America/Lima")


def leave_a_language(event: outbox.Event) -> None:
    translation.activate("eo")


def close_the_connection_under_us(event: outbox.Event) -> None:
    connection.ensure_connection()
    connection.connection.close()


def exit_the_thread(event: outbox.Event) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "mischief",
    [
        leave_transaction_open,
        leave_autocommit_off,
        leave_transaction_broken,
        leave_a_time_zone,
        leave_a_language,
        close_the_connection_under_us,
        exit_the_thread,
    ],
    ids=lambda each: each.__name__.replace("_", " "),
)
def test_70_one_listeners_leavings_do_not_reach_the_next(
    mischief: Callable[[outbox.Event], None], caplog: pytest.LogCaptureFixture
) -> None:
    found: list[Any] = []
    runs: list[str] = []

    def once(event: outbox.Event) -> None:
        runs.append(event.event_id)
        mischief(event)

    def next_one(event: outbox.Event) -> None:
        Effect.objects.create(event_id=event.event_id, pid=os.getpid(), phase="next")
        found.append(
            (
                connection.in_atomic_block,
                connection.get_autocommit(),
                timezone.get_current_timezone_name(),
                translation.get_language(),
            )
        )

    with ExitStack() as stack:
        policy = outbox.Fixed(max_attempts=1)
        stack.enter_context(listening(once, "order.mischief", retry=policy))
        stack.enter_context(listening(next_one))
        stack.enter_context(outbox.Worker(workers=1))
        for _ in range(3):
            write(event_type="order.mischief")
            write()
        wait_until(lambda: OutboxEvent.objects.pending().count() == 0)
    assert len(runs) == 3
    assert found == [(False, True, "Asia/Kathmandu", "en-us")] * 3
    assert [*Effect.objects.values_list("phase", flat=True)] == ["next"] * 3
    assert ("left a transaction open" in caplog.text) is mischief.__name__.startswith(
        ("leave_transaction", "leave_autocommit")
    )


# -- nothing leaks ---------------------------------------------------------------------------------


def test_j17_the_number_of_sessions_is_steady() -> None:
    def listener(event: outbox.Event) -> None:
        n = event.payload["n"]
        with transaction.atomic():
            Effect.objects.create(event_id=event.event_id, pid=0, phase="steady")
            if n % 5 == 4:
                raise ValueError("undone")
            if n % 5 == 3:
                OutboxEvent.objects.create(id=event.event_id)  # IntegrityError

    counts: list[int] = []
    with listening(listener, retry=outbox.Fixed(max_attempts=1)), outbox.Worker(workers=4):
        for cycle in range(1, 11):
            in_thread(lambda: write(20)).result(30)
            wait_for_statuses(DONE=12 * cycle, DEAD=8 * cycle)
            counts.append(sessions())
            wait_until(lambda: not idle_in_transaction())
    assert max(counts[3:]) <= counts[2] + 1  # a thread that was idle before may have connected
    assert max(counts) <= 4 + 8  # the listener threads, the worker's own, this one
    if not SQLITE:
        wait_until(lambda: sessions() == 1, what="the last session")


def idle_in_transaction() -> list[str]:
    if connection.vendor != "postgresql":
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT query FROM pg_stat_activity WHERE datname = current_database() "
            "AND state LIKE 'idle in transaction%'"
        )
        return [each[0] for each in cursor.fetchall()]
