"""What replay, cancel and their kin lock: the rows that they change, and nothing else.

MySQL locks whatever it reads: with another index than the primary key, entries that workers have to
change, and of a range the row behind it, which may belong to anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxQuerySet
from django_outbox.sql import dialect_of, engine_connection
from django_outbox.sql.transactions import single_transaction
from tests.databases import vendor
from tests.plans import analyze
from tests.table import claim, elsewhere, in_thread, insert, keyed, now, siblings

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(vendor() == "sqlite", reason="SQLite has one writer at a time"),
]


def of_others(count: int, status: Status) -> OutboxQuerySet:
    """Insert events of which somebody changes all; return these."""
    columns = {"due": 60.0} if status is Status.NEW else {"due": None, "done_at": now()}
    return OutboxEvent.objects.filter(pk__in=insert(count, status=status, **columns))


def test_a_worker_settles_while_the_admin_changes_other_events() -> None:
    """Its settle has locked the leases that it writes: if it waits, they are not renewed."""
    dead = of_others(20, Status.DEAD)
    insert(20)
    held = [each["id"] for each in claim(limit=20)]
    analyze(OutboxEvent)
    own = engine_connection("default", lock_wait=1)
    with closing(own), elsewhere(dead.dead().order_by().lock_unlocked):
        assert dialect_of(own).settle_done(me="me", ids=held) == len(held)


@pytest.mark.parametrize(
    ("status", "change"),
    [
        (Status.DEAD, OutboxQuerySet.replay),
        (Status.DEAD, OutboxQuerySet.discard),
        (Status.NEW, OutboxQuerySet.cancel),
    ],
)
def test_an_event_that_is_not_changed_may_be_locked(
    status: Status, change: Callable[[OutboxQuerySet], int]
) -> None:
    rows = of_others(50, status)
    (other,) = insert()
    with elsewhere(lambda: OutboxEvent.objects.select_for_update().get(pk=other)):
        assert in_thread(lambda: change(rows)).result(10) == 50


@pytest.mark.parametrize("key", [None, "k"])
def test_what_is_behind_a_cancelled_event_may_be_locked(key: str | None) -> None:
    """Who has written it may wait for the stream of the event: the two would be in a deadlock."""
    (first,) = insert() if key is None else keyed(key)
    rows = siblings(first, "a")
    (behind,) = insert()
    with elsewhere(lambda: OutboxEvent.objects.select_for_update().get(pk=behind)):
        assert in_thread(lambda: outbox.cancel(event_id=first)).result(10) == len(rows)


def test_what_is_behind_an_event_that_is_routed_may_be_locked() -> None:
    (first,) = insert()
    rows = siblings(first, "a")
    (behind,) = insert()
    own = engine_connection("default", lock_wait=1)
    with (
        closing(own),
        elsewhere(lambda: OutboxEvent.objects.select_for_update().get(pk=behind)),
        single_transaction(own),
    ):
        assert {*dialect_of(own).lock_event(first)} == {*rows}
