"""History for a new listener: each event that it lacks, once, whoever else works on the rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import F

import django_outbox as outbox
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream, deliver_to
from django_outbox.sql import dialect_of
from tests.databases import vendor
from tests.sessions import waiters
from tests.table import PLACED, elsewhere, in_thread, listening, now, row, stream, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

LEDGER = f"{PLACED} ledger"
LOCKS = pytest.mark.skipif(vendor() == "sqlite", reason="SQLite has one writer at a time")


@contextmanager
def listeners(calls: list[str], *names: str, **options: Any) -> Iterator[None]:
    """Register listeners that note their names and the numbers of the events."""
    with ExitStack() as stack:
        for name in names:
            note = lambda event: calls.append(f"{event.listener} {event.payload['n']}")  # noqa: E731
            stack.enter_context(listening(note, name=name, **options))
        yield


def written(count: int = 3, *names: str, drained: bool = True, **fields: Any) -> list[str]:
    """Write events in a process that has these listeners, and deliver them."""
    with listeners([], *(names or ("",)), event_type=fields.get("event_type", PLACED)):
        ids = write(count, **fields)
        if drained:
            deliver()
    return ids


def deliver() -> None:
    while outbox.drain():
        pass


def given_to_ledger() -> list[str]:
    """Return the events that have a row of the new listener."""
    rows = OutboxEvent.objects.filter(listener=LEDGER).order_by("pk")
    return [*rows.values_list("event_id", flat=True)]


def receipts(event_id: str) -> set[str | None]:
    return {*OutboxEvent.objects.of_event(event_id).values_list("routes", flat=True)}


# -- what is inserted ------------------------------------------------------------------------------


def test_a_new_listener_gets_what_was_delivered_before_and_nobody_else_is_called() -> None:
    ids = written(3, "", "mail")
    before = {*OutboxEvent.objects.values_list("pk", "status", "done_at", "attempts")}
    calls: list[str] = []
    with listeners(calls, "", "mail", "ledger"):
        assert OutboxEvent.objects.deliver_to(LEDGER) == 3
        assert calls == []
        deliver()
        assert OutboxEvent.objects.deliver_to(LEDGER) == 0
    assert calls == [f"{LEDGER} {n}" for n in range(3)]
    assert given_to_ledger() == ids
    assert before < {*OutboxEvent.objects.values_list("pk", "status", "done_at", "attempts")}
    digests = {registry.digest(title) for title in (PLACED, f"{PLACED} mail", LEDGER)}
    assert {*str(*receipts(ids[0])).split()} == digests  # the same in all rows


def test_the_new_rows_are_new_and_due_at_once() -> None:
    (event_id,) = written(1, headers={"trace": "1"}, tenant_id="north")
    OutboxEvent.objects.update(attempts=4, rescues=1, last_error="E: no", history="[]")
    before = now()
    with listeners([], "ledger"):
        assert OutboxEvent.objects.deliver_to(LEDGER) == 1
    found, first = OutboxEvent.objects.get(listener=LEDGER), row(event_id)
    assert (found.status, found.attempts, found.rescues) == (Status.NEW, 0, 0)
    assert (found.last_error, found.history, found.done_at) == (None, None, None)
    assert found.available_at is not None
    assert before <= found.available_at == found.first_due_at <= now()
    for name in ("payload", "headers", "tenant_id", "occurred_at", "created_at"):
        assert getattr(found, name) == getattr(first, name)


STATES: dict[str, dict[str, Any]] = {
    "done": {"status": Status.DONE, "available_at": None},
    "dead": {"status": Status.DEAD, "available_at": None},
    "retrying": {"status": Status.RETRY},
    "leased": {"locked_by": "another"},
    "due": {},
}


@pytest.mark.parametrize("name", STATES)
def test_events_in_any_state_are_a_source_and_keep_it(name: str) -> None:
    (event_id,) = written(1, drained=False)
    OutboxEvent.objects.update(**STATES[name])
    before = OutboxEvent.objects.defer("routes").values().get()
    with listeners([], "ledger"):
        assert OutboxEvent.objects.deliver_to(LEDGER) == 1
    left = OutboxEvent.objects.filter(pk=event_id).values().get()
    assert {**left, "routes": None} == {**before, "routes": None}


def test_what_its_workers_route_is_left_to_them() -> None:
    written(1, deliver_after=timedelta(hours=1), drained=False)
    (unrouted,) = write()  # no listener is known
    with listeners([], "", "ledger"):
        assert OutboxEvent.objects.deliver_to(LEDGER) == 0
        deliver()
    assert given_to_ledger() == [unrouted]


def test_only_events_that_are_routed_to_the_listener_are_given() -> None:
    with listeners([], "all", event_type="*"):
        for kind in ("order.placed", "order.paid", "cart.filled"):
            for aggregate_type in ("shop.Order", "shop.Cart"):
                write(event_type=kind, aggregate_type=aggregate_type)
    every = OutboxEvent.objects
    with listeners([], "a", event_type="order.*", aggregate_type="shop.Order"):
        assert every.deliver_to("order.*[shop.Order] a") == 2
    with listeners([], "b", event_type="order.paid", aggregate_type="shop.Cart"):
        assert every.deliver_to("order.paid[shop.Cart] b") == 1
    # Of unnamed listeners, only the most specific one gets an event.
    with listeners([], "", event_type="order.*"), listeners([], "", event_type="order.paid"):
        assert every.deliver_to("order.*") == 2
        assert every.deliver_to("order.paid") == 2


def test_the_queryset_chooses_and_any_row_stands_for_its_event() -> None:
    ids = written(4, "", "mail")
    mine = OutboxEvent.objects.filter(event_id__in=ids[:2])
    with listeners([], "", "mail", "ledger"):
        assert mine.filter(listener=f"{PLACED} mail").deliver_to(LEDGER) == 2
        assert OutboxEvent.objects.order_by("-pk")[:2].deliver_to(LEDGER) == 1
    assert given_to_ledger() == [*ids[:2], ids[3]]


def test_an_event_whose_first_row_is_gone_is_given_from_another() -> None:
    ids = written(2, "", "mail", "more")
    OutboxEvent.objects.filter(pk__in=ids).delete()
    with listeners([], "ledger"):
        assert OutboxEvent.objects.deliver_to(LEDGER) == 2
    assert given_to_ledger() == ids


def test_a_renamed_listener_is_not_given_again_what_it_had_under_its_former_title() -> None:
    written(2, "old")
    with listeners([], "ledger", formerly=[f"{PLACED} old"]):
        assert OutboxEvent.objects.deliver_to(LEDGER) == 0


def test_the_receipt_outlives_the_row() -> None:
    written(2)
    with listeners([], "ledger"):
        assert OutboxEvent.objects.deliver_to(LEDGER) == 2
        OutboxEvent.objects.filter(listener=LEDGER).delete()
        assert OutboxEvent.objects.deliver_to(LEDGER) == 0


def test_own_ids_that_look_like_rows_of_another_event_are_events_of_their_own() -> None:
    looks = f"a.{registry.digest(PLACED)}"
    written(1, event_id="a")
    written(1, event_id=looks)
    with listeners([], "ledger"):
        assert OutboxEvent.objects.filter(event_id="a").deliver_to(LEDGER) == 1
        assert receipts(looks) == {registry.digest(PLACED)}
        assert OutboxEvent.objects.deliver_to(LEDGER) == 1
    assert sorted(given_to_ledger()) == ["a", looks]


# -- order -----------------------------------------------------------------------------------------


def test_events_of_a_key_arrive_in_the_order_of_their_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, size in (("PART", 4), ("PAGE", 7)):
        monkeypatch.setattr(deliver_to, name, size)
    commits = [(key, place) for place in (5, 2, 7, 1, 9, 3, 8, 4, 6, 0) for key in ("k", "z", None)]
    for key, place in commits:  # their ids are in another order
        written(1, "", "mail", key=key, event_id=f"{place}{key}")
    got: list[tuple[str | None, str]] = []
    with listening(lambda event: got.append((event.key, event.event_id)), name="ledger"):
        parts = deliver_to.deliver_parts(OutboxEvent.objects.all(), deliver_to.registered(LEDGER))
        for count in parts:  # each is delivered before the next one is inserted
            assert count > 0
            deliver()
    expected = [(key, f"{place}{key}") for key, place in commits]
    assert sorted(each for each in got if each[0] is None) == sorted(expected[2::3])
    for key in ("k", "z"):
        assert [each for each in got if each[0] == key] == [e for e in expected if e[0] == key]


def test_a_keyed_event_waits_in_the_stream_of_the_lane_and_its_queue(settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"default": {}, "letters": {}}}
    (event_id,) = written(1, key="k")
    before, own = now(), stream("k").seq
    with listeners([], "ledger", queue="letters"):
        assert OutboxEvent.objects.deliver_to(LEDGER) == 1
    found, lane = OutboxEvent.objects.get(listener=LEDGER), stream("k", "ledger")
    assert (found.stream, found.seq, found.available_at) == (lane.pk, row(event_id).seq, None)
    assert lane.due_at is not None
    assert before <= lane.due_at <= now()
    assert (lane.queue, lane.locked_by, stream("k").seq) == ("letters", None, own)


def test_a_leased_stream_gets_a_new_version_and_keeps_its_lease() -> None:
    written(1, "", "ledger", key="k", drained=False)
    written(1, "", key="k", drained=False)
    name, later = stream("k", "ledger").pk, now() + timedelta(minutes=5)
    OutboxStream.objects.filter(pk=name).update(locked_by="me", locked_at=now(), due_at=later)
    version = stream("k", "ledger").seq
    with listeners([], "ledger"):
        assert OutboxEvent.objects.deliver_to(LEDGER) == 1
    after = stream("k", "ledger")
    assert (after.locked_by, after.due_at) == ("me", later)
    assert after.seq > version  # so the worker cannot release it as idle


@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
def test_with_a_rate_they_are_due_one_after_the_other(key: str | None) -> None:
    ids = written(3, key=key)
    column = "available_at" if key is None else "deliver_at"
    calls: list[str] = []
    with listeners(calls, "ledger"):
        assert OutboxEvent.objects.deliver_to(LEDGER, rate="1/m") == 3
        found = dict(OutboxEvent.objects.filter(listener=LEDGER).values_list("event_id", column))
        assert (
            found[ids[1]] - found[ids[0]] == found[ids[2]] - found[ids[1]] == timedelta(minutes=1)
        )
        deliver()
    assert calls == [f"{LEDGER} 0"]


# -- others at the same time -----------------------------------------------------------------------


def given_elsewhere(title: str = LEDGER) -> Future[int]:
    return in_thread(lambda: OutboxEvent.objects.deliver_to(title))


def until_it_waits() -> None:
    if vendor() != "sqlite":
        wait_until(waiters, what="one that waits for a lock")


def test_an_event_that_is_purged_meanwhile_is_passed_over() -> None:
    ids = written(3)
    with listeners([], "", "ledger"):
        with elsewhere(OutboxEvent.objects.filter(pk=ids[1]).delete):
            giving = given_elsewhere()
            until_it_waits()
        assert giving.result(30) == 2
    assert given_to_ledger() == [ids[0], ids[2]]


@LOCKS
def test_the_purge_passes_over_what_is_being_given(settings: Any) -> None:
    ids = written(2)
    settings.OUTBOX = {"RETENTION_DONE": 0}
    with listeners([], "ledger"):
        give = OutboxEvent.objects.filter(pk=ids[0]).deliver_to
        with elsewhere(lambda: give(LEDGER)):
            assert OutboxEvent.objects.purge() == 1
        assert OutboxEvent.objects.purge() == 1
    assert [*OutboxEvent.objects.values_list("event_id", "listener")] == [(ids[0], LEDGER)]


@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
def test_of_two_at_once_each_inserts_what_the_other_did_not(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver_to, "PART", 5)
    ids = written(40, "", "mail", key=key)
    start = threading.Barrier(3)

    def give(title: str) -> int:
        start.wait(30)
        return OutboxEvent.objects.deliver_to(title)

    titles = (LEDGER, LEDGER, f"{PLACED} audit")
    with listeners([], "", "mail", "ledger", "audit"):
        found = [in_thread(lambda each=each: give(each)) for each in titles]  # type: ignore[misc]
        counts = [each.result(60) for each in found]
        assert (counts[0] + counts[1], counts[2]) == (40, 40)
        assert OutboxEvent.objects.deliver_to(LEDGER) == 0
        deliver()
    assert given_to_ledger() == ids
    rows = OutboxEvent.objects.filter(status=Status.DONE)
    assert rows.count() == OutboxEvent.objects.count() == 160
    assert {len(str(each).split()) for each in rows.values_list("routes", flat=True)} == {4}


@LOCKS
def test_what_another_has_given_meanwhile_is_not_given_again() -> None:
    (event_id,) = written(1)
    with listeners([], "", "ledger", "audit"):
        with elsewhere(lambda: OutboxEvent.objects.deliver_to(LEDGER)):
            same, other = given_elsewhere(), given_elsewhere(f"{PLACED} audit")
            wait_until(lambda: waiters() > 1, what="both that wait for a lock")
        assert (same.result(30), other.result(30)) == (0, 1)
    assert {len(str(each).split()) for each in receipts(event_id)} == {3}


@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
def test_beside_workers_that_complete_the_routing_each_event_arrives_once(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver_to, "PART", 3)
    written(30, "", "mail", key=key, drained=False)
    start, calls = threading.Barrier(3), list[str]()

    def work(act: Callable[[], int]) -> int:
        start.wait(30)
        return act()

    with listeners(calls, "", "mail", "ledger"):
        acts = [outbox.drain, outbox.drain, lambda: OutboxEvent.objects.deliver_to(LEDGER)]
        for each in [in_thread(lambda act=act: work(act)) for act in acts]:  # type: ignore[misc]
            each.result(60)
        deliver()
        assert OutboxEvent.objects.deliver_to(LEDGER) == 0
    names = (PLACED, f"{PLACED} mail", LEDGER)
    assert sorted(calls) == sorted(f"{name} {n}" for name in names for n in range(30))


@LOCKS
def test_a_worker_that_completes_the_routing_waits_and_gives_nothing_twice() -> None:
    written(1, drained=False)
    calls: list[str] = []
    with listeners(calls, "", "ledger"):
        with elsewhere(lambda: OutboxEvent.objects.update(routes=F("routes"))):
            giving = given_elsewhere()
            until_it_waits()
        assert giving.result(30) == 1
        deliver()
    assert sorted(calls) == [f"{PLACED} 0", f"{LEDGER} 0"]


def test_a_part_that_fails_as_after_a_deadlock_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written(2)
    dialect, failures = type(dialect_of(connection)), iter([1, 2])
    add_rows = dialect.add_rows

    def deadlock(*args: Any, **kwargs: Any) -> None:
        add_rows(*args, **kwargs)
        if next(failures, None):
            raise OperationalError("deadlock")

    monkeypatch.setattr(dialect, "add_rows", deadlock)
    with listeners([], "ledger"):
        assert OutboxEvent.objects.deliver_to(LEDGER) == 2
    failures = iter(range(1, 9))
    with listeners([], "audit"):
        with pytest.raises(OperationalError):
            OutboxEvent.objects.deliver_to(f"{PLACED} audit")
        assert OutboxEvent.objects.filter(listener=f"{PLACED} audit").count() == 0


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "options"),
    [("order.placed:ledger", {}), ("", {}), (None, {}), (["ledger"], {}), (LEDGER, {"rate": "5"})],
)
def test_another_title_or_rate_is_refused_and_the_transaction_goes_on(
    title: Any, options: dict[str, Any]
) -> None:
    written(1)
    with listeners([], "ledger"), transaction.atomic():
        with pytest.raises(ValueError, match="expected"):
            OutboxEvent.objects.deliver_to(title, **options)
        assert OutboxEvent.objects.deliver_to(LEDGER) == 1


def test_an_unknown_title_names_the_nearest() -> None:
    with listeners([], "ledger"), pytest.raises(ValueError, match=f'"{LEDGER}"'):
        OutboxEvent.objects.deliver_to(f"{PLACED} leger")
