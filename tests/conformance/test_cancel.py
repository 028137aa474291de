"""Cancelling and rescheduling what waits: against claims, in streams, and with the transaction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.signals import pre_delete
from django.test.utils import CaptureQueriesContext

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.signals import events_discarded
from tests.databases import vendor
from tests.surroundings import heard
from tests.table import (
    claim,
    elsewhere,
    ids_claimed_by_an_engine,
    in_thread,
    insert,
    keyed,
    listening,
    now,
    row,
    siblings,
    stream,
    write,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)
several_writers = pytest.mark.skipif(vendor() == "sqlite", reason="SQLite has one writer at a time")


def left() -> list[str]:
    return sorted(OutboxEvent.objects.values_list("pk", flat=True))


# -- cancel ----------------------------------------------------------------------------------------


def test_what_waits_of_an_event_is_deleted() -> None:
    insert(event_id="e")
    _, later, done, dead, leased = siblings("e", *"abcd")
    (other,) = insert()
    rows = OutboxEvent.objects
    rows.filter(pk=later).update(status=Status.RETRY, attempts=2, available_at=now() + HOUR)
    rows.filter(pk=done).update(status=Status.DONE, available_at=None, done_at=now())
    rows.filter(pk=dead).update(status=Status.DEAD, available_at=None, done_at=now())
    rows.filter(pk=leased).update(locked_by="w", locked_at=now(), available_at=now() + HOUR)
    with heard(events_discarded) as discarded:
        assert outbox.cancel(event_id="e") == 2
    assert left() == sorted([done, dead, leased, other])
    assert [each["count"] for each in discarded] == [2]
    assert outbox.cancel(event_id="e") == 0 == outbox.cancel(event_id="unknown")


def test_a_unique_key_is_free_again() -> None:
    write(unique_key="reminder", deliver_after=60)
    assert outbox.cancel(unique_key="reminder") == 1
    assert outbox.cancel(unique_key="reminder") == 0
    (again,) = write(unique_key="reminder")
    assert left() == [row(again).pk]


def test_it_belongs_to_the_transaction_of_its_caller() -> None:
    (event_id,) = write()
    with heard(events_discarded) as discarded, suppress(ZeroDivisionError), transaction.atomic():
        assert outbox.cancel(event_id=event_id) == 1
        raise ZeroDivisionError
    assert (len(left()), discarded) == (1, [])
    with transaction.atomic():
        new = outbox.write("order.placed")
        assert outbox.cancel(event_id=new) == 1
    assert len(left()) == 1


def test_what_a_claim_has_taken_is_not_cancelled() -> None:
    (event_id,) = write()
    assert len(claim()) == 1
    assert outbox.cancel(event_id=event_id) == 0
    assert outbox.reschedule(event_id=event_id, deliver_after=60) == 0
    assert row(event_id).locked_by == "me"


@several_writers
def test_a_claim_leaves_what_an_open_transaction_cancels() -> None:
    cancelled, other = write(2)
    with elsewhere(lambda: outbox.cancel(event_id=cancelled)):
        assert ids_claimed_by_an_engine() in ([], [row(other).pk])
    assert left() == [row(other).pk]


@several_writers
def test_a_claim_leaves_what_is_cancelled_while_a_project_listens_to_deletions() -> None:
    (event_id,) = write()
    found: list[list[str]] = []

    def take(**_: Any) -> None:
        found.append(in_thread(ids_claimed_by_an_engine).result(30))

    pre_delete.connect(take)
    try:
        assert outbox.cancel(event_id=event_id) == 1
    finally:
        pre_delete.disconnect(take)
    assert found == [[]]


@pytest.mark.parametrize(
    "change",
    [outbox.cancel, lambda **given: outbox.reschedule(**given, deliver_after=60)],
    ids=["cancel", "reschedule"],
)
def test_of_a_stream_that_a_worker_has_nothing_is_changed(change: Callable[..., int]) -> None:
    (pk,) = keyed("k")
    event_id = OutboxEvent.objects.get(pk=pk).event_id
    OutboxStream.objects.update(locked_by="w", locked_at=now())
    assert change(event_id=event_id) == 0
    assert row(event_id).deliver_at is None


def test_a_stream_is_locked_before_the_events_in_it() -> None:
    """So two that change the same event wait for each other instead of deadlocking."""
    event_id = OutboxEvent.objects.get(pk=keyed("k")[0]).event_id
    with CaptureQueriesContext(connection) as said:
        assert outbox.reschedule(event_id=event_id, deliver_after=60) == 1
    locking = [
        each["sql"]
        for each in said
        if each["sql"].startswith(("INSERT", "UPDATE", "DELETE")) or "FOR UPDATE" in each["sql"]
    ]
    assert "outbox_stream" in locking[0]


def test_a_stream_from_which_something_is_cancelled_has_a_new_version() -> None:
    """A worker that has read it before reads it again."""
    first, second = (OutboxEvent.objects.get(pk=pk).event_id for pk in keyed("k", 2))
    before = stream("k").seq
    assert outbox.cancel(event_id=first) == 1
    assert stream("k").seq > before
    seen: list[str] = []
    with listening(lambda event: seen.append(event.event_id), "*"):
        assert outbox.drain() == 1
    assert seen == [second]


# -- reschedule ------------------------------------------------------------------------------------


def test_what_waits_is_due_at_the_new_time() -> None:
    first, second, failed = write(3)
    OutboxEvent.objects.filter(event_id=failed).update(status=Status.RETRY, attempts=2)
    later = now() + HOUR
    for each in (first, failed):
        assert outbox.reschedule(event_id=each, available_at=later) == 1
    found = row(failed)
    assert (found.status, found.attempts, found.available_at) == (Status.RETRY, 2, later)
    assert row(first).first_due_at == later
    assert [each["event_id"] for each in claim()] == [second]
    assert outbox.reschedule(event_id=first, deliver_after=timedelta(minutes=1)) == 1
    assert now() < row(first).available_at < later


def test_a_worker_hears_that_something_is_due_earlier() -> None:
    (event_id,) = write(unique_key="reminder", available_at=now() + HOUR)
    with listening(lambda event: None), outbox.Worker() as worker:
        assert outbox.reschedule(unique_key="reminder", available_at=now()) == 1
        wait_until(lambda: row(event_id).status == Status.DONE)
        assert worker.lost_threads == ()


def test_a_stream_waits_for_its_rescheduled_head() -> None:
    first, second = (OutboxEvent.objects.get(pk=pk).event_id for pk in keyed("k", 2))
    later = now() + HOUR
    assert outbox.reschedule(event_id=first, available_at=later) == 1
    assert (row(first).deliver_at, row(first).available_at) == (later, None)
    seen: list[str] = []
    with listening(lambda event: seen.append(event.event_id), "*"):
        assert outbox.drain() == 0
        assert outbox.reschedule(event_id=first, available_at=now()) == 1
        assert outbox.drain() == 2
    assert seen == [first, second]


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, outbox.InvalidEvent),
        ({"event_id": "a", "unique_key": "b"}, outbox.InvalidEvent),
        ({"event_id": "a\0"}, outbox.InvalidEvent),
        ({"unique_key": 7}, outbox.InvalidEvent),
        ({"event_id": "x" * 300}, outbox.InvalidEvent),
    ],
)
def test_a_name_that_none_can_have_is_refused(
    given: dict[str, Any], error: type[Exception], django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(0):
        for call in (outbox.cancel, lambda **names: outbox.reschedule(**names, deliver_after=1)):
            with pytest.raises(error):
                call(**given)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, outbox.InvalidEvent),
        ({"deliver_after": 1, "available_at": now}, outbox.InvalidEvent),
        ({"deliver_after": None}, TypeError),
        ({"delay": 1}, TypeError),
        ({"available_at": "tomorrow"}, outbox.InvalidEvent),
        ({"deliver_after": -1}, outbox.InvalidEvent),
    ],
)
def test_a_time_that_is_none_is_refused(given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error), transaction.atomic():
        outbox.reschedule(event_id="a", **given)
    assert not connection.needs_rollback
