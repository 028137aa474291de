"""Pauses on each database: statements that postpone and resume rows, and their locks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

import django_outbox as outbox
from django_outbox import signals
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause
from django_outbox.models.pause_queryset import Resumed
from django_outbox.sql import dialect_of
from django_outbox.worker.pauses import KnownPauses
from tests.plans import analyze, explain, statements
from tests.surroundings import heard
from tests.table import claim, elsewhere, ids_of, in_thread, insert, keyed, now, row, statuses
from tests.test_pause import OTHER, SENT, TYPE, is_far, noting, pause, postpone_due, resume

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_resume_tells_what_it_came_to() -> None:
    ids = insert(3, event_type=SENT)
    pause(*TYPE)
    outbox.drain()
    with heard(signals.delivery_resumed) as told:
        assert resume(*TYPE) == Resumed(pauses=1, events=3, streams=0)
    assert told == [{"sender": "default", "kind": "event_type", "name": SENT, "count": 3}]
    assert not OutboxPause.objects.exists()
    assert {*OutboxEvent.objects.due().values_list("pk", flat=True)} == {*ids}
    assert resume(*TYPE) == Resumed(pauses=0, events=0, streams=0)


# -- an event type ---------------------------------------------------------------------------------


def test_events_of_a_paused_type_wait_and_nothing_is_counted() -> None:
    with noting(SENT, OTHER) as got:
        (waiting,) = insert(event_type=SENT, status=Status.RETRY, attempts=2, rescues=1)
        (free,) = insert(event_type=OTHER)
        pause(*TYPE)
        assert outbox.drain() == 1
        assert got == [free]
        found = row(waiting)
        assert (found.status, found.attempts, found.rescues) == (Status.RETRY, 2, 1)
        assert is_far(waiting)
        resume(*TYPE)
        assert outbox.drain() == 1
        assert got == [free, waiting]
    assert row(waiting).status == Status.DONE


def test_a_resume_leaves_delays_retries_and_other_types_alone() -> None:
    (delayed,) = insert(due=300, event_type=SENT, deliver_at=now() + timedelta(seconds=300))
    (retried,) = insert(due=200, event_type=SENT, status=Status.RETRY, attempts=1)
    (held,) = insert(due=30, event_type=SENT, locked_by="somebody", locked_at=now())
    (other,) = insert(event_type=OTHER)
    pause(*TYPE)
    pause("event_type", OTHER)
    outbox.drain()
    before = {each: row(each).available_at for each in (delayed, retried, held, other)}
    assert resume(*TYPE).events == 0
    assert {each: row(each).available_at for each in before} == before


def test_what_is_paused_makes_way_in_bounded_batches() -> None:
    """A claim behind 20,000 paused rows reads none of them."""
    paused = insert(20_000, due=-60, event_type=SENT)
    (free,) = insert(due=-30, event_type=OTHER)
    pause(*TYPE)
    looking = KnownPauses()
    looking.refresh(connection)
    rounds = 0
    while not postpone_due(looking, 100):
        rounds += 1
        assert rounds <= 40, "batches of 500"
    assert rounds == 40
    assert OutboxEvent.objects.postponed().count() == len(paused)
    assert ids_of(claim(limit=100)) == [free]


def scans(step: dict[str, Any]) -> bool:
    """Return whether a step of a plan reads the whole table."""
    if connection.vendor == "postgresql":
        return step["Node Type"] == "Seq Scan"
    if connection.vendor == "sqlite":
        return str(step["detail"]).startswith("SCAN") and "INDEX" not in str(step["detail"])
    return step["type"] == "ALL" and not str(step["table"]).startswith("<derived")  # just found


def test_each_batch_goes_by_the_index() -> None:
    insert(20_000, due=-60, event_type=SENT)
    insert(100, due=-30, event_type=OTHER)
    analyze(OutboxEvent)
    pause(*TYPE)
    looking = KnownPauses()
    looking.read(connection)
    sent = statements(lambda: postpone_due(looking, 100))
    wanted = "outbox_event" if connection.vendor == "mysql" else "ORDER BY queue, available_at"
    about_events = [each for each in sent if wanted in each[0]]
    assert (
        about_events
    )  # on MySQL all statements, which lock what they read; others may read 500 ids in any way
    for sql, params in about_events:
        steps = explain(sql, params)
        assert not [each for each in steps if scans(each)], (sql, steps)


# -- a resume while a worker postpones -------------------------------------------------------------


def test_nothing_is_postponed_for_a_pause_that_is_over() -> None:
    """A worker that does not know of the resume yet checks the pause in its own transaction."""
    (event_id,) = insert(event_type=SENT)
    pause(*TYPE)
    looking = KnownPauses()
    looking.read(connection)
    resume(*TYPE)
    assert postpone_due(looking, 10) == 0
    assert looking.pauses == frozenset()
    assert postpone_due(looking, 10) == 10
    assert ids_of(claim()) == [event_id]


@pytest.mark.skipif(connection.vendor == "sqlite", reason="has one writer at a time")
def test_a_resume_waits_for_who_is_just_postponing_and_finds_what_they_did() -> None:
    ids = insert(3, event_type=SENT)
    pause(*TYPE)

    def postpone() -> None:
        looking = KnownPauses()
        looking.read(connection)
        postpone_due(looking, 10)

    with elsewhere(postpone):
        resumed = in_thread(lambda: resume(*TYPE))
        assert statuses() == {"NEW": 3}
        assert not resumed.done()
    assert resumed.result(30) == Resumed(pauses=1, events=3, streams=0)
    assert {*OutboxEvent.objects.due().values_list("pk", flat=True)} == {*ids}


def test_two_who_postpone_at_once_share_and_do_not_wait_for_each_other() -> None:
    insert(20, event_type=SENT)
    pause(*TYPE)

    def postpone() -> int:
        count, _ = dialect_of(connection).postpone(
            ids=[*OutboxEvent.objects.values_list("pk", flat=True)],
            newest=now(),
            pauses=frozenset([TYPE]),
        )
        return count

    both = [in_thread(postpone), in_thread(postpone)]
    assert sum(each.result(30) for each in both) == 20


# -- counting what is paused -----------------------------------------------------------------------


def test_paused_are_those_that_wait_for_a_resume() -> None:
    of_type = insert(2, event_type=SENT)
    of_stream = keyed("k", event_type=OTHER)
    insert(event_type=OTHER)
    insert(event_type=SENT, status=Status.DEAD, due=None)
    insert(event_type=SENT, due=30, locked_by="somebody", locked_at=now())
    assert not OutboxEvent.objects.paused().exists()
    pause(*TYPE)
    pause("stream", "k")
    for _ in range(2):  # before a worker postpones them, and after
        found = OutboxEvent.objects.paused().values_list("pk", flat=True)
        assert {*found} == {*of_type, *of_stream}
        outbox.drain()
