"""The worker's purge: one worker at a time, and only ids that can be old enough."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxLease, OutboxStream
from django_outbox.sql import engine_connection
from django_outbox.worker.effects import perform
from tests.table import in_thread, insert, multiply, now, purging, rest_of, stream_row
from tests.test_purge import (
    DAY,
    DONE,
    WEEK,
    an_hour_passes,
    end_lease,
    finished,
    later,
    left,
    own_ids,
    runs,
)

pytestmark = pytest.mark.django_db(transaction=True)

__all__ = ["runs"]  # fixtures


# -- one at a time ---------------------------------------------------------------------------------


def test_of_many_workers_one_purges_in_an_interval(runs: list[str]) -> None:
    finished(20)
    start = threading.Barrier(8)

    def work(me: str) -> float:
        each = purging(3600, me=me)
        start.wait(30)
        while (pause := each.run()) < 100:  # another worker holds the lease or is scanning
            threading.Event().wait(min(pause, 0.02))
        return pause

    workers = [in_thread(lambda me=f"w{n}": work(me)) for n in range(8)]  # type: ignore[misc]
    assert all(3500 < each.result(60) < 4000 for each in workers)
    assert len(runs) == 1
    assert not left()
    lease = OutboxLease.objects.get()
    assert (lease.name, lease.locked_by, lease.locked_until) == ("purge", None, None)


def test_one_worker_at_a_time_has_the_lease() -> None:
    leaders = {me: purging(3600, me=me)._leader for me in ("a", "b")}

    def taken(order: str) -> list[bool]:
        return [leaders[me].take(connection) for me in order]

    assert taken("abab") == [True, False, True, False]
    end_lease()
    assert taken("bab") == [True, False, True]
    perform(connection, leaders["a"].release("{}"))  # it no longer holds the lease
    assert taken("ab") == [False, True]
    perform(connection, leaders["b"].release("{}"))
    assert taken("a") == [True]


# -- what a run reads ------------------------------------------------------------------------------

MANY = 20_000
BAR = 1000  # rows
READ = {
    "postgresql": "SELECT COALESCE(SUM(seq_tup_read + idx_tup_fetch), 0) "
    "FROM pg_stat_xact_user_tables WHERE relname = 'outbox_event'",
    # MariaDB runs one of these comments as code, MySQL the other: each reads its own table.
    "mysql": "SELECT SUM(variable_value) FROM /*M! information_schema */"
    "/*!80000 performance_schema */.session_status WHERE variable_name LIKE 'Handler_read%'",
}
STEPS = 8  # upper bound of SQLite's virtual machine steps for a row


def rows_read(work: Callable[[], object]) -> int:
    """Return how many rows of the event table the work reads on a connection of the engine."""

    def measured() -> int:
        own = engine_connection("default", lock_wait=2)
        connections["default"] = own
        try:
            own.ensure_connection()
            if own.vendor == "sqlite":
                return _steps(own, work) // STEPS
            with transaction.atomic():
                before = _counter(own)
                work()
                return _counter(own) - before
        finally:
            own.close()

    return in_thread(measured).result(120)


def _counter(own: Any) -> int:
    with own.cursor() as cursor:
        cursor.execute(READ[own.vendor])
        return int(cursor.fetchone()[0])


def _steps(own: Any, work: Callable[[], object]) -> int:
    """Return the steps of SQLite's virtual machine, because SQLite does not count rows."""
    calls = []
    own.connection.set_progress_handler(lambda: calls.append(1), 100)
    work()
    own.connection.set_progress_handler(None, 0)
    return 100 * len(calls)


def test_rows_read_are_counted() -> None:
    insert(1000, **DONE, done_at=now())
    assert rows_read(OutboxEvent.objects.purge) >= 1000 / 2


