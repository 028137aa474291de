"""Claims, leases and settles: the contract of the event table, the same on every database."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction

from django_outbox.conf import current
from django_outbox.events import stored_instant
from django_outbox.listeners.outcomes import DONE, Decision, Status
from django_outbox.models import OutboxEvent
from django_outbox.sql import dialect_of, engine_connection
from django_outbox.sql.values import EVENTS, RescueState
from django_outbox.worker import settler
from tests import databases
from tests.table import (
    claim,
    claimed,
    due_claim,
    elsewhere,
    end_leases,
    endings,
    events_of,
    ids_claimed_by_an_engine,
    ids_of,
    in_thread,
    insert,
    lease_ends_in,
    leases,
    now,
    row,
    steal,
    unclaimed,
)

pytestmark = pytest.mark.django_db(transaction=True)

MOMENT = timedelta(seconds=5)  # from the SELECT of a claim to its UPDATE, at most
RETRY = Decision(status=Status.RETRY, delay=5.0, spent=1, error="it failed", outcome="retry")
DEFER = Decision(status=Status.NEW, delay=5.0, outcome="deferred")
DEAD = Decision(status=Status.DEAD, spent=1, error="it is over", outcome="dead")


WAYS = ["one by one", *(["at once"] if databases.vendor() == "mariadb" else [])]


@pytest.fixture(params=WAYS)
def assignments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Test both ways in which an UPDATE can read a column that it also assigns.

    MariaDB reads the new value, or the old one in ``SIMULTANEOUS_ASSIGNMENT`` mode.
    """
    if request.param == "one by one":
        yield
        return
    options = {
        **connections.settings["default"]["OPTIONS"],
        "init_command": "SET SESSION sql_mode = CONCAT(@@sql_mode, ',SIMULTANEOUS_ASSIGNMENT')",
    }
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", options)
    connection.close()  # the next connection runs init_command
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@sql_mode")
        assert "SIMULTANEOUS_ASSIGNMENT" in cursor.fetchone()[0]
    yield
    connection.close()


def dialect() -> Any:
    return dialect_of(connection)


def settle(event_id: str, decision: Decision, *, me: str = "me") -> int:
    return int(dialect().settle_all(me=me, endings=endings([(event_id, decision)])))


# -- what a claim takes ----------------------------------------------------------------------------


def test_182_a_claim_leases() -> None:
    (event_id,) = insert(due=-2)
    (found,) = claim(lease=30)
    after = row(event_id)
    assert found["id"] == event_id
    assert found["previous_owner"] is None
    assert after.locked_by == "me"
    assert (after.status, after.attempts, after.rescues) == (Status.NEW, 0, 0)
    assert after.locked_at is not None
    assert timedelta(0) <= after.available_at - after.locked_at - timedelta(seconds=30) < MOMENT
    assert abs((now() - after.locked_at).total_seconds()) < 5


def test_a_claim_tells_when_the_event_was_due_and_what_the_clock_says() -> None:
    (event_id,) = insert(due=-7)
    before = row(event_id).available_at
    (found,) = claim()
    leased_at, told = row(event_id).locked_at, stored_instant(found["now"])
    assert stored_instant(found["due_at"]) == before
    assert leased_at is not None
    assert told is not None
    assert leased_at >= told  # two statements, except on PostgreSQL


def test_a_claim_brings_every_field_of_the_event() -> None:
    given = {
        "event_type": "order.paid",
        "aggregate_type": "shop.Order",
        "aggregate_id": "7",
        "tenant_id": "north",
        "payload": '{"sku": "☕"}',
        "headers": '{"trace": "1"}',
        "unique_key": "paid-7",
        "attempts": 3,
        "listener": "order.paid",
        "routes": "0123456789abcdef",
    }
    insert(**given)
    (found,) = claim()
    assert {name: found[name] for name in given} == given


def test_an_ended_lease_is_taken_and_counted_as_a_rescue() -> None:
    (event_id,) = insert(attempts=2)
    claim("lost worker")
    end_leases([event_id])
    (found,) = claim("second")
    assert (found["previous_owner"], found["rescues"], found["attempts"]) == ("lost worker", 1, 2)
    after = row(event_id)
    assert (after.locked_by, after.rescues, after.attempts) == ("second", 1, 2)


@pytest.mark.parametrize(("limit", "expected"), [(4, 4), (5, 5), (6, 5)])
def test_g8_limit_below_at_and_above(limit: int, expected: int) -> None:
    insert(5, due=-1)
    assert len(claim(limit=limit)) == expected
    assert OutboxEvent.objects.leased().count() == expected


