"""How far back looks at the table reach; beside an open snapshot the beginning is far away."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection

import django_outbox as outbox
from django_outbox import dialects, doorbell
from django_outbox.dialects.vocabulary import Claim, Claimed, Hold, StreamClaim
from django_outbox.engine import claimer, reach
from django_outbox.engine.reach import LONGEST, MARGIN, PART, Reach, Rest, Walks
from django_outbox.engine.statistics import Statistics
from django_outbox.models import OutboxEvent
from django_outbox.models.verbs import OutboxQuerySet
from django_outbox.outcomes import DONE, Decision, Status
from tests.table import insert, keyed, listening, now, purging, statuses, write
from tests.test_hot import engine_statements
from tests.waiting import wait_until

FAR = {"POLL_INTERVAL": 600, "PROBE_INTERVAL": 600}
ALL, SOME = Claimed([], more=False), Claimed([], more=True, waited=40.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stand in for the clock by which looks are counted."""
    found = Clock()
    monkeypatch.setattr(reach, "time", found)
    monkeypatch.setattr(reach.random, "uniform", lambda low, high: 1.0)
    return found


def look(clock: Clock, reach: Reach, found: Claimed, *, took: float = 0.5) -> float | None:
    """Claim; return how far back."""
    back = reach.back()
    clock.now += took
    reach.note(found)
    return back


def rest_for(seconds: float) -> Callable[[Rest, float], None]:
    """Stand in for ``Rest.after``, but for what is not to rest at all."""

    def after(rest: Rest, started: float) -> None:
        rest.until = time.monotonic() + seconds * bool(rest._part)

    return after


# -- the reckoning ---------------------------------------------------------------------------------


def test_a_claim_begins_where_the_one_before_it_ended(clock: Clock) -> None:
    it = Reach(margin=3)
    it.begin(clock.now, 70)
    assert look(clock, it, ALL) == 70 + MARGIN + 3
    clock.now += 2
    assert look(clock, it, ALL) == 0.5 + 2 + MARGIN + 3
    assert look(clock, it, ALL) == 0.5 + MARGIN + 3


def test_a_claim_that_left_some_is_followed_by_one_that_begins_where_it_began(clock: Clock) -> None:
    it = Reach()
    look(clock, it, SOME)
    assert look(clock, it, SOME) == 0.5 + 40 + MARGIN


def test_what_was_skipped_is_within_reach(clock: Clock) -> None:
    it = Reach()
    look(clock, it, ALL)
    clock.now += 5
    assert it.back() == 5.5 + MARGIN
    it.note(ALL, skipped=True)
    clock.now += 1
    assert it.back() == 6.5 + MARGIN


def test_a_walk_is_followed_by_a_rest(clock: Clock) -> None:
    it = Walks()
    for _ in range(2):
        assert look(clock, it, ALL) is None
        assert it.again() == math.inf
    clock.now += 1
    assert look(clock, it, ALL, took=0.0) == 1.5 + MARGIN
    clock.now = it.again()
    assert look(clock, it, ALL) is None


def test_a_walk_may_be_had_each_time(clock: Clock) -> None:
    it = Walks(part=0)
    assert [look(clock, it, ALL) for _ in range(3)] == [None] * 3


def test_a_rest_is_a_multiple_of_the_work_but_never_long(clock: Clock) -> None:
    rest = Rest()
    expected = [0, PART * 0.005, PART * 0.005, LONGEST, PART * 0.1]  # the shorter of the last two
    for took, part in zip((0.1, 0.005, 1000.0, 1000.0, 0.1), expected, strict=True):
        started, clock.now = clock.now, clock.now + took
        rest.after(started)
        assert rest.until == pytest.approx(clock.now + part)


# -- the claims ------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("limit", [2, 3])
def test_a_claim_of_events_tells_whether_there_may_be_more(limit: int) -> None:
    insert(due=-30)
    insert(due=-20)
    claim = Claim(me="me", lease=30, limit=limit)
    found = dialects.of(connection).claim(connection, claim)
    assert (len(found.rows), found.more) == (2, limit == 2)
    assert 29 < found.waited < 60
    assert dialects.of(connection).claim(connection, claim) == ALL


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("limit", [2, 3])
def test_a_claim_of_streams_tells_whether_there_may_be_more(limit: int) -> None:
    keyed("a", due=-30)
    keyed("b", due=-20)
    claim = StreamClaim(me="me", lease=30, limit=limit)
    found = dialects.of(connection).claim_streams(connection, claim)
    assert (found.rows, found.more) == ([("a", None), ("b", None)], limit == 2)
    assert 29 < found.waited < 60
    assert dialects.of(connection).claim_streams(connection, claim) == ALL


