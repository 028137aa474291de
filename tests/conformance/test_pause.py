"""Pauses on each database: statements that park rows and bring them home, and their locks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

import django_outbox as outbox
from django_outbox import signals
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream
from django_outbox.models.pause_queryset import PARKED, Resumed, bring_home
from django_outbox.queue_settings import parked_queue
from django_outbox.sql import dialect_of
from django_outbox.worker.pauses import KnownPauses
from tests.plans import analyze, explain, statements
from tests.surroundings import heard
from tests.table import (
    claim,
    elsewhere,
    ids_of,
    in_thread,
    insert,
    keyed,
    names,
    now,
    releases,
    row,
    statuses,
    stream,
    stream_claim,
    write,
)
from tests.test_pause import OTHER, SENT, TYPE, is_parked, noting, pause, resume

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
        assert is_parked(found)
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


def known() -> KnownPauses:
    found = KnownPauses()
    found.read(connection)
    return found


def parked() -> set[str]:
    return {*OutboxEvent.objects.filter(PARKED).values_list("pk", flat=True)}


def test_what_is_paused_makes_way_in_bounded_batches() -> None:
    """A claim behind 20,000 paused rows reads none of them."""
    paused = insert(20_000, due=-60, event_type=SENT)
    (free,) = insert(due=-30, event_type=OTHER)
    pause(*TYPE)
    looking = known()
    for rounds in range(40):
        assert len(parked()) == 500 * rounds
        looking.park(connection, {}, ["default"])
    assert parked() == {*paused}
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
    looking = known()
    sent = statements(lambda: looking.park(connection, {}, ["default"]))
    wanted = "outbox_event" if connection.vendor == "mysql" else "ORDER BY queue, available_at"
    about_events = [each for each in sent if wanted in each[0]]
    assert (
        about_events
    )  # on MySQL all statements, which lock what they read; others may read 500 ids in any way
    for sql, params in about_events:
        steps = explain(sql, params)
        assert not [each for each in steps if scans(each)], (sql, steps)


# -- a resume while a worker parks -----------------------------------------------------------------

servers = pytest.mark.skipif(connection.vendor == "sqlite", reason="has one writer at a time")


def test_nothing_is_parked_for_a_pause_that_is_over() -> None:
    """A worker that does not know of the resume yet checks the pause in its own transaction."""
    (event_id,) = insert(event_type=SENT)
    pause(*TYPE)
    looking = known()
    resume(*TYPE)
    looking.park(connection, {}, ["default"])
    assert (looking.pauses, parked()) == ({}, set())
    assert ids_of(claim()) == [event_id]


@servers
def test_a_resume_waits_for_who_is_just_parking_and_finds_what_they_did() -> None:
    ids = insert(3, event_type=SENT)
    pause(*TYPE)
    with elsewhere(lambda: known().park(connection, {}, ["default"])):
        resumed = in_thread(lambda: resume(*TYPE))
        assert statuses() == {"NEW": 3}
        assert not resumed.done()
    assert resumed.result(30) == Resumed(pauses=1, events=3, streams=0)
    assert {*OutboxEvent.objects.due().values_list("pk", flat=True)} == {*ids}


@servers
def test_who_parks_waits_for_a_resume_and_then_parks_nothing() -> None:
    ids = insert(3, event_type=SENT)
    pause(*TYPE)
    looking = known()
    with elsewhere(lambda: resume(*TYPE)):
        parking = in_thread(lambda: looking.park(connection, {}, ["default"]))
        assert statuses() == {"NEW": 3}
        assert not parking.done()
    parking.result(30)
    assert parked() == set()
    assert {*OutboxEvent.objects.due().values_list("pk", flat=True)} == {*ids}


def release_parked(key: str, queue: str) -> set[str]:
    given = releases((stream(key).pk, stream(key).seq, 0.0, queue))
    found: set[str] = dialect_of(connection).release_streams(me="me", streams=given)
    return found


@pytest.fixture
def leased() -> str:
    """Pause the type of a leased stream's head; return the queue to park it in."""
    keyed("k", event_type=SENT)
    pause(*TYPE)
    assert len(dialect_of(connection).claim(stream_claim()).rows) == 1
    return parked_queue(OutboxPause.objects.get().pk)


@servers
def test_a_resume_waits_for_a_stream_that_is_just_parked(leased: str) -> None:
    with elsewhere(lambda: release_parked("k", leased)):
        resumed = in_thread(lambda: resume(*TYPE))
        assert statuses() == {"NEW": 1}
        assert not resumed.done()
    assert resumed.result(30) == Resumed(pauses=1, events=0, streams=1)
    assert stream("k").queue == "default"


