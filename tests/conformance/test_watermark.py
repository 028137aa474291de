"""The watermark of claims, and how rarely full scans run while a snapshot is open."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection

import django_outbox as outbox
from django_outbox import clocks, doorbell
from django_outbox.conf import CENTURY
from django_outbox.listeners.outcomes import DONE, Decision, Status
from django_outbox.models import OutboxEvent, OutboxLease
from django_outbox.models.event_queryset import OutboxQuerySet
from django_outbox.sql import dialect_of, engine_connection
from django_outbox.sql.values import Claimed, Found, LeaseKind
from django_outbox.worker import claimer, poll_times, stream_claims, throttle, watermark
from django_outbox.worker.statistics import Statistics
from django_outbox.worker.throttle import FULL_SCAN_FACTOR, LONGEST_PAUSE, Throttle
from django_outbox.worker.watermark import LATE_COMMIT_MARGIN, ScanningWatermark, Watermark
from tests.conformance.test_hot import engine_statements
from tests.table import (
    claimed,
    insert,
    keyed,
    listening,
    now,
    purging,
    rest_of,
    statuses,
    stream_claim,
    write,
)
from tests.waiting import wait_until

FAR = {"POLL_INTERVAL": 600, "PROBE_INTERVAL": 600}
ALL, SOME = Found(more=False), Found(more=True, waited=40.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock that watermarks and throttles use."""
    found = Clock()
    monkeypatch.setattr(watermark, "monotonic", found.monotonic)
    monkeypatch.setattr(throttle, "monotonic", found.monotonic)
    monkeypatch.setattr(throttle.random, "uniform", lambda low, high: 1.0)
    return found


def claim(clock: Clock, it: Watermark, found: Found, *, took: float = 0.5) -> float | None:
    """Claim once; return how many seconds back the scan begins, or None for a full scan."""
    age = it.begin_claim()
    clock.now += took
    it.end_claim(found)
    return age


def pause_for(seconds: float) -> Callable[[Throttle, float], None]:
    """Return a ``Throttle.after`` that pauses for this long, unless its factor is 0."""

    def after(self: Throttle, started: float) -> None:
        self.until = clocks.monotonic() + seconds * bool(self._factor)

    return after


# -- arithmetic ------------------------------------------------------------------------------------


def test_a_claim_begins_where_the_one_before_it_ended(clock: Clock) -> None:
    it = Watermark(margin=3)
    it.set(clock.now, 70)
    assert claim(clock, it, ALL) == 70 + LATE_COMMIT_MARGIN + 3
    clock.now += 2
    assert claim(clock, it, ALL) == 0.5 + 2 + LATE_COMMIT_MARGIN + 3
    assert claim(clock, it, ALL) == 0.5 + LATE_COMMIT_MARGIN + 3


def test_a_claim_that_left_some_is_followed_by_one_that_begins_where_it_began(clock: Clock) -> None:
    it = Watermark()
    claim(clock, it, SOME)
    assert claim(clock, it, SOME) == 0.5 + 40 + LATE_COMMIT_MARGIN


def test_what_was_skipped_is_above_the_watermark(clock: Clock) -> None:
    it = Watermark()
    claim(clock, it, ALL)
    clock.now += 5
    assert it.begin_claim() == 5.5 + LATE_COMMIT_MARGIN
    it.end_claim(ALL, skipped=True)
    clock.now += 1
    assert it.begin_claim() == 6.5 + LATE_COMMIT_MARGIN


def test_a_full_scan_is_followed_by_a_pause(clock: Clock) -> None:
    it = ScanningWatermark()
    for _ in range(2):
        assert claim(clock, it, ALL) is None
        assert it.next_scan() == math.inf
    clock.now += 1
    assert claim(clock, it, ALL, took=0.0) == 1.5 + LATE_COMMIT_MARGIN
    clock.now = it.next_scan()
    assert claim(clock, it, ALL) is None


def test_every_claim_may_be_a_full_scan(clock: Clock) -> None:
    it = ScanningWatermark(factor=0)
    assert [claim(clock, it, ALL) for _ in range(3)] == [None] * 3


