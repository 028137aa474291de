"""Leases of streams: claim, read, settle, release and renew behave alike on every database."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F

from django_outbox.events import stored_instant
from django_outbox.listeners.outcomes import DONE, Decision, Status
from django_outbox.listeners.queues import Route
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of, engine_connection
from django_outbox.sql.values import KEYED, STREAMS, LeaseKind, RescueState, StreamQuery
from tests.table import (
    claim,
    elsewhere,
    end_stream_leases,
    endings,
    ids_of,
    in_thread,
    insert,
    keyed,
    leases,
    names,
    now,
    releases,
    row,
    stream,
    stream_claim,
    stream_due_in,
    stream_leases,
    stream_row,
)

pytestmark = pytest.mark.django_db(transaction=True)

MOMENT = timedelta(seconds=5)  # from the SELECT of a claim to its UPDATE, at most
RETRY = Decision(status=Status.RETRY, delay=5.0, spent=1, error="it failed", outcome="retry")
DEFER = Decision(status=Status.NEW, delay=5.0, outcome="deferred")
ROUTE = Route("order.placed mail", "a" * 16, "default", "mail")
DEAD = Decision(status=Status.DEAD, spent=1, error="it is over", outcome="dead")

NO_SESSIONS = pytest.mark.skipif(
    "connection.vendor == 'sqlite'", reason="an open SQLite transaction keeps every writer out"
)


def dialect() -> Any:
    return dialect_of(connection)


def take(me: str = "me", **more: Any) -> list[str]:
    """Claim due streams; return their keys."""
    return [name[1:] for name, *_ in found(me, **more)]


def found(me: str = "me", **more: Any) -> Any:
    """Claim due streams; return name, previous owner, queue and instant of the lease of each."""
    rows = dialect().claim(stream_claim(me, **more)).rows
    return [
        (name, owner, queue, leased_at) for name, queue, _rescues, _due, owner, leased_at in rows
    ]


def next_due() -> dict[str, float]:
    answer: dict[str, float] = dialect().seconds_to_next_due(queues=["default"])
    return answer


def read(*keys: str, me: str = "me", limit: int = 100, **more: Any) -> dict[str, Any]:
    wanted = StreamQuery(me=me, streams=stream_leases(names(*keys)), limit=limit, **more)
    return {each.name[1:]: each for each in dialect().read_streams(wanted)}


def ids(found: Any) -> list[str]:
    return [each[0] for each in found.rows]


def settle(event_id: str, decision: Decision = DONE, *, me: str = "me") -> int:
    pairs = [(event_id, decision)]
    return int(dialect().settle_all(me=me, endings=endings(pairs), kind=LeaseKind.STREAM))


def release(key: str, seq: int | None, delay: float | None = None, *, me: str = "me") -> bool:
    streams = releases((f":{key}", seq, delay))
    given = dialect().release_streams(me=me, streams=streams)
    assert given in (set(), {f":{key}"})
    return bool(given)


def renew(*keys: str, me: str = "me", lease: float = 90) -> tuple[set[str], set[str]]:
    held = stream_leases(names(*keys))
    answer = dialect().renew(me=me, leases=held, lease=lease, table=STREAMS)
    renewed, held = ({each[1:] for each in some} for some in answer)
    return renewed, held


# -- claim -----------------------------------------------------------------------------------------


def test_a_claim_leases_a_due_stream() -> None:
    keyed("order-1", due=-2)
    [(*taken, leased_at)] = found(lease=30)
    assert taken == [":order-1", None, "default"]
    after = stream("order-1")
    assert after.locked_at == stored_instant(leased_at)
    assert after.locked_by == "me"
    assert after.locked_at is not None
    assert timedelta(0) <= after.due_at - after.locked_at - timedelta(seconds=30) < MOMENT
    assert abs((now() - after.locked_at).total_seconds()) < 5


def test_an_idle_an_undue_and_a_leased_stream_are_left() -> None:
    keyed("idle", due=None)
    keyed("later", due=60)
    keyed("taken", due=-1)
    assert take("another") == ["taken"]
    assert take() == []


def test_held_keys_are_left_out() -> None:
    keyed("held", due=-2)
    keyed("free", due=-1)
    assert take(exclude=[":held"]) == ["free"]


def test_at_stands_for_now() -> None:
    keyed("soon", due=60)
    keyed("late", due=7200)
    assert take(at=now() + timedelta(seconds=600)) == ["soon"]
    assert 25 < stream_due_in("soon") <= 30


def test_a_lost_owner_is_told_and_my_own_ended_lease_too() -> None:
    keyed("order-1")
    take("lost worker")
    end_stream_leases("order-1")
    assert [each[:2] for each in found()] == [(":order-1", "lost worker")]
    end_stream_leases("order-1")
    assert [each[:2] for each in found()] == [(":order-1", "me")]


def test_n4_concurrent_claims_share_no_stream() -> None:
    keys = [f"order-{n}" for n in range(300)]
    OutboxStream.objects.bulk_create(
        [
            OutboxStream(stream=f":{key}", key=key, seq=1, due_at=now() - timedelta(seconds=1))
            for key in keys
        ]
    )
    start = threading.Barrier(4)

    def claim_all(me: str) -> list[str]:
        start.wait(10)
        taken: list[str] = []
        while OutboxStream.objects.filter(locked_by=None).exists():
            taken += take(me, limit=20)
        return taken

    futures = [in_thread(lambda me=me: claim_all(me)) for me in "abcd"]  # type: ignore[misc]
    taken = [key for future in futures for key in future.result(60)]
    assert sorted(taken) == sorted(keys)


# -- read ------------------------------------------------------------------------------------------


def test_a_read_brings_the_version_and_the_events_in_order() -> None:
    first = keyed("a", 3)
    other = keyed("b", 1)
    take()
    streams = read("a", "b")
    assert ids(streams["a"]) == first
    assert ids(streams["b"]) == other
    assert (streams["a"].seq, streams["b"].seq) == (3, 1)
    told = stored_instant(streams["a"].now)
    assert told is not None
    assert abs((now() - told).total_seconds()) < 5
    seqs = [each[KEYED.index("seq")] for each in streams["a"].rows]
    assert seqs == [1, 2, 3]


def test_a_read_brings_every_field_of_the_event() -> None:
    given = {
        "event_type": "order.paid",
        "aggregate_type": "shop.Order",
        "aggregate_id": "7",
        "tenant_id": "north",
        "payload": '{"sku": "☕"}',
        "headers": '{"trace": "1"}',
        "unique_key": "paid-7",
        "attempts": 3,
        "rescues": 1,
        "status": 2,
        "listener": "order.paid",
        "routes": "0123456789abcdef",
    }
    keyed("a", **given)
    take()
    (event,) = read("a")["a"].rows
    event = dict(zip(KEYED, event, strict=False))
    assert {name: event[name] for name in given} == given


def test_the_limit_is_for_each_stream() -> None:
    long, short = keyed("long", 50), keyed("short", 2)
    take()
    streams = read("long", "short", limit=5)
    assert ids(streams["long"]) == long[:5]
    assert ids(streams["short"]) == short


def test_failures_that_wait_are_passed_over_on_demand() -> None:
    waiting, due, deferred, new = keyed("a", 4)
    rows = OutboxEvent.objects
    rows.filter(pk=waiting).update(status=2, deliver_at=now() + timedelta(seconds=60))
    rows.filter(pk=due).update(status=2, deliver_at=now() - timedelta(seconds=1))
    rows.filter(pk=deferred).update(status=0, deliver_at=now() + timedelta(seconds=60))
    take()
    assert ids(read("a")["a"]) == [waiting, due, deferred, new]
    assert ids(read("a", only_due_retries=True)["a"]) == [due, deferred, new]
    wanted = StreamQuery(me="me", streams=stream_leases([":a", ":b"]), limit=9)
    assert dialect().next_retries(wanted) == {":a": row(due).deliver_at}


def test_a_failure_behind_a_dead_one_is_not_waited_for_where_dead_ones_end_a_stream() -> None:
    before, dead, behind = keyed("a", 3)
    rows = OutboxEvent.objects
    rows.filter(pk=before).update(status=2, deliver_at=now() + timedelta(seconds=60))
    rows.filter(pk=behind).update(status=2, deliver_at=now() + timedelta(seconds=30))
    rows.filter(pk=dead).update(status=Status.DEAD, done_at=now())
    wanted = StreamQuery(me="me", streams=stream_leases([":a"]), limit=9)
    assert dialect().next_retries(wanted) == {":a": row(behind).deliver_at}
    wanted = StreamQuery(me="me", streams=stream_leases([":a"]), limit=9, dead_too=True)
    assert dialect().next_retries(wanted) == {":a": row(before).deliver_at}


def test_what_is_not_mine_is_not_read() -> None:
    keyed("mine")
    take()
    keyed("theirs")
    take("another")
    keyed("nobodys", due=None)
    assert [*read("mine", "theirs", "nobodys", "never written")] == ["mine"]


def test_a_stream_without_events_is_read_as_one() -> None:
    stream_row("a", seq=7, due_at=now()).save()
    take()
    assert (read("a")["a"].seq, read("a")["a"].rows) == (7, [])


def test_many_streams_at_once() -> None:
    given = {f"order-{n}": keyed(f"order-{n}", 2) for n in range(120)}
    assert len(take(limit=200)) == 120
    assert {key: ids(each) for key, each in read(*given).items()} == given


# -- settle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("decision", [DONE, RETRY, DEFER, DEAD], ids=lambda each: each.outcome)
def test_the_streams_owner_settles_and_nobody_else(decision: Decision) -> None:
    (event_id,) = keyed("a", rescues=1)
    assert settle(event_id, decision) == 0  # not leased
    take("another")
    before = row(event_id).__dict__ | {"_state": 0}
    assert settle(event_id, decision) == 0
    assert row(event_id).__dict__ | {"_state": 0} == before
    assert settle(event_id, decision, me="another") == 1
    assert row(event_id).status == decision.status
    if decision is not DONE:
        assert row(event_id).rescues == 0


def test_a_keyed_event_is_not_settled_as_a_row() -> None:
    (event_id,) = keyed("a")
    take()
    assert dialect().settle_all(me="me", endings=endings([(event_id, DONE)])) == 0


@pytest.mark.parametrize("decision", [RETRY, DEFER], ids=lambda each: each.outcome)
def test_the_next_try_of_a_keyed_event_makes_no_row_due(decision: Decision) -> None:
    (event_id,) = keyed("a", attempts=1)
    take()
    before = now()
    settle(event_id, decision)
    after = row(event_id)
    assert after.available_at is None
    assert after.deliver_at is not None
    assert 4.9 < (after.deliver_at - before).total_seconds() < 10
    assert (after.done_at, after.attempts) == (None, 1 + decision.spent)
    assert claim() == []


@pytest.mark.parametrize("decision", [DONE, DEAD], ids=lambda each: each.outcome)
def test_the_end_of_a_keyed_event_is_dated(decision: Decision) -> None:
    (event_id,) = keyed("a")
    take()
    settle(event_id, decision)
    after = row(event_id)
    assert after.done_at is not None
    assert abs((now() - after.done_at).total_seconds()) < 5
    assert settle(event_id, decision) == 0  # a final event is not changed


def test_events_of_many_streams_are_settled_at_once() -> None:
    given = [event_id for n in range(60) for event_id in keyed(f"order-{n}", 3)]
    theirs = keyed("theirs", 3)
    take("another", exclude=[f":order-{n}" for n in range(60)])
    take(limit=60)
    cycle = [DONE, RETRY, DEFER, DEAD]
    pairs = [(event_id, cycle[n % 4]) for n, event_id in enumerate([*given, *theirs])]
    count = dialect().settle_all(me="me", endings=endings(pairs), kind=LeaseKind.STREAM)
    assert count == len(given)
    after = dict(OutboxEvent.objects.values_list("event_id", "status"))
    assert after == dict.fromkeys(theirs, 0) | {key: each.status for key, each in pairs[:180]}


def test_delete_done_is_fenced_too() -> None:
    mine, unique = [*keyed("a"), *keyed("a", unique_key="once")]
    (theirs,) = keyed("b")
    take("another", exclude=[":a"])
    take()
    pairs = [(mine, DONE), (unique, DONE), (theirs, DONE)]
    count = dialect().settle_all(
        me="me", endings=endings(pairs), kind=LeaseKind.STREAM, delete_done=True
    )
    assert count == 2
    assert {*OutboxEvent.objects.values_list("pk", "status")} == {(unique, 1), (theirs, 0)}


# -- streams of lost workers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rescues", "owner", "state"),
    [
        (0, "me", RescueState.ORDINARY),
        (0, "lost", RescueState.ORDINARY),
        (1, None, RescueState.ORDINARY),
        (1, "lost", RescueState.SUSPECT),
        (2, None, RescueState.SUSPECT),
    ],
)
def test_lost_workers_are_counted_on_a_stream_as_on_a_row(
    rescues: int, owner: str | None, state: RescueState
) -> None:
    keyed("a")
    OutboxStream.objects.update(rescues=rescues, locked_by=owner)
    found = dialect().suspects(me="me", queues=["default"], limit=9)
    assert found == [(STREAMS, "default")] * (state is RescueState.SUSPECT)
    assert [take(state=other) for other in RescueState if other is not state] == [[]]
    assert take(state=state) == ["a"]
    assert stream("a").rescues == rescues + (owner == "lost")


@pytest.mark.parametrize(("is_innocent", "kept"), [(False, 2), (True, 0)])
def test_a_release_clears_the_count_of_a_stream_that_has_come_to_its_end(
    is_innocent: bool, kept: int
) -> None:
    keyed("a")
    take()
    OutboxStream.objects.update(rescues=2)
    (given,) = releases((":a", 1, None))
    dialect().release_streams(me="me", streams=[given._replace(is_innocent=is_innocent)])
    assert stream("a").rescues == kept


def test_the_count_of_a_suspect_is_lowered_by_its_owner_alone() -> None:
    keyed("a")
    keyed("b")
    take("another", exclude=[":a"])
    take()
    OutboxStream.objects.update(rescues=4)
    dialect().keep_suspected(me="me", leases=stream_leases([":a", ":b"]), rescues=2)
    assert [stream(key).rescues for key in "ab"] == [2, 4]


# -- release ---------------------------------------------------------------------------------------


def test_a_release_leaves_the_stream_idle_or_due_later() -> None:
    keyed("idle", due=-2)
    keyed("later", due=-1)
    take()
    assert release("idle", 1)
    assert release("later", 1, 7.5)
    assert (stream("idle").due_at, stream("idle").locked_by) == (None, None)
    assert 5 < stream_due_in("later") <= 7.5
    assert stream("later").locked_by is None
    assert stream("idle").locked_at is not None  # the time since which it is idle


def test_a_stop_releases_whatever_was_written_meanwhile() -> None:
    keyed("a")
    take()
    keyed("a")
    assert release("a", None, 0)
    assert take("another") == ["a"]


def test_many_streams_are_released_at_once_each_as_it_should() -> None:
    for n in range(250):
        keyed(f"order-{n:03}")
    keys = sorted(take(limit=500))
    OutboxStream.objects.filter(pk__in=names(*keys[:10])).update(seq=F("seq") + 1)
    OutboxStream.objects.filter(pk__in=names(*keys[10:20])).update(locked_by="another")
    given = releases(
        *((each, 1, None if n % 2 else float(n)) for n, each in enumerate(names(*keys)))
    )
    released = dialect().release_streams(me="me", streams=given)
    assert released == {*names(*keys[20:])}
    due = dict(OutboxStream.objects.values_list("pk", "due_at"))
    assert all((due[each.name] is None) == (each.delay is None) for each in given[20:])
    assert 235 < stream_due_in(keys[248]) <= 248


# -- hand-back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [None, 1.0])
def test_a_hand_back_clears_the_owner_of_a_stream(after: float | None) -> None:
    (event_id,) = keyed("a")
    keyed("b")
    take("another", exclude=[":a"])
    take()
    keyed("a")  # written during the lease
    held = stream_leases([":a", ":b"])
    assert dialect().release(me="me", leases=held, after=after, table=STREAMS) == 1
    assert stream("a").locked_by is None
    assert stream_due_in("a") <= 1 if after else stream_due_in("a") > 20
    assert stream("b").locked_by == "another"
    assert settle(event_id) == 0


# -- renew -----------------------------------------------------------------------------------------


def test_renew_prolongs() -> None:
    keys = [f"order-{n}" for n in range(3) if keyed(f"order-{n}")]
    take(lease=5)
    assert renew(*keys) == (set(keys), set(keys))
    assert all(85 < stream_due_in(key) <= 90 for key in keys)


def test_renew_reports_what_is_lost() -> None:
    for key in ("kept", "stolen", "released", "purged"):
        keyed(key)
    take(lease=5)
    OutboxStream.objects.filter(stream__of_key="stolen").update(locked_by="thief")
    release("released", 1)
    OutboxStream.objects.filter(stream__of_key="purged").delete()
    assert renew("kept", "stolen", "released", "purged") == ({"kept"}, {"kept"})
    assert stream_due_in("stolen") <= 5
    assert stream("released").due_at is None


# -- races -----------------------------------------------------------------------------------------


def on_own_connection(work: Callable[[Any, Any], Any]) -> Any:
    """Run ``work`` in another thread, with an engine connection that waits 0.5 s for a lock."""

    def run() -> Any:
        own = engine_connection("default", lock_wait=0.5)
        try:
            return work(dialect_of(own), own)
        finally:
            own.close()

    return in_thread(run).result(10)


def business(*keys: str) -> AbstractContextManager[None]:
    """Hold open a business transaction that wrote an event of each key."""
    return elsewhere(lambda: [keyed(key) for key in keys])


@NO_SESSIONS
def test_r1_r2_a_writer_that_commits_around_a_release_is_found() -> None:
    """A release that checked for pending rows itself would miss this write in its snapshot."""
    keyed("a")
    take()
    seen = read("a")["a"]
    settle(ids(seen)[0])
    with business("a"):
        assert not release("a", seen.seq)  # locked, so skipped
    assert not release("a", seen.seq)  # changed
    assert (stream("a").locked_by, stream("a").due_at is None) == ("me", False)
    again = read("a")["a"]
    assert len(again.rows) == 1
    settle(ids(again)[0])
    assert release("a", again.seq)


@NO_SESSIONS
def test_r4_r8_an_open_business_transaction_keeps_nobody_waiting() -> None:
    """No statement of the worker waits for it, and the settle takes effect.

    On MariaDB a shared lock on a joined stream would wait, and at REPEATABLE READ on any stream.
    """
    (event_id,) = keyed("held", due=-2)
    (fenced,) = keyed("held")
    keyed("free", due=-1)
    take("me", lease=20)
    keyed("due", due=-1)
    wanted = stream_claim(limit=10)
    reading = StreamQuery(me="me", streams=stream_leases([":held", ":free"]), limit=10)
    released_too = releases((":held", 2, None), (":free", 1, None))
    held = stream_leases([":held", ":free"])

    def settled(d: Any, own: Any, event_id: str, decision: Decision) -> int:
        pairs = [(event_id, decision)]
        return int(d.settle_all(me="me", endings=endings(pairs), kind=LeaseKind.STREAM))

    with business("due", "held"):
        assert on_own_connection(lambda d, own: d.claim(wanted).rows) == []
        found = on_own_connection(lambda d, own: d.read_streams(reading))
        assert sorted(each.name for each in found) == [":free", ":held"]
        assert on_own_connection(lambda d, own: settled(d, own, event_id, DONE)) == 1
        assert on_own_connection(lambda d, own: settled(d, own, fenced, RETRY)) == 1
        renewed = on_own_connection(
            lambda d, own: d.renew(me="me", leases=held, lease=90, table=STREAMS)
        )
        assert renewed == ({":free"}, {":held", ":free"})
        released = on_own_connection(
            lambda d, own: d.release_streams(me="me", streams=released_too)
        )
        assert released == {":free"}
    assert (row(event_id).status, row(fenced).status) == (Status.DONE, Status.RETRY)
    assert stream_due_in("held") <= 20
    assert take() == ["due"]


@NO_SESSIONS
def test_a_locked_stream_is_not_renewed_because_a_renewed_one_was_released_meanwhile() -> None:
    """The heartbeat's thread renews; the claimer's releases between its two statements."""
    for each in ("held", "free"):
        keyed(each)
    take("me", lease=20)
    held = stream_leases([":held", ":free"])

    def renewed(d: Any, own: Any) -> Any:
        def release_after(execute: Any, sql: str, *rest: Any) -> Any:
            found = execute(sql, *rest)
            if "UPDATE" in sql:
                OutboxStream.objects.filter(pk=":free").update(locked_by=None)
            return found

        with own.execute_wrapper(release_after):
            return d.renew(me="me", leases=held, lease=90, table=STREAMS)

    with business("held"):
        assert on_own_connection(renewed) == (set(), {":held"})
    assert stream_due_in("held") <= 20


@NO_SESSIONS
def test_r4_the_streams_beside_a_locked_one_are_claimed() -> None:
    keyed("locked", due=-9)
    for n in range(3):
        keyed(f"free-{n}", due=-1)
    wanted = stream_claim(limit=2)
    with business("locked"):
        taken = on_own_connection(lambda d, own: d.claim(wanted).rows)
    assert len(taken) == 2
    assert ":locked" not in {name for name, *_ in taken}


@NO_SESSIONS
def test_r5_a_business_transaction_that_outlasts_the_lease() -> None:
    """The owner cannot renew or settle; the worker that claims after the commit can."""
    (event_id,) = keyed("a")
    take("owner", lease=0.3)
    held = stream_leases([":a"])
    with business("a"):
        assert on_own_connection(
            lambda d, own: d.renew(me="owner", leases=held, lease=30, table=STREAMS)
        ) == (set(), {":a"})
        end_stream_leases_by_time(0.3)
        assert take("heir") == []
    assert [each[:2] for each in found("heir")] == [(":a", "owner")]
    assert renew("a", me="owner") == (set(), set())
    assert settle(event_id, me="owner") == 0
    assert not release("a", None, 0, me="owner")
    assert settle(event_id, me="heir") == 1


def end_stream_leases_by_time(seconds: float) -> None:
    """Wait until this many seconds have passed on the database's clock."""
    from tests.waiting import wait_until

    since = now()
    wait_until(lambda: (now() - since).total_seconds() > seconds)


