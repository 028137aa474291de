"""The SQL of routing: rows for listeners that an event's writer did not know, each given once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.test import override_settings

import django_outbox as outbox
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import Status
from django_outbox.listeners.queues import Route
from django_outbox.models import OutboxEvent, OutboxStream, OutboxWorker
from django_outbox.signals import event_settled
from django_outbox.sql import dialect_of, engine_connection
from django_outbox.sql.statements import single_transaction
from django_outbox.sql.values import StreamQuery
from tests.cases import cases
from tests.databases import vendor
from tests.sessions import waiters
from tests.surroundings import heard
from tests.table import (
    PLACED,
    claim,
    elsewhere,
    end_leases,
    in_thread,
    insert,
    leases,
    listening,
    now,
    row,
    statuses,
    stream_leases,
    undone,
    write,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

MAIL = Route("order.placed mail", "a" * 16, "letters", "mail")
PLAIN = Route(PLACED, "b" * 16, "default", "")
RECEIPT = f"{MAIL.digest} {PLAIN.digest}"
LATER = datetime(2100, 1, 1, tzinfo=timezone.utc)
ROUTE_COLUMNS = ("id", "event_id", "listener", "routes", "queue", "stream")


def dialect() -> Any:
    return dialect_of(connection)


def route_rows(*ids: str, me: str = "me", **more: Any) -> int:
    given = {"route": PLAIN, "receipt": RECEIPT, **more}
    return int(dialect().route_rows(me=me, leases=leases(ids), **given))


def add_rows(*ids: str, route: Route = MAIL, receipt: str = RECEIPT) -> int:
    """Insert further rows; return how many there are now that were not before."""
    before = OutboxEvent.objects.count()
    dialect().add_rows(ids=ids, route=route, receipt=receipt)
    return OutboxEvent.objects.count() - before


def routes(event_id: str) -> list[Any]:
    """Return the columns by which the rows of an event differ, its first row first."""
    rows = OutboxEvent.objects.filter(event_id=event_id).order_by("pk")
    return [*rows.values_list(*ROUTE_COLUMNS)]


def unrouted(key: str, count: int = 1) -> list[str]:
    """Insert events of a key that are not routed."""
    return insert(count, key=key, stream=f"?:{key}", seq=1, counted="seq")


# -- route_rows ------------------------------------------------------------------------------------


def test_a_leased_row_becomes_that_of_a_listener() -> None:
    (event_id,) = insert()
    claim()
    before = OutboxEvent.objects.values().get()
    assert route_rows(event_id, route=MAIL) == 1
    assert routes(event_id) == [(event_id, event_id, MAIL.title, RECEIPT, "letters", None)]
    given = {"listener": MAIL.title, "routes": RECEIPT, "queue": "letters"}
    assert OutboxEvent.objects.values().get() == before | given  # the lease too is as it was


def test_the_row_of_a_key_goes_into_the_stream_of_the_lane() -> None:
    (event_id,) = unrouted("order 7")
    claim()
    assert route_rows(event_id, route=MAIL) == 1
    found = row(event_id)
    assert (found.stream, found.key, found.seq) == ("mail:order 7", "order 7", 1)
    assert (found.available_at, found.locked_by, found.locked_at) == (None, None, None)


FENCES: dict[str, Callable[[], dict[str, Any]]] = {
    "not leased": lambda: {"locked_by": None},
    "another's": lambda: {"locked_by": "another"},
    "done": lambda: {"status": Status.DONE},
    "dead": lambda: {"status": Status.DEAD},
    "routed": lambda: {"listener": PLACED, "routes": PLAIN.digest},
}


@pytest.mark.parametrize("name", FENCES)
def test_only_the_owner_routes_a_row_and_only_once(name: str) -> None:
    mine, other = insert(2)
    claim()
    OutboxEvent.objects.filter(pk=other).update(**FENCES[name]())
    before = OutboxEvent.objects.filter(pk=other).values().get()
    assert route_rows(mine, other) == 1
    assert OutboxEvent.objects.filter(pk=other).values().get() == before
    assert route_rows(mine) == 0
    assert add_rows(mine, other) == 1  # none of a row that the same transaction could not route
    assert len(routes(other)) == 1


# -- add_rows --------------------------------------------------------------------------------------


def test_a_further_row_is_new_and_due_and_has_what_the_event_has() -> None:
    given = {
        "event_type": "order.paid",
        "aggregate_type": "shop.Order",
        "aggregate_id": "7",
        "tenant_id": "north",
        "payload": '{"sku": "☕"}',
        "headers": '{"trace": "1"}',
    }
    long_ago = now() - timedelta(days=2)
    state = {"attempts": 3, "rescues": 1, "unique_key": "once", "last_error": "E: no"}
    (event_id,) = insert(due=-90, occurred_at=long_ago, created_at=long_ago, **given, **state)
    claim()
    route_rows(event_id)
    before = now()
    assert add_rows(event_id) == 1
    further = OutboxEvent.objects.exclude(pk=event_id).get()
    assert routes(event_id)[1] == (
        f"{event_id}.{MAIL.digest}",
        *(event_id, MAIL.title, RECEIPT, "letters", None),
    )
    assert {name: getattr(further, name) for name in given} == given
    assert (further.occurred_at, further.created_at) == (long_ago, long_ago)
    assert further.available_at is not None
    assert before <= further.available_at == further.first_due_at <= now()
    assert (further.status, further.attempts, further.rescues) == (Status.NEW, 0, 0)
    assert (further.unique_key, further.last_error, further.locked_by) == (None, None, None)


def test_a_further_row_of_a_key_has_its_place_in_the_stream_of_the_lane() -> None:
    first, second = unrouted("a", 2)
    claim()
    route_rows(first, second)
    assert add_rows(first, second) == 2
    found = OutboxEvent.objects.filter(stream="mail:a").order_by("seq")
    assert [*found.values_list("event_id", "seq", "available_at")] == [
        (first, 1, None),
        (second, 2, None),
    ]


def test_no_row_is_inserted_twice_nor_one_of_another_receipt() -> None:
    (event_id,) = insert()
    claim()
    route_rows(event_id)
    assert add_rows(event_id, receipt=f"{RECEIPT} {'c' * 16}") == 0
    assert add_rows(event_id) == 1
    added = f"{event_id}.{MAIL.digest}"
    OutboxEvent.objects.filter(pk=added).update(status=Status.DONE, attempts=5)
    assert add_rows(event_id) == 0
    assert (row(added).status, row(added).attempts) == (Status.DONE, 5)


# -- lock_event, note_receipt ----------------------------------------------------------------------


def test_all_rows_of_an_event_are_locked_in_order_and_get_the_receipt() -> None:
    event_id, other = insert(2)
    claim()
    route_rows(event_id, other)
    add_rows(event_id, other)
    OutboxEvent.objects.filter(pk=other).update(routes=None)
    with transaction.atomic():
        found = dialect().lock_event(event_id)
        assert [*found.items()] == [(event_id, RECEIPT), (f"{event_id}.{MAIL.digest}", RECEIPT)]
        dialect().note_receipt(ids=[*found], receipt="new")
        found = dialect().lock_event(other)
        assert [*found.items()] == [(other, ""), (f"{other}.{MAIL.digest}", RECEIPT)]
        assert dialect().lock_event(f"{event_id}0") == {}
    assert [each[3] for each in routes(event_id)] == ["new", "new"]
    assert [each[3] for each in routes(other)] == [None, RECEIPT]


def test_a_worker_waits_until_another_has_noted_its_receipt() -> None:
    """Else the later note would forget what the earlier one has given."""
    (event_id,) = insert()
    own = engine_connection("default", lock_wait=1)
    note = lambda: dialect().note_receipt(  # noqa: E731
        ids=[*dialect().lock_event(event_id)], receipt="theirs"
    )
    with closing(own), elsewhere(note), pytest.raises(OperationalError), single_transaction(own):
        dialect_of(own).lock_event(event_id)
    assert dialect().lock_event(event_id) == {event_id: "theirs"}


@pytest.mark.skipif(vendor() == "sqlite", reason="SQLite has one writer at a time")
def test_writers_of_a_key_wait_in_its_own_stream_whatever_the_lanes_of_their_events() -> None:
    begun, more = threading.Event(), threading.Event()

    def slow() -> None:
        with transaction.atomic():
            write(key="k")
            begun.set()
            assert more.wait(60)
            write(event_type="order.paid", key="k")

    calls: list[str] = []
    with listeners(calls, ""), listeners(calls, "a", event_type="order.paid"):
        first = in_thread(slow)
        assert begun.wait(30)
        second = in_thread(lambda: write(event_type="order.paid", key="k"))
        wait_until(waiters, what="a writer that waits")
        more.set()
        first.result(30)
        second.result(30)
    assert OutboxEvent.objects.filter(stream="a:k").count() == 2


# -- several workers -------------------------------------------------------------------------------


@contextmanager
def listeners(calls: list[str], *names: str, **options: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            note = lambda event: calls.append(f"{event.listener} {event.event_id}")  # noqa: E731
            stack.enter_context(listening(note, name=name, **options))
        yield


def at_the_same_time(count: int = 3, **settings: Any) -> list[int]:
    start = threading.Barrier(count)

    def drain() -> int:
        start.wait(30)
        return outbox.drain(**settings)

    return [each.result(100) for each in [in_thread(drain) for _ in range(count)]]


def expected(ids: Sequence[str], *names: str) -> list[str]:
    return sorted(f"{PLACED} {name} {each}".replace("  ", " ") for name in names for each in ids)


@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
def test_workers_that_route_at_the_same_time_give_each_listener_each_event_once(
    key: str | None,
) -> None:
    ids = write(40, key=key)  # no listener is known yet
    calls: list[str] = []
    with listeners(calls, "", "a", "b"):
        at_the_same_time()
        outbox.drain()
    assert sorted(calls) == expected(ids, "", "a", "b")
    assert statuses() == {"DONE": 120}
    assert OutboxEvent.objects.values("routes").distinct().count() == 1


@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
def test_workers_that_find_a_new_listener_at_the_same_time_call_it_once(key: str | None) -> None:
    calls: list[str] = []
    with listeners(calls, "", "a", "b"):
        ids = write(20, key=key)
    with listeners(calls, "", "a", "b", "new", "newer"):
        at_the_same_time()
        outbox.drain()
    assert sorted(calls) == expected(ids, "", "a", "b", "new", "newer")
    assert statuses() == {"DONE": 100}
    assert len(set(OutboxEvent.objects.values_list("routes", flat=True))) == 1


def test_events_of_a_key_keep_their_order_whether_their_writers_knew_the_listener_or_not() -> None:
    calls: list[str] = []
    ids = [*write(2, key="k")]  # no listener is known yet
    with listeners(calls, "", "a"):
        ids += write(2, key="k")
        with override_settings(OUTBOX={"ROUTE": "worker"}):
            ids += write(2, key="k")
        ids += write(2, key="k")
        while outbox.drain():
            pass
    for name in ("", "a"):
        mine = [each for each in calls if (" a " in each) == bool(name)]
        assert mine == expected(ids, name)
    assert statuses() == {"DONE": 16}


def test_events_wait_until_an_earlier_one_of_their_key_is_routed() -> None:
    calls: list[str] = []
    (first,) = write(key="k")  # no listener is known yet
    with listeners(calls, ""):
        (second,) = write(key="k")
        claim("another")
        outbox.drain()
        assert calls == []
        end_leases([first])
        OutboxStream.objects.update(due_at=now())
        outbox.drain()
    assert calls == expected([first, second], "")


ROUTED_UNTIL: dict[str, tuple[dict[str, Any], int | None]] = {
    "due": ({}, 1),
    "leased": ({"locked_by": "me", "available_at": LATER}, 1),
    "deferred, as nobody could route it": ({"available_at": LATER}, None),
    "dead": ({"status": Status.DEAD, "available_at": None}, None),
    "of another key": ({"stream": "?:k 2"}, None),
}


@cases("name", ROUTED_UNTIL)
@undone()
def test_a_read_says_behind_which_place_events_wait_for_routing(name: str) -> None:
    given, until = ROUTED_UNTIL[name]
    first, _ = unrouted("k", 2)
    second = OutboxEvent.objects.filter(seq=2).values_list("pk", flat=True)
    OutboxEvent.objects.filter(pk__in=[*second]).update(stream=":k", available_at=None)
    OutboxEvent.objects.filter(pk=first).update(**given)
    OutboxStream.objects.create(
        stream=":k", key="k", seq=2, due_at=now(), locked_by="me", locked_at=now()
    )
    query = StreamQuery(me="me", streams=stream_leases([":k"]), limit=9)
    (read,) = dialect().read_streams(query)
    assert [each[-1] for each in read.rows] == [until]


def test_a_lost_worker_that_had_routed_its_event_is_replaced_without_a_second_row() -> None:
    (event_id,) = write()
    calls: list[str] = []
    with listeners(calls, "a", "b"):
        known = registry.route("__GLOBAL__", PLACED)
        receipt = " ".join(sorted(each.digest for each in known))
        given = [Route(each.title, each.digest, "default", each.lane) for each in known]
        claim("lost")
        route_rows(event_id, me="lost", route=given[0], receipt=receipt)
        add_rows(event_id, route=given[1], receipt=receipt)
        end_leases([event_id])
        outbox.drain()
        assert route_rows(event_id, me="lost") == 0
    assert sorted(calls) == expected([event_id], "a", "b")
    assert statuses() == {"DONE": 2}


# -- a listener that this process does not have ----------------------------------------------------

GONE = f"{PLACED} gone"
SOLE, OTHERS = ("gone",), ("gone", "a")  # of an event; the first is known no more


def given_to(*names: str, key: str | None = None) -> str:
    """Write an event in a process that has these listeners."""
    with listeners([], *names):
        return write(key=key)[0]


def ended(event_id: str) -> OutboxEvent:
    return OutboxEvent.objects.of_event(event_id).get(listener=GONE)


def show_worker(age: float = 0.0, **info: Any) -> None:
    seen = now() - timedelta(seconds=age)
    values = {"hostname": "web-1", "pid": 1, "started_at": seen, "heartbeat_at": seen}
    OutboxWorker.objects.create(id=f"worker-{age}", info=json.dumps(info), **values)


def deliver(by: str, names: Sequence[str]) -> None:
    """Deliver what is due in a process that has but the last of these listeners."""
    with listeners([], *names[1:]):
        if by == "drain":
            outbox.drain()
            return
        with outbox.Worker():
            decided = OutboxEvent.objects.exclude(status=Status.NEW, last_error=None)
            wait_until(lambda: decided.filter(listener=GONE).exists(), what="its decision")


@pytest.mark.parametrize("by", ["drain", "worker"])
@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
@pytest.mark.parametrize(
    ("names", "status", "outcome"),
    [(SOLE, Status.DEAD, "dead"), (OTHERS, Status.DONE, "discarded")],
    ids=["sole", "others"],
)
def test_what_only_a_removed_listener_was_given_is_dead_and_else_discarded(
    settings: Any,
    caplog: pytest.LogCaptureFixture,
    names: tuple[str, ...],
    status: Status,
    outcome: str,
    key: str | None,
    by: str,
) -> None:
    settings.OUTBOX = {"UNROUTABLE_GRACE": 0}
    event_id = given_to(*names, key=key)
    show_worker(age=60, listeners=[GONE])  # it is lost
    show_worker(listeners=[f"{GONE}r"], formerly=[PLACED])
    with heard(event_settled) as settled:
        deliver(by, names)
    found = ended(event_id)
    assert (found.status, found.attempts, found.available_at) == (status, 0, None)
    assert f"{GONE!r}" in str(found.last_error)
    assert [each.state for each in outbox.fate(event_id) if each.listener == GONE] == [outcome]
    assert [each["outcome"] for each in settled if each["event"].listener == GONE] == [outcome]
    said = [each.getMessage() for each in caplog.records if each.getMessage().startswith(outcome)]
    assert len(said) == 1
    assert event_id in said[0]


@pytest.mark.parametrize("by", ["drain", "worker"])
@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
@pytest.mark.parametrize("known", ["listeners", "formerly"])
def test_what_a_live_worker_knows_waits_for_it_past_the_grace(
    settings: Any, known: str, key: str | None, by: str
) -> None:
    settings.OUTBOX = {"UNROUTABLE_GRACE": 0}
    event_id = given_to(*OTHERS, key=key)
    show_worker(**{known: [PLACED, GONE]})
    deliver(by, OTHERS)
    found = ended(event_id)
    assert (found.status, found.attempts, found.locked_by) == (Status.NEW, 0, None)
    assert f"{GONE!r}" in str(found.last_error)
    OutboxWorker.objects.all().delete()
    calls: list[str] = []
    with listeners(calls, "gone"):
        outbox.drain(at=now() + timedelta(seconds=5))
    assert calls == [f"{GONE} {event_id}"]


SETTINGS_SAY: list[tuple[dict[str, Any], tuple[str, ...], bool, tuple[Status, int]]] = [
    ({"UNROUTABLE": "ignore"}, SOLE, False, (Status.DONE, 0)),
    ({"UNROUTABLE": "ignore"}, SOLE, True, (Status.NEW, 0)),
    ({"UNROUTABLE": "retry"}, OTHERS, False, (Status.RETRY, 1)),
    ({"UNROUTABLE": "retry", "MAX_ATTEMPTS": 1}, SOLE, False, (Status.DEAD, 1)),
    ({"UNROUTABLE": "retry", "MAX_ATTEMPTS": 1}, OTHERS, False, (Status.DONE, 1)),
    ({"UNROUTABLE": "retry", "MAX_ATTEMPTS": 1}, OTHERS, True, (Status.NEW, 0)),
    ({"UNROUTABLE_GRACE": 600}, OTHERS, False, (Status.NEW, 0)),
]


@cases(("options", "names", "is_known", "expected"), SETTINGS_SAY)
def test_the_settings_say_what_happens_to_what_nobody_has(
    settings: Any,
    options: dict[str, Any],
    names: tuple[str, ...],
    is_known: bool,
    expected: tuple[Status, int],
) -> None:
    OutboxEvent.objects.all().delete()
    OutboxWorker.objects.all().delete()
    settings.OUTBOX = options
    event_id = given_to(*names)
    if is_known:
        show_worker(listeners=[GONE])
    deliver("drain", names)
    assert (ended(event_id).status, ended(event_id).attempts) == expected


def test_a_dead_event_is_replayed_once_its_listener_is_back(settings: Any) -> None:
    settings.OUTBOX = {"UNROUTABLE_GRACE": 0}
    event_id = given_to(*SOLE)
    deliver("drain", SOLE)
    calls: list[str] = []
    with listeners(calls, "back", formerly=[GONE]):
        assert OutboxEvent.objects.dead().replay() == 1
        outbox.drain()
    assert calls == [f"{PLACED} back {event_id}"]
