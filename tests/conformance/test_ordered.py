"""Events with a key are delivered in order through failures, delays, lost workers, late commits."""

from __future__ import annotations

import threading

import pytest
from django.db import connection, transaction

import django_outbox as outbox
from django_outbox.sql import dialect_of
from django_outbox.sql.values import STREAMS, Branch, Claim
from tests.table import elsewhere, listening, now, statuses
from tests.test_ordered import Seen, all_done, place, put, worker
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

__all__ = ["place"]  # fixtures


def claims_of(owner: str) -> list[str]:
    """Claim as another worker would; return the keys."""
    claim = Claim(table=STREAMS, me=owner, lease=60, branches=[Branch("default", 9)])
    return [key for key, *_ in dialect_of(connection).claim(claim).rows]


def seconds_pass(seconds: float, claimed: list[str]) -> bool:
    """Wait by the database's clock, while another worker claims all the streams it can."""
    since = now()

    def passed() -> bool:
        claimed.extend(claims_of("another"))
        return (now() - since).total_seconds() > seconds

    return wait_until(passed)


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
