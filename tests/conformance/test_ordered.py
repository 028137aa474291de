"""Events with a key are delivered in order through failures, delays, lost workers, late commits."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxStream
from django_outbox.signals import lease_lost
from django_outbox.sql import dialect_of
from django_outbox.sql.values import Branch, StreamClaim
from tests.table import (
    elsewhere,
    end_stream_leases,
    listening,
    now,
    row,
    statuses,
    stream,
    stream_due_in,
)
from tests.test_ordered import QUICK, Seen, all_done, idle, place, put, worker
from tests.testapp.models import Order
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

__all__ = ["place"]  # fixtures


def test_g1_random_failures_leave_the_order_inside_every_key() -> None:
    luck, seen = random.Random(1), Seen()

    def fail_now_and_then(event: outbox.Event) -> Any:
        seen(event)
        chance = luck.random()
        if chance < 0.3:
            raise ValueError("three in ten fail")
        return outbox.Defer(0.01) if chance < 0.4 else None

    for key in "abcde":
        put(key, 20)
    with (
        listening(fail_now_and_then),
        worker(RETRY={"policy": "fixed", "delay": 0.01, "max_attempts": 1000}),
    ):
        all_done(60)
    assert len(seen.ids) > 100
    assert {key: [*dict.fromkeys(each)] for key, each in seen.order.items()} == {
        key: [*range(20)] for key in "abcde"
    }
    assert all(each == sorted(each) for each in seen.order.values())


def test_an_atomic_listener_commits_with_its_event() -> None:
    failed: list[int] = []

    def order(event: outbox.Event) -> None:
        Order.objects.create(sku=str(event.payload["n"]))
        if event.payload["n"] == 2 and not failed:
            failed.append(2)
            raise ValueError("once")

    put("a", 5)
    with listening(order, atomic=True), worker():
        all_done()
        wait_until(idle)
    assert [*Order.objects.order_by("pk").values_list("sku", flat=True)] == [*"01234"]


@pytest.mark.skipif(
    "connection.vendor == 'sqlite'", reason="an open SQLite transaction keeps every writer out"
)
def test_an_open_business_transaction_delays_no_other_key() -> None:
    seen = Seen()
    put("a", 2)
    with listening(seen), worker():
        all_done()
        with elsewhere(lambda: put("a", 1, 2)):
            put("b", 3)
            wait_until(lambda: len(seen.order["b"]) == 3)
        all_done()
    assert seen.order["a"] == [0, 1, 2]


def test_a_settle_without_the_lease_is_refused_and_the_stream_goes_on_elsewhere() -> None:
    """The event in flight may run twice, but this worker starts none of its followers."""
    running, go, told = threading.Event(), threading.Event(), []

    def note(*, count: int, **facts: Any) -> None:
        told.append(count)

    def wait(event: outbox.Event) -> None:
        seen(event)
        running.set()
        go.wait(20)

    seen = Seen()
    first, second = put("a", 2)
    lease_lost.connect(note)
    try:
        with listening(wait), worker(LEASE=1.2, WORKERS=1):
            running.wait(20)
            OutboxStream.objects.filter(key="a").update(
                locked_by="another", due_at=now() + timedelta(seconds=60)
            )
            wait_until(lambda: told)
            go.set()
            wait_until(lambda: sum(told) >= 2, what="both the lease and the settle")
            assert (row(first).status, row(second).status) == (Status.NEW, Status.NEW)
            assert (stream("a").locked_by, seen.order["a"]) == ("another", [0])
            end_stream_leases("a")  # and the other one is lost, too
            all_done()
    finally:
        lease_lost.disconnect(note)
    assert seen.order["a"] == [0, 0, 1]


def claims_of(owner: str) -> list[str]:
    """Claim as another worker would; return the keys."""
    claim = StreamClaim(me=owner, lease=60, branches=[Branch("default", 9)])
    return [key for key, *_ in dialect_of(connection).claim_streams(connection, claim).rows]


def seconds_pass(seconds: float, claimed: list[str]) -> bool:
    """Wait by the database's clock, while another worker claims all the streams it can."""
    since = now()

    def passed() -> bool:
        claimed.extend(claims_of("another"))
        return (now() - since).total_seconds() > seconds

    return wait_until(passed)