def test_j16_rows_written_just_now_are_skipped() -> None:
    (old,) = insert(created_at=now() - timedelta(seconds=60))
    insert()
    assert ids_of(claim(skip_recent=10)) == [old]
    assert len(claim(skip_recent=0)) == 1


def test_at_stands_for_now() -> None:
    (soon,) = insert(due=60)
    insert(due=7200)
    assert ids_of(claim(at=now() + timedelta(seconds=600))) == [soon]
    assert 25 < lease_ends_in(soon) <= 30  # the lease itself follows the database's clock


# -- hot ids ---------------------------------------------------------------------------------------


def test_a_hot_claim_takes_only_what_it_names_and_is_due_and_free() -> None:
    first, second, other, theirs = insert(4)
    (later,) = insert(due=3600)
    (done,) = insert(due=None, status=Status.DONE)
    claim("other", ids=[theirs])
    found = claim(ids=[first, "never-written", later, done, theirs, second])
    assert sorted(ids_of(found)) == sorted([first, second])
    assert (row(other).locked_by, row(theirs).locked_by) == (None, "other")


def test_g2_377_a_claim_does_not_return_an_uncommitted_id() -> None:
    if connection.vendor == "sqlite":
        pytest.skip("an open SQLite transaction keeps every other writer out")
    written: list[str] = []
    with elsewhere(lambda: written.extend(insert(due=-1))):
        assert claim(ids=written) == []
        assert claim() == []
    assert ids_of(claim(ids=written)) == written


# -- events of lost workers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rescues", "owner", "state"),
    [
        (0, None, RescueState.ORDINARY),
        (0, "me", RescueState.ORDINARY),
        (0, "lost", RescueState.ORDINARY),
        (1, None, RescueState.ORDINARY),
        (1, "me", RescueState.ORDINARY),
        (1, "lost", RescueState.SUSPECT),
        (2, None, RescueState.SUSPECT),
        (2, "me", RescueState.SUSPECT),
        (4, "lost", RescueState.SUSPECT),
    ],
)
def test_what_two_workers_were_lost_with_is_left_to_a_quarantine(
    rescues: int, owner: str | None, state: RescueState
) -> None:
    (event_id,) = insert(due=-1, rescues=rescues, locked_by=owner)
    assert suspects() == [(EVENTS, "default")] * (state is RescueState.SUSPECT)
    assert [claim(state=other) for other in RescueState if other is not state] == [[]]
    (found,) = claim(state=state)
    expected = rescues + (owner == "lost")
    assert (found["rescues"], row(event_id).rescues) == (expected, expected)


def suspects(limit: int = 10) -> Any:
    return dialect().suspects(me="me", queues=["default"], limit=limit)


@pytest.mark.parametrize("lost", [{"rescues": 2}, {"rescues": 1, "locked_by": "lost"}])
def test_a_hot_claim_leaves_a_suspect(lost: dict[str, Any]) -> None:
    (event_id,) = insert(due=-1, **lost)
    assert claim(ids=[event_id]) == []


def test_suspects_are_looked_for_in_what_is_due_first() -> None:
    insert(2, due=-10)
    insert(due=-5, rescues=2)
    insert(due=30, rescues=2)
    assert suspects(limit=2) == []
    assert suspects(limit=3) == [(EVENTS, "default")]


# -- many at once ----------------------------------------------------------------------------------


def test_w9_concurrent_claims_keep_to_their_limit_and_share_no_row() -> None:
    ids = insert(1000, due=-1)
    start = threading.Barrier(4)

    def take(name: str) -> list[list[str]]:
        start.wait(10)
        found = []
        for _ in range(200):  # a lost race may return nothing, so an empty claim is not the end
            found.append(ids_of(claim(name, limit=50)))
            if not OutboxEvent.objects.due().exists():
                break
        return found

    futures = [in_thread(lambda name=name: take(name)) for name in "abcd"]  # type: ignore[misc]
    batches = [batch for future in futures for batch in future.result(60)]
    taken = [event_id for batch in batches for event_id in batch]
    assert max(map(len, batches)) == 50
    assert sorted(taken) == sorted(ids)  # each once
    assert OutboxEvent.objects.filter(rescues=0).count() == 1000


def test_locked_rows_hide_none_that_are_due_later() -> None:
    if connection.vendor == "sqlite":
        pytest.skip("an open SQLite transaction keeps every other writer out")
    locked, free = insert(3, due=-2), insert(3, due=-1)
    with elsewhere(lambda: OutboxEvent.objects.filter(pk__in=locked).update(tenant_id="locked")):
        assert ids_claimed_by_an_engine(limit=3) == sorted(free)
    assert ids_claimed_by_an_engine(limit=3) == sorted(locked)