def test_a_pause_is_a_multiple_of_the_work_but_bounded(clock: Clock) -> None:
    it = Throttle()
    short = FULL_SCAN_FACTOR * 0.005
    expected = [0, short, short, LONGEST_PAUSE, FULL_SCAN_FACTOR * 0.1]  # the shorter of the two
    for took, pause in zip((0.1, 0.005, 1000.0, 1000.0, 0.1), expected, strict=True):
        started, clock.now = clock.now, clock.now + took
        it.after(started)
        assert it.until == pytest.approx(clock.now + pause)


# -- the claims ------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("limit", [2, 3])
def test_a_claim_of_events_tells_whether_there_may_be_more(limit: int) -> None:
    insert(due=-30)
    insert(due=-20)
    found = claimed(limit=limit)
    assert (len(found.rows), found.found("default").more) == (2, limit == 2)
    assert 29 < found.found("default").waited < 60
    again = claimed(limit=limit)
    assert (again, again.found("default")) == (Claimed([], {}), ALL)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("limit", [2, 3])
def test_a_claim_of_streams_tells_whether_there_may_be_more(limit: int) -> None:
    keyed("a", due=-30)
    keyed("b", due=-20)
    claim = stream_claim(limit=limit)
    found = dialect_of(connection).claim_streams(connection, claim)
    assert found.rows == [("a", None, "default"), ("b", None, "default")]
    assert found.found("default").more == (limit == 2)
    assert 29 < found.found("default").waited < 60
    again = dialect_of(connection).claim_streams(connection, claim)
    assert (again, again.found("default")) == (Claimed([], {}), ALL)


@pytest.mark.django_db(transaction=True)
def test_a_claim_of_streams_reaches_back_as_far_as_it_is_told() -> None:
    keyed("old", due=-100)
    keyed("young", due=-10)
    found = dialect_of(connection).claim_streams(connection, stream_claim(since=50.0))
    assert [key for key, *_ in found.rows] == ["young"]


# -- a worker --------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_a_worker_delivers_new_events_while_full_scans_pause(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first scans, every claim begins at its watermark."""
    settings.OUTBOX = FAR
    monkeypatch.setattr(Throttle, "after", pause_for(600.0))
    with listening(lambda event: None), engine_statements() as seen, outbox.Worker():
        write()
        keyed("a", due=0)
        doorbell.ring(connection)
        wait_until(lambda: statuses() == {"DONE": 2}, what="the first looks")
        first = len(seen)
        for number in range(3, 9):
            insert()
            keyed(f"a-{number}", due=0)
            doorbell.ring(connection)
            wait_until(lambda: statuses().get("NEW", 0) == 0, what=f"{number} done")
    looks = [(sql, params) for sql, params in seen[first:] if BY_DUE_TIME.search(sql)]
    looks = [each for each in looks if "ORDER BY" in each[0]]
    assert len(looks) >= 12
    assert not [each for each in looks if not begins_late(*each)]


BY_DUE_TIME = re.compile(r"(available_at|due_at)\)? <= ")


def begins_late(sql: str, params: Any) -> bool:
    """Return whether a query by due time skips the beginning of the index."""
    if "b.age" in sql:  # PostgreSQL's claim has the bounds of all branches in an array
        return not any(CENTURY in each for each in params if isinstance(each, list))
    return bool(re.search(r"(available_at|due_at)\)? >= ", sql)) and "'-infinity'" not in sql


@pytest.mark.django_db(transaction=True)
def test_what_commits_late_is_found_by_the_next_full_scan(settings: Any) -> None:
    settings.OUTBOX = FAR
    with listening(lambda event: None), outbox.Worker():
        for number in range(1, 6):
            write()
            insert(due=-60 * number)  # as if its transaction had been open that long
            keyed(f"a-{number}", due=-60 * number)
            doorbell.ring(connection)
            wait_until(lambda n=number: statuses() == {"DONE": 3 * n}, what="what is late")