@servers
def test_a_stream_that_waits_for_a_resume_is_released_into_its_queue(leased: str) -> None:
    with elsewhere(lambda: resume(*TYPE)):
        released = in_thread(lambda: release_parked("k", leased))
        assert statuses() == {"NEW": 1}
        assert not released.done()
    assert released.result(30) == {*names("k")}
    assert (stream("k").queue, stream("k").locked_by) == ("default", None)


def test_a_stream_is_parked_only_as_it_was_read(leased: str) -> None:
    """An event before the paused one may be pending by now, by a replay."""
    read = stream("k").seq
    dialect_of(connection).wake_streams(names("k"))
    given = releases((stream("k").pk, read, 0.0, leased))
    assert dialect_of(connection).release_streams(me="me", streams=given) == set()


def test_an_event_that_is_leased_by_now_is_not_parked() -> None:
    first, second = insert(2, event_type=SENT)
    pause(*TYPE)
    queue = OutboxPause.objects.get().pk
    OutboxEvent.objects.filter(pk=second).update(locked_by="other", locked_at=now())
    assert dialect_of(connection).park({first: queue, second: queue}) == set()
    assert parked() == {first}


def test_two_who_park_at_once_share_and_do_not_wait_for_each_other() -> None:
    insert(20, event_type=SENT)
    pause(*TYPE)
    both = [in_thread(lambda: known().park(connection, {}, ["default"])) for _ in range(2)]
    for each in both:
        each.result(30)
    known().park(connection, {}, ["default"])  # as the second of them, which may find nothing
    assert len(parked()) == 20


def test_what_comes_home_is_in_the_queue_of_its_listener(settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"mail": {}}}
    with noting(SENT, queue="mail"):
        write(2, SENT)
        write(1, SENT, key="k")
        (unrouted,) = insert(event_type=SENT, listener=None, due=-1)
        pause(*TYPE)
        outbox.drain()
        due = {each.pk: each.available_at for each in OutboxEvent.objects.filter(PARKED)}
        assert len(due) == 3
        assert resume(*TYPE) == Resumed(pauses=1, events=3, streams=1)
    assert stream("k").queue == "mail"
    rows = OutboxEvent.objects.filter(key=None)
    assert {each.pk: each.available_at for each in rows} == due
    assert {each.queue for each in rows.exclude(pk=unrouted)} == {"mail"}


def test_what_an_interrupted_resume_has_left_is_found_and_brought_home() -> None:
    ids = insert(3, event_type=SENT)
    keyed("k", event_type=SENT)
    pause(*TYPE)
    pause("event_type", OTHER)
    (held,) = insert(event_type=OTHER)
    outbox.drain()
    assert next(OutboxPause.objects.filter(name=SENT).resume_batches()).pauses == 1
    (stranded,) = dialect_of(connection).stranded()
    assert sum(each.events + each.streams for each in bring_home(connection, stranded)) == 4
    assert dialect_of(connection).stranded() == []
    assert {*OutboxEvent.objects.due().values_list("pk", flat=True)} == {*ids}
    assert stream("k").queue == "default"
    assert parked() == {held}


# -- counting what is paused -----------------------------------------------------------------------


def test_held_are_those_that_wait_for_a_pause_a_breaker_or_their_key(settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"hooks": {}}, "ON_DEAD": "block"}
    held = insert(2, event_type=SENT)
    held += keyed("k", event_type=OTHER)
    held += keyed("k", event_type=SENT)  # behind it
    insert(event_type=OTHER, due=600)
    insert(event_type=SENT, status=Status.DEAD, due=None, done_at=now())
    insert(event_type=SENT, due=30, locked_by="somebody", locked_at=now())
    pause(*TYPE)
    pause("stream", "k")
    outbox.drain()  # parks them
    held += insert(2, queue="hooks")
    insert(queue="hooks", due=60)
    OutboxPause.objects.create(kind="breaker", name="hooks", paused_at=now())
    keyed("retried", status=Status.RETRY, due=60)
    held += keyed("retried")
    keyed("blocked", status=Status.DEAD, done_at=now(), due=None)
    held += keyed("blocked", due=None)
    keyed("leased", 2)
    OutboxStream.objects.filter(key="leased").update(
        due_at=now() + timedelta(hours=1), locked_by="somebody"
    )
    free = insert(event_type=OTHER)
    keyed("free", 2)
    assert {*OutboxEvent.objects.held().values_list("pk", flat=True)} == {*held}
    assert [*OutboxEvent.objects.due().values_list("pk", flat=True)] == free
    assert [each.key for each in OutboxStream.objects.held()] == ["k"]
    assert [each.key for each in OutboxStream.objects.due()] == ["free"]
    settings.OUTBOX = {"QUEUES": {"hooks": {}}}
    assert {*OutboxEvent.objects.held().values_list("pk", flat=True)} == {*held[:-1]}