def test_191_no_wait_without_bound_behind_a_locked_row() -> None:
    """A claim skips a row that is locked elsewhere, or gives up after its lock wait."""
    locked, *free = insert(5, due=-1)

    def lock() -> None:
        OutboxEvent.objects.filter(pk=locked).update(tenant_id="locked")

    with elsewhere(lock):
        future = in_thread(lambda: ids_claimed_by_an_engine(limit=10))
        if connection.features.has_select_for_update_skip_locked:
            assert future.result(10) == sorted(free)
        else:
            assert "lock" in str(future.exception(10)).lower()
    assert row(locked).locked_by is None


@pytest.mark.skipif("connection.vendor != 'mysql'", reason="others never wait for a row")
def test_after_a_lock_wait_mysql_claims_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One claim in five minutes may wait for a locked row; the others skip it at once."""
    monkeypatch.setattr(type(dialect()), "_skips_until", 0.0)
    locked, *free = insert(5, due=-1)
    own = engine_connection("default", lock_wait=1)
    waited = []

    def claim_one() -> str:
        started = time.monotonic()
        found = dialect_of(own).claim(due_claim(limit=1)).rows
        waited.append(time.monotonic() - started > 0.9)
        return str(found[0][0])

    try:
        with elsewhere(lambda: OutboxEvent.objects.filter(pk=locked).update(tenant_id="locked")):
            claimed = [claim_one() for _ in free]
        assert (claimed, waited) == (free, [True, False, False, False])
        assert claim_one() == locked
    finally:
        own.close()


@pytest.mark.skipif("connection.vendor != 'mysql'", reason="others never wait for a row")
def test_a_claim_in_a_transaction_skips_locked_rows() -> None:
    """Its lock wait is the session's, 50 s by default, and a timeout could undo the transaction."""
    locked, free = insert(2, due=-1)
    business = elsewhere(lambda: OutboxEvent.objects.filter(pk=locked).update(tenant_id="locked"))
    with business, transaction.atomic():
        assert ids_of(claim(limit=2)) == [free]


# -- renew and give back ---------------------------------------------------------------------------


def renew(ids: list[str], *, me: str = "me", lease: float = 90) -> tuple[set[str], set[str]]:
    answer: tuple[set[str], set[str]] = dialect().renew(me=me, leases=leases(ids), lease=lease)
    return answer


def test_renew_prolongs() -> None:
    ids = insert(3)
    claim(lease=5)
    assert renew(ids) == (set(ids), set(ids))
    assert all(85 < lease_ends_in(each) <= 90 for each in ids)


def test_renew_reports_what_is_lost() -> None:
    kept, stolen, done, deleted = ids = insert(4)
    claim(lease=5)
    steal(stolen)
    assert settle(done, DONE) == 1
    OutboxEvent.objects.filter(pk=deleted).delete()
    assert renew(ids) == ({kept}, {kept})
    assert lease_ends_in(stolen) <= 5
    assert row(done).available_at is None


def test_renew_skips_what_somebody_has_locked() -> None:
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip(f"no SKIP LOCKED on {connection.vendor}")
    locked, free = ids = insert(2)
    claim(lease=20)

    def lock() -> None:
        OutboxEvent.objects.filter(pk=locked).update(tenant_id="locked")

    with elsewhere(lock):
        renewed, mine = in_thread(lambda: renew(ids)).result(5)
    assert (renewed, mine) == ({free}, set(ids))
    assert lease_ends_in(locked) <= 20 < lease_ends_in(free)


@pytest.mark.parametrize("after", [None, 1.0])
def test_a_hand_back_clears_the_owner_and_counts_nothing(after: float | None) -> None:
    mine, other, done = insert(3, attempts=1, rescues=1)
    claim("me", ids=[mine, done])
    claim("other", ids=[other])
    dialect().settle_done(me="me", ids=[done])
    ids = [mine, other, done]
    assert dialect().release(me="me", leases=leases(ids), after=after) == 1
    after_it = row(mine)
    assert (after_it.locked_by, after_it.locked_at) == (None, None)
    assert (after_it.attempts, after_it.rescues, after_it.status) == (1, 1, Status.NEW)
    assert lease_ends_in(mine) <= 1 if after else lease_ends_in(mine) > 20
    assert row(other).locked_by == "other"
    assert row(done).available_at is None
    decisions = [(mine, RETRY)]
    assert dialect().settle_all(me="me", endings=endings(decisions)) == 0