def test_a_plain_listener_within_its_timeout_keeps_its_stream() -> None:
    running, go, claimed = threading.Event(), threading.Event(), list[str]()

    def wait(event: outbox.Event) -> None:
        seen(event)
        running.set()
        go.wait(20)

    seen = Seen()
    ids = put("a", 4)
    with listening(wait, timeout=30), worker(LEASE=3, WORKERS=2):
        assert running.wait(20)
        assert seconds_pass(3.3, claimed)
        assert seen.order["a"] == [0]
        go.set()
        all_done()
    assert (seen.ids, claimed) == (ids, [])


@pytest.mark.skipif(
    "connection.vendor == 'sqlite'", reason="an open SQLite transaction keeps every writer out"
)
def test_r5_what_ends_after_an_unrenewed_lease_is_settled_but_nothing_is_started() -> None:
    """A business transaction blocks the renewal; meanwhile no other worker may claim the stream."""
    running, go, claimed = threading.Event(), threading.Event(), list[str]()

    def wait(event: outbox.Event) -> None:
        seen(event)
        running.set()
        go.wait(20)

    seen = Seen()
    put("a", 3)
    with listening(wait), worker(LEASE=0.9, WORKERS=2):
        assert running.wait(20)
        with elsewhere(lambda: put("a", 1, first=3)):
            assert seconds_pass(0.9, claimed)
            go.set()
            wait_until(lambda: statuses() == {"DONE": 1, "NEW": 2})
            assert seconds_pass(0.5, claimed)
            assert (seen.order["a"], claimed) == ([0], [])
        all_done()
    assert seen.order["a"] == [0, 1, 2, 3]


@pytest.mark.skipif(
    "connection.vendor == 'sqlite'", reason="an open SQLite transaction keeps every writer out"
)
def test_r5_who_claims_right_after_such_a_transaction_has_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner is alive but renews too late, so its settle is refused."""
    running, go, taken = threading.Event(), threading.Event(), threading.Event()
    dialect, claimed = type(dialect_of(connection)), list[str]()
    renew = dialect.renew_streams

    def late(*args: Any, **options: Any) -> Any:
        locked = renew(*args, **options)
        if running.is_set():
            assert locked[0] == set()
            monkeypatch.undo()
            taken.wait(20)
        return locked

    def wait(event: outbox.Event) -> None:
        seen(event)
        running.set()
        go.wait(20)

    seen = Seen()
    put("a", 3)
    with listening(wait), worker(LEASE=0.9, WORKERS=2):
        assert running.wait(20)
        with elsewhere(lambda: put("a", 1, first=3)):
            monkeypatch.setattr(dialect, "renew_streams", late)
            assert seconds_pass(0.9, claimed)
            assert claimed == []
        wait_until(lambda: claims_of("another"))
        taken.set()
        go.set()
        put("b", 1)
        wait_until(lambda: statuses() == {"DONE": 1, "NEW": 4})
        assert seen.order == {"a": [0], "b": [0]}
        end_stream_leases("a")  # and the other one is lost, too
        all_done()
    assert seen.order["a"] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("ordering", ["aggregate", "global"])
def test_j7_in_mode_ordered_events_are_in_order_without_a_key(ordering: str) -> None:
    seen: list[tuple[str, int]] = []
    failed: list[int] = []

    def listen(event: outbox.Event) -> None:
        seen.append((event.aggregate_id or "", event.payload["n"]))
        if event.payload["n"] == 4 and not failed:
            failed.append(4)
            raise ValueError("once")

    mode = {"MODE": "ordered", "ORDERING": ordering, "UNROUTABLE_GRACE": 0}
    with listening(listen), worker(**mode):
        for n in range(10):
            with transaction.atomic():
                outbox.write("order.placed", {"n": n}, aggregate_type="x", aggregate_id=str(n % 2))
        all_done()
    every = [(str(n % 2), n) for n in range(10)]
    if ordering == "global":
        assert seen == [*every[:5], ("0", 4), *every[5:]]
    for aggregate in "01":
        own = [n for key, n in seen if key == aggregate]
        assert own == sorted(own)
        assert sorted({*own}) == [n for key, n in every if key == aggregate]


@override_settings(OUTBOX=QUICK)
def test_drain_delivers_in_order(place: Any) -> None:
    seen = Seen(n3=[outbox.RetryAfter(0.4)])
    put("a", 60)
    put("b", 60, 100)
    with listening(seen), place():
        assert outbox.drain() >= 60 + 4
        wait_until(lambda: stream("a").due_at is None or stream_due_in("a") < 0)
        outbox.drain()
    assert seen.order == {"a": [0, 1, 2, 3, *range(3, 60)], "b": [*range(100, 160)]}
    assert statuses() == {"DONE": 120}
    assert idle()