@pytest.mark.django_db(transaction=True)
def test_what_a_lost_worker_held_is_found_by_the_next_full_scan(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease ends while the scan for lost leases is throttled."""
    settings.OUTBOX = FAR | {"LEASE": 600}
    monkeypatch.setattr(claimer, "PROBATION", 600.0)  # its end would cause a scan too
    monkeypatch.setattr(poll_times, "DUE_TIME_FACTOR", 0.0)
    monkeypatch.setattr(
        stream_claims, "Throttle", lambda factor: Throttle(0)
    )  # for the claims of streams
    monkeypatch.setattr(Throttle, "after", pause_for(1.5))
    with listening(lambda event: None):
        write()
        insert(due=1.0, locked_by="a lost worker")
        with outbox.Worker():
            wait_until(lambda: statuses() == {"DONE": 2}, what="what was lost")


# -- other throttled queries -----------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_a_long_purge_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    for me, rest, least, most in (("a", 0.1, 50, 100), ("b", 3000.0, 2900, 3000)):
        monkeypatch.setattr(Throttle, "after", pause_for(rest))
        OutboxLease.objects.update(state=None)
        purger = purging(100, me=me)
        pause = rest_of(purger)
        assert least <= pause <= most
        assert purging(100, me="another").run() >= min(pause, 100) / 2  # other workers wait too


@pytest.mark.django_db(transaction=True)
def test_a_long_scan_for_the_oldest_is_followed_by_a_pause(
    monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: Any
) -> None:
    monkeypatch.setattr(Throttle, "after", pause_for(600.0))
    statistics = Statistics(alias="default", me="me")
    assert statistics.measure_lag() > 590
    with django_assert_num_queries(0):
        assert statistics.measure_lag() > 590


@pytest.mark.django_db(transaction=True)
def test_a_purge_does_not_wait_for_a_look_that_fails(
    settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = {"RETENTION_DONE": 1}
    insert(due=None, status=Status.DONE, done_at=now() - timedelta(seconds=60), made=61)

    def refused(rows: OutboxQuerySet) -> float:
        raise OperationalError("canceling statement due to statement timeout")

    monkeypatch.setattr(OutboxQuerySet, "oldest_pending_age", refused)
    with caplog.at_level(logging.WARNING, "django_outbox"):
        purging(1.0).step()
    assert "statement timeout" in caplog.text
    assert not OutboxEvent.objects.exists()


on_postgresql = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="its planner's choices"
)


def plan_of_settling(ids: Sequence[str], decision: Decision) -> str:
    """Return PostgreSQL's plan for the settle as an engine session sends it."""
    sent = list[tuple[str, Any]]()

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        sent.append((sql, params))
        return execute(sql, params, many, context)

    own = engine_connection("default", lock_wait=1)
    try:
        with own.execute_wrapper(note):
            decisions = [(each, decision) for each in ids]
            dialect_of(own).settle_all(own, me="me", decisions=decisions, kind=LeaseKind.STREAM)
        with own.cursor() as cursor:
            cursor.execute(f"EXPLAIN {sent[0][0]}", sent[0][1])
            return "\n".join(line for (line,) in cursor.fetchall())
    finally:
        own.close()


@pytest.mark.django_db(transaction=True)
@on_postgresql
def test_the_fence_of_keyed_events_is_looked_at_by_key_and_not_joined() -> None:
    """A join would begin with all streams, whose index is long while a snapshot is open."""
    plan = plan_of_settling(keyed("a", 3), DONE)
    assert "SubPlan" in plan and "outbox_event_pkey" in plan
    assert "Join" not in plan and "Nested Loop" not in plan


@pytest.mark.django_db(transaction=True)
@on_postgresql
def test_what_was_decided_is_written_row_by_row_however_few_rows_there_are() -> None:
    """To join few rows, PostgreSQL reads a whole index, which is long while a snapshot is open."""
    ids = keyed("a", 100)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE outbox_event")
    plan = plan_of_settling(ids, Decision(status=Status.RETRY, delay=60.0))
    assert "Nested Loop" in plan and "outbox_event_pkey" in plan
    assert "Hash" not in plan and "Merge" not in plan
