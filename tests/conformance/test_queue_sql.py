"""Queues in SQL: claims by queue, moves, and circuit breakers; the same on every database."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction

import django_outbox as outbox
from django_outbox.listeners.outcomes import DONE, Decision, Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream
from django_outbox.queue_settings import MAX_QUEUES, parked_queue
from django_outbox.sql import dialect_of, engine_connection
from django_outbox.sql.postgresql_server import PLANS
from django_outbox.sql.values import EVENTS, STREAMS, Branch, Found, LeaseKind, StreamQuery
from tests.plans import analyze, effort, sent, statements, uses
from tests.table import (
    claim,
    claimed,
    due_claim,
    endings,
    ids_of,
    in_thread,
    insert,
    keyed,
    lease_ends_in,
    listening,
    multiply,
    names,
    now,
    releases,
    row,
    stream,
    stream_claim,
    stream_due_in,
    stream_leases,
    unclaimed,
    write,
)

pytestmark = pytest.mark.django_db(transaction=True)

MANY = ["default", *(f"queue-{number:02}" for number in range(1, MAX_QUEUES))]
SENT = "parcel.sent"

not_sqlite = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="an open SQLite transaction keeps every writer out"
)


def dialect() -> Any:
    return dialect_of(connection)


def branches(queues: Sequence[str], limit: int = 10, **more: Any) -> list[Branch]:
    return [Branch(queue, limit, **more) for queue in queues]


def take_streams(**more: Any) -> Any:
    return dialect().claim(stream_claim(**more))


def in_queue(queue: str, *keys: str) -> None:
    OutboxStream.objects.filter(pk__in=names(*keys)).update(queue=queue)


def queues_of(*ids: str) -> list[str]:
    return [row(each).queue for each in ids]


# -- claims of events ------------------------------------------------------------------------------


def test_a_claim_takes_of_each_queue_its_own_limit_oldest_first() -> None:
    late, early, middle = [
        *insert(due=-1, queue="a"),
        *insert(due=-9, queue="a"),
        *insert(due=-5, queue="a"),
    ]
    (only,) = insert(due=-7, queue="b")
    insert(due=-99, queue="c")
    found = claimed(branches=[Branch("a", 2), Branch("b", 2), Branch("default", 2)])
    assert [each[0] for each in found.rows] == [early, only, middle]
    assert {*found.queues} == {"a", "b"}
    assert (found.found("a").more, found.found("b").more) == (True, False)
    assert 8.9 < found.found("a").waited < 60
    assert 6.9 < found.found("b").waited < found.found("a").waited
    assert found.found("default") == Found(more=False, waited=0.0)
    assert row(late).locked_by is None


@pytest.mark.parametrize("count", [1, 2, MAX_QUEUES])
def test_a_claim_of_all_queues_is_one_statement(count: int) -> None:
    for queue in MANY[:count]:
        insert(2, due=-1, queue=queue)
    found: list[Any] = []
    seen = sent(lambda: found.extend(claim(branches=branches(MANY[:count], 1))))
    assert len(found) == count
    assert len(seen) == (1 if connection.vendor == "postgresql" else 2)  # SELECT and UPDATE
    assert len(sent(lambda: claim(branches=branches(MANY[:count])))) == len(seen)


@pytest.mark.parametrize("count", [1, 2, MAX_QUEUES])
def test_a_claim_of_the_streams_of_all_queues_is_one_statement(count: int) -> None:
    for number, queue in enumerate(MANY[:count]):
        keyed(f"k{number}", due=-1)
        in_queue(queue, f"k{number}")
    found: list[Any] = []
    seen = sent(lambda: found.extend(take_streams(branches=branches(MANY[:count])).rows))
    expected = sorted((f":k{n}", MANY[n]) for n in range(count))
    assert sorted(each[:2] for each in found) == expected
    assert len(seen) == (1 if connection.vendor == "postgresql" else 2)


def test_a_claim_of_streams_takes_of_each_queue_its_own_limit_oldest_first() -> None:
    for key, due in (("a1", -1.0), ("a2", -9.0), ("a3", -5.0), ("b1", -7.0), ("c1", -99.0)):
        keyed(key, due=due)
        in_queue(key[0], key)
    found = take_streams(branches=[Branch("a", 2), Branch("b", 2)])
    assert [(name, queue) for name, queue, *_ in found.rows] == [
        (":a2", "a"),
        (":b1", "b"),
        (":a3", "a"),
    ]
    assert (found.found("a").more, found.found("b").more) == (True, False)
    assert 8.9 < found.found("a").waited < 60
    assert stream("a1").locked_by is None


def test_each_branch_begins_at_its_own_watermark() -> None:
    ids = {queue: [*insert(due=-100, queue=queue), *insert(due=-10, queue=queue)] for queue in "ab"}
    found = claim(branches=[Branch("a", 9, since=50.0), Branch("b", 9)])
    assert sorted(ids_of(found)) == sorted([ids["a"][1], *ids["b"]])
    for key in ("a-old", "a-young", "b-old", "b-young"):
        keyed(key, due=-100 if "old" in key else -10)
        in_queue(key[0], key)
    streams = take_streams(branches=[Branch("a", 9, since=50.0), Branch("b", 9)])
    assert sorted(name for name, *_ in streams.rows) == [":a-young", ":b-old", ":b-young"]


def test_each_branch_is_cut_by_its_own_bytes() -> None:
    payload = '"' + 998 * "x" + '"'
    ids = {queue: insert(5, due=-1, queue=queue, payload=payload) for queue in "abc"}
    found = claimed(
        branches=[Branch("a", 9, most_bytes=1500), Branch("b", 9, most_bytes=9000), Branch("c", 3)]
    )
    taken = [each[0] for each in found.rows]
    assert [each for each in taken if each in ids["a"]] == ids["a"][:2]  # the last may exceed it
    assert [each for each in taken if each in ids["b"]] == ids["b"]
    assert [each for each in taken if each in ids["c"]] == ids["c"][:3]
    assert [found.found(queue).more for queue in "abc"] == [True, False, True]
    assert {row(each).locked_by for each in ids["a"][2:]} == {None}


def test_what_is_excluded_is_excluded_from_each_queue() -> None:
    ids = [*insert(2, due=-1, queue="a"), *insert(2, due=-1, queue="b")]
    found = claim(branches=branches("ab"), exclude=[ids[0], ids[2]])
    assert sorted(ids_of(found)) == sorted([ids[1], ids[3]])


def test_suspects_are_found_by_queue_in_one_statement() -> None:
    insert(due=-20, queue="a")
    insert(due=-30, queue="b", locked_by="lost")
    insert(due=-40, queue="c", rescues=2)
    insert(due=-50, queue="d", rescues=2)
    insert(due=50, queue="default", rescues=1, locked_by="lost")
    keyed("k", queue="b")
    OutboxStream.objects.update(queue="b", rescues=2)
    found: list[Any] = []
    queues = ["a", "b", "c", *MANY]
    look = lambda: found.extend(dialect().suspects(me="me", queues=queues, limit=10))  # noqa: E731
    assert len(sent(look)) == 1
    assert sorted((table.name, queue) for table, queue in found) == [
        ("outbox_event", "c"),
        ("outbox_stream", "b"),
    ]


def test_the_next_due_times_are_found_by_queue_in_one_statement() -> None:
    insert(due=60, queue="a")
    insert(due=90, queue="b")
    keyed("k", due=30)
    in_queue("b", "k")
    insert(due=20, queue="c")
    insert(due=-20)
    found: dict[str, float] = {}
    queues = ["a", "b", *MANY]
    assert len(sent(lambda: found.update(dialect().seconds_to_next_due(queues=queues)))) == 1
    assert {queue: round(each, -1) for queue, each in found.items()} == {"a": 60, "b": 30}
    recent = dialect().seconds_to_next_due(queues=["default"], since=25.0)
    assert -25 < recent["default"] < -15


# -- plans -----------------------------------------------------------------------------------------


COUNTS = pytest.mark.parametrize("count", [1, 2, MAX_QUEUES])


@pytest.fixture
def plans_of_the_engine(emptied: None) -> Iterator[None]:
    """Have PostgreSQL plan as for an engine connection."""
    if connection.vendor != "postgresql":
        yield
        return
    with connection.cursor() as cursor:
        for option in PLANS.split("-c ")[1:]:
            cursor.execute(f"SET {option}")
    yield
    connection.close()


@COUNTS
@pytest.mark.parametrize("analyzed", ["empty", "one queue", "full"])
def test_a_claim_goes_by_the_index_of_queues(count: int, analyzed: str) -> None:
    """Whatever the statistics say: also while all rows are in one queue, and after that."""
    learn = {"empty": 0, "one queue": 1, "full": 2}[analyzed]
    for step in range(3):
        if step == 1:
            insert(5000, due=-60, queue="queue-01")
            multiply(
                OutboxStream(stream=":one", key="one", seq=1, due_at=now(), queue="queue-01"),
                [f":one-{n}" for n in range(20_000)],
            )
        elif step == 2:
            for queue in MANY:
                insert(20, due=-30, queue=queue)
        if step == learn:
            analyze(OutboxEvent)
            analyze(OutboxStream)
    given = branches([*reversed(MANY)][:count], 20, since=600.0)
    times = 1 if connection.vendor == "postgresql" else count
    sql, params = statements(lambda: claim(branches=given))[0]
    assert uses("outbox_event_queue", sql, params) == times
    assert uses("outbox_event_due", sql, params) == 0
    sql, params = statements(lambda: take_streams(branches=given))[0]
    assert uses("outbox_stream_queue", sql, params) == times
    assert uses("outbox_stream_due", sql, params) == 0


@COUNTS
@pytest.mark.parametrize("statistics", ["of few rows", "old", "new"])
@pytest.mark.usefixtures("plans_of_the_engine")
def test_a_long_queue_makes_no_statement_dearer(count: int, statistics: str) -> None:
    """Neither those about itself nor those about others, and no other queue starves."""
    queues = ["queue-01"] if count == 1 else MANY[:count]
    rows = 20 if statistics == "of few rows" else 300
    ids = [insert(rows, due=-1, queue=queue) for queue in ("default", "queue-01")][1]
    for queue in ("default", "queue-01"):
        multiply(
            OutboxStream(stream=f":{queue}", key=queue, seq=1, due_at=now(), queue=queue),
            [f":{queue}-{n}" for n in range(rows)],
        )
    learn()
    works = polls(queues)
    if statistics != "of few rows":
        works |= changes_of(ids[:10])
    elif connection.vendor == "sqlite":  # it scans a table of streams that it believes to be tiny
        works = {name: work for name, work in works.items() if "of streams" not in name}
    before = {name: effort(work) for name, work in works.items()}
    insert(5000, due=-60)
    multiply(
        OutboxStream(stream=":long", key="long", seq=1, due_at=now() - timedelta(seconds=60)),
        [f":long-{n}" for n in range(5000)],
    )
    if statistics == "new":
        learn()
    after = {name: effort(work) for name, work in works.items()}
    assert {name: cost for name, cost in after.items() if cost > 1.5 * before[name] + 40} == {}
    assert claimed(branches=branches(queues)).found("queue-01").more
    assert take_streams(branches=branches(queues)).found("queue-01").more


def learn() -> None:
    analyze(OutboxEvent)
    analyze(OutboxStream)


def polls(queues: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Return what a worker asks about queues, by name."""
    d = dialect()
    return {
        "claim": lambda: claim(branches=branches(queues)),
        "later claim": lambda: claim(branches=branches(queues, since=600.0, most_bytes=9999)),
        "claim of streams": lambda: take_streams(branches=branches(queues)),
        "later claim of streams": lambda: take_streams(branches=branches(queues, since=600.0)),
        "suspects": lambda: d.suspects(me="me", queues=queues, limit=10),
        "next due": lambda: d.seconds_to_next_due(queues=queues),
        "has due": lambda: d.has_due(queue="queue-01"),
        "other queues": lambda: d.other_queues(known=MANY),
        "due first": lambda: d.due_first(queues=queues, limit=10),
    }


