"""What replay, cancel and their kin lock: the rows that they change, and nothing else.

MySQL locks whatever it reads: with another index than the primary key, entries that workers have to
change, and of a range the row behind it, which may belong to anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxQuerySet, OutboxStream
from django_outbox.sql import dialect_of, engine_connection
from tests.databases import vendor
from tests.plans import analyze
from tests.table import claim, elsewhere, in_thread, insert, keyed, names, now, siblings, stream_row

CHANGES: list[tuple[Status, str, tuple[timedelta, ...]]] = [
    (Status.DEAD, "replay", ()),
    (Status.DEAD, "discard", ()),
    (Status.NEW, "cancel", ()),
    (Status.NEW, "run_now", ()),
    (Status.NEW, "release", ()),
    (Status.NEW, "reschedule", (timedelta(hours=1),)),
]

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(vendor() == "sqlite", reason="SQLite has one writer at a time"),
]


def others(count: int, status: Status) -> OutboxQuerySet:
    columns = {"due": 60.0} if status is Status.NEW else {"due": None, "done_at": now()}
    return OutboxEvent.objects.filter(pk__in=insert(count, status=status, **columns))


def result_while_locked(pk: str, work: Callable[[], Any]) -> Any:
    with elsewhere(lambda: OutboxEvent.objects.select_for_update().get(pk=pk)):
        return in_thread(work).result(10)


def test_a_worker_settles_while_the_admin_changes_other_events() -> None:
    """Its settle has locked the leases that it writes: if it waits, they are not renewed."""
    dead = others(20, Status.DEAD)
    insert(20)
    held = [each["id"] for each in claim(limit=20)]
    analyze(OutboxEvent)
    own = engine_connection("default", lock_wait=1)
    with closing(own), elsewhere(dead.dead().order_by().lock_unlocked):
        assert dialect_of(own).settle_done(me="me", ids=held) == len(held)


@pytest.mark.parametrize("status_and_verb", CHANGES, ids=lambda each: each[1])
def test_an_event_that_is_not_changed_may_be_locked(
    status_and_verb: tuple[Status, str, tuple[timedelta, ...]],
) -> None:
    status, verb, more = status_and_verb
    rows = others(50, status)
    if verb == "release":
        rows.update(locked_by="w1")
    assert result_while_locked(*insert(), lambda: getattr(rows, verb)(*more)) == 50


def test_a_stream_that_is_not_released_may_be_locked() -> None:
    keys = [f"k{place:02}" for place in range(50)]
    for key in [*keys, "z"]:
        stream_row(key, locked_by="w1").save()
    leased = OutboxStream.objects.filter(pk__in=names(*keys))
    with elsewhere(lambda: OutboxStream.objects.select_for_update().get(pk=names("z")[0])):
        assert in_thread(leased.release).result(10) == 50


@pytest.mark.parametrize("key", [None, "k"])
def test_what_is_behind_a_cancelled_event_may_be_locked(key: str | None) -> None:
    """Who has written it may wait for the stream of the event: the two would be in a deadlock."""
    (first,) = insert() if key is None else keyed(key)
    siblings(first, "a")
    assert result_while_locked(*insert(), lambda: outbox.cancel(event_id=first)) == 2


def test_what_is_behind_an_event_that_is_routed_may_be_locked() -> None:
    (first,) = insert()
    rows = siblings(first, "a")

    def lock() -> list[str]:
        with transaction.atomic():
            return [*dialect_of(connection).lock_event(first)]

    assert result_while_locked(*insert(), lock) == rows