# -- settle ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("assignments")
def test_j11_settling_done_twice_is_harmless() -> None:
    (event_id,) = insert()
    claim()
    assert settle(event_id, DONE) == 1
    first = row(event_id)
    assert settle(event_id, DONE) == 0
    assert row(event_id).__dict__ | {"_state": 0} == first.__dict__ | {"_state": 0}
    assert (first.status, first.available_at) == (Status.DONE, None)
    assert first.done_at is not None
    assert abs((now() - first.done_at).total_seconds()) < 5


@pytest.mark.parametrize("decision", [DONE, RETRY, DEFER, DEAD], ids=lambda each: each.outcome)
def test_g8_a_stale_owner_settles_nothing(decision: Decision) -> None:
    (event_id,) = insert()
    claim("stale")
    end_leases([event_id])
    claim("owner")
    before = row(event_id).__dict__ | {"_state": 0}
    assert settle(event_id, decision, me="stale") == 0
    assert row(event_id).__dict__ | {"_state": 0} == before
    assert settle(event_id, decision, me="owner") == 1


@pytest.mark.parametrize("decision", [DONE, RETRY, DEFER, DEAD], ids=lambda each: each.outcome)
@pytest.mark.parametrize("status", [Status.DEAD, Status.DONE])
def test_j11_what_is_final_is_not_touched(decision: Decision, status: Status) -> None:
    (event_id,) = insert(due=None, status=status, locked_by="me", last_error="final")
    assert settle(event_id, decision) == 0
    after = row(event_id)
    assert (after.status, after.last_error, after.attempts) == (status, "final", 0)


@pytest.mark.usefixtures("assignments")
@pytest.mark.parametrize("decision", [DONE, RETRY, DEFER, DEAD], ids=lambda each: each.outcome)
def test_j11_each_settle_clears_the_lease_and_the_rescues_but_for_done(decision: Decision) -> None:
    (event_id,) = insert(rescues=1)
    claim()
    assert settle(event_id, decision) == 1
    after = row(event_id)
    assert (after.locked_by, after.locked_at) == (None, None)
    if decision is not DONE:
        assert after.rescues == 0


@pytest.mark.usefixtures("assignments")
def test_retry_counts_and_is_due_by_the_databases_clock() -> None:
    (event_id,) = insert(attempts=2)
    claim()
    before = now()
    settle(event_id, RETRY)
    after, passed = row(event_id), (now() - before).total_seconds()
    assert (after.status, after.attempts, after.last_error) == (Status.RETRY, 3, "it failed")
    assert after.done_at is None
    assert after.available_at is not None
    delay = (after.available_at - before).total_seconds()
    assert 5 - 0.002 <= delay <= 5 + passed + 0.002  # SQLite's clock counts milliseconds
    assert claim() == []


@pytest.mark.usefixtures("assignments")
def test_defer_keeps_attempts_and_the_last_error() -> None:
    (event_id,) = insert(attempts=2, last_error="an earlier failure", status=Status.RETRY)
    claim()
    settle(event_id, DEFER)
    after = row(event_id)
    assert (after.status, after.attempts, after.last_error) == (Status.NEW, 2, "an earlier failure")
    assert 3 < lease_ends_in(event_id) <= 5


@pytest.mark.usefixtures("assignments")
def test_dead_is_final_and_dated() -> None:
    (event_id,) = insert(attempts=9)
    claim()
    settle(event_id, DEAD)
    after = row(event_id)
    assert (after.status, after.attempts, after.last_error) == (Status.DEAD, 10, "it is over")
    assert after.available_at is None
    assert after.done_at is not None
    assert abs((now() - after.done_at).total_seconds()) < 5


# A batch is settled with one statement per kind of decision.
@pytest.mark.usefixtures("assignments")
def test_a_mixed_batch_settles_each_row_by_its_own_decision() -> None:
    decisions = [DONE, RETRY, DEFER, DEAD] * 160  # more than fits in one statement
    ids = insert(len(decisions))
    claim(limit=1000)
    pairs = list(zip(ids, decisions, strict=True))
    assert dialect().settle_all(me="me", endings=endings(pairs)) == len(ids)
    found = dict(OutboxEvent.objects.values_list("event_id", "status"))
    assert found == {event_id: decision.status for event_id, decision in pairs}
    assert OutboxEvent.objects.filter(locked_by=None).count() == len(ids)
    dated = OutboxEvent.objects.filter(done_at__isnull=False)
    assert {*dated.values_list("status", flat=True)} == {Status.DONE, Status.DEAD}
    assert dated.count() == len(ids) // 2