def changes_of(ids: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Return statements that change rows and streams of one queue, by name."""
    d = dialect()
    given = lambda: unclaimed((each, now(), "queue-01") for each in ids)  # noqa: E731
    moved = lambda: endings((each, decision("b")) for each in ids)  # noqa: E731
    pause = OutboxPause.objects.create(kind="event_type", name=SENT, paused_at=now()).pk
    parked = parked_queue(pause)
    return {
        "claim by id": lambda: claim(ids=ids),
        "move": lambda: d.move(EVENTS, of="queue-01", queue="b", limit=9),
        "move of streams": lambda: d.move(STREAMS, of="queue-01", queue="b", limit=9),
        "park and bring home": lambda: (
            d.park(dict.fromkeys(ids, pause)),
            d.unpark(EVENTS, pause=pause, limit=9),
        ),
        "bring streams home": lambda: (
            d.move(STREAMS, of="queue-01", queue=parked, limit=9),
            d.unpark(STREAMS, pause=pause, limit=9),
        ),
        "unclaim": lambda: (claim(ids=ids), d.unclaim(me="me", due=given())),
        "settle": lambda: (claim(ids=ids), d.settle(me="me", endings=moved())),
    }


# -- leases given back, and moves ------------------------------------------------------------------


def test_a_lease_is_given_back_into_its_queue() -> None:
    (first,) = insert(due=-9, queue="a")
    (second,) = insert(due=-5, queue="a")
    (stolen,) = insert(due=-2, queue="a")
    due = {each: row(each).available_at for each in (first, second, stolen)}
    claim(queue="a")
    OutboxEvent.objects.filter(pk=stolen).update(locked_by="thief")
    given = unclaimed(zip(due, due.values(), "bab", strict=True))
    assert dialect().unclaim(me="me", due=given) == set()
    assert queues_of(first, second, stolen) == ["b", "a", "a"]
    assert [row(each).available_at == due[each] for each in due] == [True, True, False]
    assert [row(each).locked_by for each in due] == [None, None, "thief"]


def test_what_is_due_moves_to_another_queue() -> None:
    (due,) = insert(due=-5, queue="a")
    (younger,) = insert(due=-1, queue="a")
    (leased,) = insert(due=-5, queue="a")
    (done,) = insert(due=None, queue="a", status=Status.DONE)
    before = row(due).__dict__ | {"_state": 0, "queue": "b"}
    assert ids_of(claim(ids=[leased])) == [leased]
    assert dialect().move(EVENTS, of="a", queue="b", limit=1) == 1
    assert queues_of(due, younger, leased, done) == ["b", "a", "a", "a"]
    assert row(due).__dict__ | {"_state": 0} == before  # nothing else has changed
    assert ids_of(claim(queue="b")) == [due]


def test_due_streams_move_to_another_queue() -> None:
    for key, due in (("1", -9.0), ("2", -5.0), ("3", -1.0), ("later", 60.0), ("idle", None)):
        keyed(key, due=due)
    in_queue("a", "1", "2", "3", "later", "idle")
    keyed("other", due=-99)
    move = partial(dialect().move, STREAMS, of="a", queue="b", limit=2)
    assert [move(), move(), move()] == [2, 1, 0]  # those due first
    found = dict(OutboxStream.objects.values_list("key", "queue"))
    assert found == {"1": "b", "2": "b", "3": "b", "later": "a", "idle": "a", "other": "default"}


# -- queues that are not known, and what is due ----------------------------------------------------


def others(*known: str) -> list[str]:
    found: list[str] = dialect().other_queues(known=known)
    return found


def test_other_queues_are_found_in_one_statement_however_many_are_known() -> None:
    for queue in MANY:
        insert(3, due=-1, queue=queue)
        insert(due=None, queue=queue, status=Status.DONE)
        keyed(queue, due=-1)
        in_queue(queue, queue)
    found: list[str] = []
    assert len(sent(lambda: found.extend(others(*MANY)))) == 1
    assert found == []
    insert(due=-1, queue="queue-03-gone")
    insert(due=3600, queue="zzz")
    keyed("k")
    in_queue("a", "k")
    assert others(*MANY) == ["a", "queue-03-gone", "zzz"]


def test_a_queue_in_which_events_wait_hides_none_behind_it() -> None:
    """Of "a", nothing is due for an hour; "b" is in the same gap between known names.

    A queue with nothing but finished rows is none.
    """
    insert(3, due=None, queue="aa", status=Status.DONE)
    keyed("idle", due=None)
    in_queue("aa", "idle")
    insert(due=3600, queue="a")
    insert(due=-1, queue="b")
    keyed("k", due=-1)
    in_queue("c", "k")
    assert others("default") == ["a", "b", "c"]


def test_has_due() -> None:
    insert(due=60, queue="a")
    insert(due=-1, queue="b")
    keyed("k", due=60)
    in_queue("c", "k")
    has_due = dialect().has_due
    assert [has_due(queue=each) for each in ("a", "b", "c", "default")] == [
        False,
        True,
        False,
        False,
    ]
    OutboxStream.objects.filter(key="k").update(due_at=now() - timedelta(seconds=1))
    assert has_due(queue="c")


def test_rows_due_first_are_read_by_queue_in_one_statement() -> None:
    a = [*insert(due=-9, queue="a"), *insert(due=-5, queue="a"), *insert(due=-1, queue="a")]
    (b,) = insert(due=-3, queue="b", event_type=SENT, listener="parcel.sent mail")
    insert(due=60, queue="b")
    insert(due=-9, queue="c")
    found: list[Any] = []
    queues = ["a", "b", "default"]
    assert len(sent(lambda: found.extend(dialect().due_first(limit=2, queues=queues)))) == 1
    assert sorted(each[0] for each in found) == sorted([*a[:2], b])
    assert (b, SENT, "parcel.sent mail", None) in found


# -- writes ----------------------------------------------------------------------------------------


@contextmanager
def listeners(**queues: str) -> Iterator[None]:
    """Register a listener for each of these event types, in the named queue."""
    with ExitStack() as stack:
        for event_type, queue in queues.items():
            stack.enter_context(listening(lambda event: None, event_type, queue=queue))
        yield


@pytest.fixture
def two_queues(settings: Any) -> Iterator[None]:
    """Configure two queues, with a listener each, one of ``default``, and one of both."""
    settings.OUTBOX = {"QUEUES": {"webhooks": {}, "mail": {}}, "DOORBELL": None}
    with (
        listeners(hook="webhooks", letter="mail", local="default", both="mail"),
        listening(lambda event: None, "both", name="second", queue="webhooks"),
    ):
        yield


@pytest.mark.usefixtures("two_queues")
def test_events_are_written_each_into_the_first_queue_of_its_listeners() -> None:
    types = ["local", "hook", "letter", "nobody-listens", "both"]
    with transaction.atomic():
        ids = outbox.write_many(
            [
                *(outbox.Event(event_type=each) for each in types),
                *(outbox.Event(event_type=each, key="k") for each in types),
            ]
        )
    expected = ["default", "webhooks", "mail", "default", "webhooks"]
    ids += [write(event_type=each)[0] for each in types]
    assert queues_of(*(each for each in ids if each)) == 3 * expected


def test_a_queue_that_is_not_configured_is_not_written() -> None:
    with listeners(hook="webhooks"):
        assert queues_of(*write(event_type="hook")) == ["default"]


@pytest.mark.usefixtures("two_queues")
@pytest.mark.parametrize("many", [False, True])
def test_an_idle_stream_goes_to_the_queue_of_its_new_head(many: bool) -> None:
    def put(*types: str, keys: Sequence[str] = ("k",)) -> None:
        with transaction.atomic():
            outbox.write_many(
                [outbox.Event(event_type=each, key=key) for each in types for key in keys]
            )

    keys = ["k", "other"] if many else ["k"]
    put("hook", "letter", keys=keys)  # a new one: of the first event
    assert stream("k").queue == "webhooks"
    put("letter", keys=keys)
    assert stream("k").queue == "webhooks"  # busy: its head is still the first
    take_streams(queue="webhooks")
    put("letter", keys=keys)
    assert stream("k").queue == "webhooks"  # leased
    streams = releases(*((f":{key}", None, None) for key in keys))
    assert len(dialect().release_streams(me="me", streams=streams)) == len(keys)
    assert (stream("k").due_at, stream("k").queue) == (None, "webhooks")
    put("letter", "hook", keys=keys)  # idle
    assert {stream(key).queue for key in keys} == {"mail"}
    in_queue("default", *keys)
    put("hook", keys=keys)
    assert {stream(key).queue for key in keys} == {"default"}


def test_a_stream_that_is_woken_keeps_its_queue_unless_it_was_idle() -> None:
    keyed("waits", due=60)
    keyed("leased", due=-1)
    keyed("idle", due=None)
    in_queue("a", "waits", "leased", "idle")
    take_streams(queue="a")
    with transaction.atomic():
        dialect().wake_streams([":waits", ":leased", ":idle"])
    assert [stream(each).queue for each in ("waits", "leased", "idle")] == ["a", "a", "default"]
    assert stream("leased").locked_by == "me"
    assert stream_due_in("waits") <= 0


# -- settles ---------------------------------------------------------------------------------------


def decision(queue: str | None, **more: Any) -> Decision:
    return Decision(status=Status.NEW, delay=2.0, outcome="deferred", queue=queue, **more)


def test_a_settle_with_a_queue_moves_the_row() -> None:
    moved, kept, retried, done = insert(4, due=-1, queue="a")
    claim(queue="a")
    decisions = [
        (moved, decision("b")),
        (kept, decision(None)),
        (done, DONE),
        (retried, Decision(status=Status.RETRY, delay=2.0, spent=1, queue="c", outcome="retry")),
    ]
    assert dialect().settle_all(me="me", endings=endings(decisions)) == 4
    assert queues_of(moved, kept, retried, done) == ["b", "a", "c", "a"]
    assert (row(moved).attempts, row(retried).attempts) == (0, 1)
    assert 0 < lease_ends_in(moved) <= 2


def test_the_settle_of_a_keyed_event_moves_its_row_and_the_release_its_stream() -> None:
    (moved,) = keyed("a", due=-1)
    (kept,) = keyed("b", due=-1)
    take_streams()
    decisions = [(moved, decision("webhooks")), (kept, decision(None))]
    settled = dialect().settle_all(me="me", endings=endings(decisions), kind=LeaseKind.STREAM)
    assert settled == 2
    assert queues_of(moved, kept) == ["webhooks", "default"]
    assert {stream(key).queue for key in "ab"} == {"default"}
    streams = releases((":a", 1, 2.0, "webhooks"), (":b", 1, 3.0))
    assert dialect().release_streams(me="me", streams=streams) == {":a", ":b"}
    assert (stream("a").queue, stream("b").queue) == ("webhooks", "default")
    assert 0 < stream_due_in("a") <= 2 < stream_due_in("b") <= 3


# -- circuit breakers ------------------------------------------------------------------------------


def open_breaker(queue: str = "a", pause: float = 30.0) -> bool:
    return bool(dialect().open_breaker(queue=queue, pause=pause, reason="5 failures"))


def breakers() -> dict[str, Any]:
    found = dialect().pauses()
    return {name: times for (kind, name), times in found.items() if kind == "breaker"}


def end_pauses() -> None:
    OutboxPause.objects.update(until=now() - timedelta(seconds=1))


def probe(queue: str = "a", lease: float = 20.0) -> bool:
    return bool(dialect().probe_breaker(queue=queue, lease=lease))


def test_a_breaker_opens_once() -> None:
    assert breakers() == {}
    assert open_breaker()
    assert not open_breaker(pause=600)
    found = OutboxPause.objects.get()
    assert (found.kind, found.name, found.reason, found.paused_by) == (
        "breaker",
        "a",
        "5 failures",
        "",
    )
    assert abs((found.paused_at - now()).total_seconds()) < 5
    ((queue, breaker),) = breakers().items()
    assert (queue, breaker.length) == ("a", 30.0)
    assert 25 < breakers()["a"].left <= 30


def test_a_breaker_that_opens_in_a_transaction_leaves_it_usable() -> None:
    open_breaker()
    with transaction.atomic():
        assert not open_breaker()
        assert open_breaker("b")
    assert {*breakers()} == {"a", "b"}


def test_a_breaker_and_a_pause_of_the_same_queue_are_two() -> None:
    assert OutboxPause.objects.create(kind="queue", name="a", paused_at=now())
    assert open_breaker()
    assert {*dialect().pauses()} == {("queue", "a"), ("breaker", "a")}
    assert dialect().close_breaker(queue="a")
    assert {*dialect().pauses()} == {("queue", "a")}


def test_a_breaker_is_probed_when_its_pause_is_over() -> None:
    assert not probe()
    open_breaker()
    assert not probe()
    end_pauses()
    assert breakers()["a"].left < 0
    assert not probe("b")
    assert probe(lease=20)
    assert not probe()  # for as long as the lease
    breaker = breakers()["a"]
    assert (15 < breakers()["a"].left <= 20, breaker.length) == (True, 30.0)
    end_pauses()  # its prober was lost
    assert probe()


def test_one_of_several_wins_the_probe() -> None:
    for queue in MANY:
        open_breaker(queue)
    end_pauses()
    start = threading.Barrier(4)

    def take() -> list[str]:
        start.wait(10)
        return [queue for queue in MANY if probe(queue)]

    won = [future.result(60) for future in [in_thread(take) for _ in range(4)]]
    assert sorted(queue for each in won for queue in each) == sorted(MANY)


def test_a_failed_probe_extends_the_pause() -> None:
    open_breaker()
    open_breaker("b")
    dialect().extend_breaker(queue="a", pause=60.0, kept=60.0)
    dialect().extend_breaker(queue="b", pause=1.0, kept=30.0)
    found = breakers()
    assert (55 < breakers()["a"].left <= 60, found["a"].length) == (True, 60.0)
    assert (breakers()["b"].left <= 1, found["b"].length) == (True, 30.0)
    dialect().extend_breaker(queue="c", pause=1.0, kept=30.0)  # ended by a user
    assert {*breakers()} == {"a", "b"}


def test_a_breaker_is_closed_once() -> None:
    open_breaker()
    open_breaker("b")
    assert dialect().close_breaker(queue="a")
    assert not dialect().close_breaker(queue="a")
    assert {*breakers()} == {"b"}
    assert not probe()
    assert open_breaker()


# -- times -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_tz", [True, False])
def test_instants_are_utc_whatever_the_settings_say(settings: Any, use_tz: bool) -> None:
    """With USE_TZ=False, PostgreSQL's drivers return local time, five hours off in New York."""
    (lost,) = insert(due=-5, queue="a", locked_by="lost")
    (retried,) = keyed("k", due=-5, status=Status.RETRY, deliver_at=now() + timedelta(hours=1))
    due, clock = row(lost).available_at, now()
    take_streams()
    settings.USE_TZ, settings.TIME_ZONE = use_tz, "America/New_York"
    own = engine_connection("default", lock_wait=1)
    try:
        assert abs((dialect_of(own).clock() - clock).total_seconds()) < 60
        taken = due_claim(queue="a", at=due)
        assert dialect_of(own).move(EVENTS, of="a", queue="b", limit=9) == 1
        assert dialect_of(own).claim(taken).rows == []
        OutboxEvent.objects.filter(pk=lost).update(queue="a")
        assert [each[0] for each in dialect_of(own).claim(taken).rows] == [lost]
        wanted = StreamQuery(me="me", streams=stream_leases([":k"]), limit=9)
        assert dialect_of(own).next_retries(wanted) == {":k": row(retried).deliver_at}
    finally:
        own.close()