def test_a_run_over_recent_rows_reads_next_to_none() -> None:
    """The range of ids that can be old enough ends before them, however many there are."""
    insert(MANY // 2, **DONE, done_at=now(), made=6 * DAY)
    insert(MANY // 2, **DONE, done_at=now())
    assert rows_read(lambda: rest_of(purging(3600, me="first"))) < BAR  # includes a scan
    an_hour_passes()
    assert rows_read(lambda: rest_of(purging(3600, me="second"))) < BAR


def test_what_stays_is_not_read_again() -> None:
    """Dead events are kept until a person acts, so the hourly run must not read them again."""
    finished(5000, status=Status.DEAD, made=30 * DAY)
    rest_of(purging(3600, me="first"))  # reads them
    an_hour_passes()
    assert rows_read(lambda: rest_of(purging(3600, me="second"))) < BAR
    assert len(left()) == 5000


@pytest.mark.parametrize(
    ("given", "columns", "age"),
    [
        ({}, DONE, WEEK),
        ({"RETENTION_DONE": 60}, DONE, 60),
        ({"RETENTION_DEAD": 30 * DAY}, {**DONE, "status": Status.DEAD}, 30 * DAY),
        ({"RETENTION_DONE": 60}, {**DONE, "unique_key": "once"}, WEEK),
        ({"RETENTION_UNIQUE": 60}, {**DONE, "unique_key": "once"}, WEEK),
        ({"RETENTION_UNIQUE": 9 * DAY}, {**DONE, "unique_key": "once"}, 9 * DAY),
    ],
    ids=str,
)
def test_each_retention_is_kept_by_the_hourly_run(
    given: dict[str, Any], columns: dict[str, Any], age: float, settings: Any
) -> None:
    settings.OUTBOX = {"RETENTION_DEAD": None, **given}
    rest_of(purging(3600, me="first"))
    an_hour_passes()
    finished(made=age + 30, **columns)
    (young,) = finished(
        made=age - 30, **{**columns, **({"unique_key": "young"} if "unique_key" in columns else {})}
    )
    rest_of(purging(3600, me="second"))
    assert left() == {young}


def test_a_century_of_retention_is_no_fault(settings: Any) -> None:
    settings.OUTBOX = {"RETENTION_DONE": 36_525 * DAY}
    finished()
    rest_of(purging(3600))
    assert len(left()) == 1


# -- the full scan ---------------------------------------------------------------------------------


def test_events_with_ids_of_their_own_are_found_by_the_scan() -> None:
    rest_of(purging(3600, me="first"))
    own_ids(40)
    young = {*own_ids_kept()}
    an_hour_passes()
    rest_of(purging(3600, me="second"))
    assert len(left()) > len(young)  # the range of the hourly run contains few of them
    later(scanned_at=timedelta(days=1))
    rest_of(purging(3600, me="third"))
    assert left() == young


def own_ids_kept() -> list[str]:
    """Insert events that ended now, with ids chosen by their writer."""
    at = now()
    names = [f"order-{n}" for n in range(5)]
    OutboxEvent.objects.bulk_create(
        OutboxEvent(
            id=name,
            event_id=name,
            event_type="x",
            payload="{}",
            status=Status.DONE,
            occurred_at=at,
            created_at=at,
            done_at=at,
        )
        for name in names
    )
    return names


def test_the_scan_reads_each_row_once_and_leaves_out_the_recent() -> None:
    rest_of(purging(3600, me="first"))
    own_ids(3000, days=1)
    insert(MANY, **DONE, done_at=now())
    later(scanned_at=timedelta(days=1))
    assert 3000 / 2 <= rows_read(lambda: rest_of(purging(3600, me="second"))) < 3000 * 1.5


def test_idle_streams_are_purged_by_the_scan(caplog: pytest.LogCaptureFixture) -> None:
    at = now() - timedelta(days=2)
    first = stream_row("k0", locked_at=at)
    multiply(first, [f":k{n}" for n in range(1, 50)])
    stream_row("due", due_at=now()).save()
    with caplog.at_level(logging.INFO, "django_outbox"):
        rest_of(purging(3600))
    assert {*OutboxStream.objects.values_list("pk", flat=True)} == {":due"}
    assert "purged streams=50" in caplog.text
    stream_row("again", locked_at=at).save()
    an_hour_passes()
    rest_of(purging(3600, me="second"))
    assert OutboxStream.objects.count() == 2  # an hourly run does not read streams