def test_delete_done_keeps_what_has_a_unique_key() -> None:
    plain, unique = [*insert(), *insert(unique_key="once")]
    claim()
    pairs = [(plain, DONE), (unique, DONE)]
    count = dialect().settle_all(me="me", endings=endings(pairs), delete_done=True)
    assert count == 2
    assert [*OutboxEvent.objects.values_list("pk", "status")] == [(unique, Status.DONE)]


def next_due() -> dict[str, float]:
    found: dict[str, float] = dialect().seconds_to_next_due(queues=["default"])
    return found


@pytest.mark.skipif(connection.vendor != "sqlite", reason="others have their plans at the server")
def test_statements_of_every_length_do_not_pile_up() -> None:
    """Each list length is a statement of its own, and the driver keeps every compiled one."""

    def kept() -> int:
        gc.collect()
        return [type(each).__name__ for each in gc.get_objects()].count("Statement")

    own = engine_connection("default", lock_wait=1)
    try:
        before, clock = kept(), now()
        for length in range(1, 101):
            held = {f"{number}": clock for number in range(length)}
            dialect_of(own).settle_done(me="me", ids=[*held])
        assert 0 < kept() - before <= 40
    finally:
        own.close()


# -- memory of a claim -----------------------------------------------------------------------------


def test_a_claim_is_cut_where_it_has_enough_payload() -> None:
    """The last row may exceed the limit; the remaining rows stay unlocked for the next claim."""
    ids = insert(60, payload='"' + 998 * "x" + '"')
    found = claim(most_bytes=10_000)
    first = [each["id"] for each in found]
    assert first == ids[: len(first)]
    # Other databases fetch several rows at a time; only PostgreSQL's statement cuts exactly.
    assert len(first) == 10 if connection.vendor == "postgresql" else 10 <= len(first) <= 25
    assert {each.locked_by for each in OutboxEvent.objects.exclude(pk__in=first)} == {None}
    again = claimed(limit=1, most_bytes=1)
    assert [row[0] for row in again.rows] == [ids[len(first)]]
    assert again.found("default").more


def test_a_cut_claim_says_that_more_is_due_whatever_the_characters() -> None:
    """The limit counts bytes, and a character may have more than one."""
    ids = insert(10, payload='"' + 400 * "é" + '"')
    found = claimed(limit=10, most_bytes=1000)
    assert found.found("default").more  # other databases may say so although nothing is left
    if connection.vendor == "postgresql":
        assert [row[0] for row in found.rows] == ids[:2]


# -- leases put back -------------------------------------------------------------------------------


def test_leases_are_put_back_with_their_due_times() -> None:
    """But for those that are settled, or another worker's."""
    ids = [*insert(due=-9), *insert(due=-5), *insert(due=-2)]
    (settled,) = insert(due=-1)
    due = {each: row(each).available_at for each in [*ids, settled]}
    claim()
    steal(ids[1])
    settle(settled, DONE)
    put = unclaimed((each, at, "default") for each, at in due.items())
    assert dialect().unclaim(me="me", due=put) == set()
    after = [row(each) for each in ids]
    assert [each.available_at == due[each.event_id] for each in after] == [True, False, True]
    assert [each.locked_by for each in after] == [None, "thief", None]
    assert [(each.attempts, each.rescues) for each in after] == [(0, 0)] * 3
    assert row(settled).available_at is None
    assert [each["id"] for each in claim()] == [ids[0], ids[2]]


def test_many_leases_are_put_back() -> None:
    ids = insert(550, due=-9)
    rows = claim(limit=1000)
    due = unclaimed((each["id"], stored_instant(each["due_at"]), each["queue"]) for each in rows)
    assert dialect().unclaim(me="me", due=due) == set()
    assert OutboxEvent.objects.due().filter(locked_by=None).count() == len(ids)


# -- an answer that is lost ------------------------------------------------------------------------


def test_a_repeated_settle_leaves_a_newer_lease_of_its_own_worker() -> None:
    [event_id] = insert()
    [lease] = events_of(claimed().rows)
    decision = Decision(status=Status.RETRY, delay=0.0, spent=1, error="x", outcome="retry")
    written = {"connection": connection, "me": "me", "settings": current()}
    assert settler.write([(lease, decision)], **written) == 0
    assert ids_of(claim("me")) == [event_id]
    assert settler.write([(lease, decision)], **written) == 1
    assert (row(event_id).attempts, row(event_id).locked_by) == (1, "me")