def test_r3_the_events_are_read_after_the_claim_in_a_snapshot_of_their_own() -> None:
    """A single statement for both would deliver again an event that is settled while it runs."""
    first, second = keyed("a", 2)
    take("former")
    sent: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        sent.append(sql)
        return execute(sql, params, many, context)

    end_stream_leases("a")
    OutboxEvent.objects.filter(pk=first).update(status=Status.NEW)

    def claim_then_read(d: Any, own: Any) -> list[str]:
        with own.execute_wrapper(note):
            assert d.claim(stream_claim(limit=5)).rows
            # The former owner sent this settle before it lost the stream; it commits now.
            OutboxEvent.objects.filter(pk=first).update(status=Status.DONE, done_at=now())
            (seen,) = d.read_streams(StreamQuery(me="me", streams=stream_leases([":a"]), limit=5))
        return ids(seen)

    assert on_own_connection(claim_then_read) == [second]
    claims = [
        sql for sql in sent if "locked_by =" in sql and sql.lstrip().startswith(("WITH", "UPD"))
    ]
    assert claims
    assert not any("outbox_event" in sql for sql in claims)


# -- stopped half-way ------------------------------------------------------------------------------


def test_x3_no_lock_outlives_a_statement() -> None:
    """Otherwise a process stopped between two statements would hold up claims, renewals and writes.

    On MariaDB a claim also locks the first stream beyond its range, which may not be its own.
    """
    insert(3, due=-1)
    keyed("a", due=-1)
    keyed("b", due=-1)
    sent: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        sent.append(sql)
        assert not sql.upper().startswith(("BEGIN", "START"))
        assert connection.get_autocommit()
        assert not connection.in_atomic_block
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        events = ids_of(claim(limit=10))
        assert take() == ["a", "b"]
        held = leases(events)
        assert dialect().renew(me="me", leases=held, lease=90)[0] == {*events}
        assert renew("a", "b")[0] == {"a", "b"}
        assert dialect().release(me="me", leases=held) == 3
        assert release("a", None, 0.0)
    assert len(sent) >= 6


def test_r10_killed_between_the_settle_and_the_release() -> None:
    (event_id,) = keyed("a")
    take("killed")
    seen = read("a", me="killed")["a"]
    settle(event_id, me="killed")
    end_stream_leases("a")
    assert [each[:2] for each in found("heir")] == [(":a", "killed")]
    assert read("a", me="heir")["a"].rows == []
    assert release("a", seen.seq, me="heir")
    assert settle(event_id, me="killed") == 0  # a late return of the killed worker changes nothing
    assert not release("a", seen.seq, me="killed")
    assert not release("a", None, 0, me="killed")
    assert stream("a").due_at is None