@pytest.mark.django_db(transaction=True)
def test_a_claim_of_streams_reaches_back_as_far_as_it_is_told() -> None:
    keyed("old", due=-100)
    keyed("young", due=-10)
    claim = StreamClaim(me="me", lease=30, limit=9, since=50.0)
    assert dialects.of(connection).claim_streams(connection, claim).rows == [("young", None)]


# -- a worker --------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_a_worker_whose_walks_rest_delivers_what_comes(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No statement of its looks begins at the beginning, once the first have."""
    settings.OUTBOX = FAR
    monkeypatch.setattr(Rest, "after", rest_for(600.0))
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
    looks = [sql for sql, _ in seen[first:] if re.search(r"(available_at|due_at) <= \S+ ", sql)]
    looks = [sql for sql in looks if "ORDER BY" in sql]
    assert len(looks) >= 12
    assert not [sql for sql in looks if not re.search(r"(available_at|due_at) >= ", sql)]


@pytest.mark.django_db(transaction=True)
def test_what_commits_late_is_found_by_the_next_walk(settings: Any) -> None:
    settings.OUTBOX = FAR
    with listening(lambda event: None), outbox.Worker():
        for number in range(1, 6):
            write()
            insert(due=-60 * number)  # as if its transaction had been open for so long
            keyed(f"a-{number}", due=-60 * number)
            doorbell.ring(connection)
            wait_until(lambda n=number: statuses() == {"DONE": 3 * n}, what="what is late")


@pytest.mark.django_db(transaction=True)
def test_what_a_lost_worker_held_is_looked_for_once_that_may_be(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease ends while the look for what is lost rests."""
    settings.OUTBOX = FAR | {"LEASE": 600}
    monkeypatch.setattr(claimer, "PROBATION", 600.0)  # else there is a look of another kind
    monkeypatch.setattr(claimer, "ASKING", 0.0)
    monkeypatch.setattr(reach, "Rest", lambda part: Rest(0))  # of the claims of streams
    monkeypatch.setattr(Rest, "after", rest_for(1.5))
    with listening(lambda event: None):
        write()
        insert(due=1.0, locked_by="a lost worker")
        with outbox.Worker():
            wait_until(lambda: statuses() == {"DONE": 2}, what="what was lost")


# -- beside the claims -----------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_a_purge_that_took_long_rests_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    purger = purging(1.0)
    for rest, least, most in ((0.1, 0.9, 1.1), (30.0, 26.9, 33.0)):
        monkeypatch.setattr(Rest, "after", rest_for(rest))
        assert least <= purger.run() <= most


@pytest.mark.django_db(transaction=True)
def test_a_look_for_the_oldest_that_took_long_rests_too(
    monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: Any
) -> None:
    monkeypatch.setattr(Rest, "after", rest_for(600.0))
    statistics = Statistics(alias="default", me="me")
    assert statistics.look() > 590
    with django_assert_num_queries(0):
        assert statistics.look() > 590


@pytest.mark.django_db(transaction=True)
def test_a_purge_does_not_wait_for_a_look_that_fails(
    settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = {"RETENTION_DONE": 1}
    insert(due=None, status=Status.DONE, done_at=now() - timedelta(seconds=60))

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
    """Return how an engine's session would go about it."""
    sent = list[tuple[str, Any]]()

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        sent.append((sql, params))
        return execute(sql, params, many, context)

    own = dialects.engine_connection("default", lock_wait=1)
    try:
        with own.execute_wrapper(note):
            decisions = [(each, decision) for each in ids]
            dialects.of(own).settle_all(own, me="me", decisions=decisions, hold=Hold.STREAM)
        with own.cursor() as cursor:
            cursor.execute(f"EXPLAIN {sent[0][0]}", sent[0][1])
            return "\n".join(line for (line,) in cursor.fetchall())
    finally:
        own.close()


@pytest.mark.django_db(transaction=True)
@on_postgresql
def test_the_fence_of_keyed_events_is_looked_at_by_key_and_not_joined() -> None:
    """Joined, it began with all streams: their index is long beside an open snapshot."""
    plan = plan_of_settling(keyed("a", 3), DONE)
    assert "SubPlan" in plan and "outbox_event_pkey" in plan
    assert "Join" not in plan and "Nested Loop" not in plan


@pytest.mark.django_db(transaction=True)
@on_postgresql
def test_what_was_decided_is_written_row_by_row_however_few_rows_there_are() -> None:
    """To join few rows PostgreSQL reads a whole index, which is long beside an open snapshot."""
    ids = keyed("a", 100)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE outbox_event")
    plan = plan_of_settling(ids, Decision(status=Status.RETRY, delay=60.0))
    assert "Nested Loop" in plan and "outbox_event_pkey" in plan
    assert "Hash" not in plan and "Merge" not in plan
