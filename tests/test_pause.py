"""Pauses: what is paused is neither delivered nor lost nor counted; the rest goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.test import override_settings

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream
from django_outbox.models.pause_queryset import Resumed
from django_outbox.queue_settings import parked_by
from django_outbox.worker.effects import perform
from django_outbox.worker.pauses import KnownPauses
from tests.plans import sent
from tests.table import insert, keyed, listening, now, row, stream, write

pytestmark = pytest.mark.django_db(transaction=True)

SENT, OTHER = "parcel.sent", "parcel.other"
TYPE = ("event_type", SENT)


def pause(kind: str, name: str, **more: str) -> bool:
    return OutboxPause.objects.pause(kind, name, **more)


def resume(kind: str, name: str) -> Resumed:
    return OutboxPause.objects.filter(kind=kind, name=name).resume()


def is_parked(each: OutboxEvent | OutboxStream) -> bool:
    """Return whether a row or stream waits in the queue of a pause, and nobody has leased it."""
    pause = parked_by(each.queue)
    return each.locked_by is None and OutboxPause.objects.filter(pk=pause).exists()


@contextmanager
def noting(*event_types: str, name: str = "", **options: Any) -> Iterator[list[str]]:
    """Register a listener for these types; yield the ids that it got."""
    got: list[str] = []

    def note(event: outbox.Event) -> None:
        got.append(event.event_id)

    with ExitStack() as stack:
        for each in event_types:
            stack.enter_context(listening(note, each, name=name, **options))
        yield got


# -- pause and resume ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("worker", "x", "expected one of event_type, listener, stream"),
        ("event_type", "", "expected 1 to 255 characters"),
        ("event_type", "a\0b", "expected 1 to 255 characters"),
        ("stream", "k" * 256, "expected 1 to 255 characters"),
    ],
    ids=["kind", "empty", "nul", "long"],
)
def test_what_nothing_can_be_called_is_refused(kind: str, name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pause(kind, name)
    assert not OutboxPause.objects.exists()


# -- an event type ---------------------------------------------------------------------------------


def test_a_drain_at_a_later_time_ends_and_delivers_none_of_it() -> None:
    with noting(SENT, OTHER) as got:
        insert(3, due=60, event_type=SENT)
        (free,) = insert(due=120, event_type=OTHER)
        keyed("k", event_type=SENT)
        pause(*TYPE)
        assert outbox.drain(at=now() + timedelta(days=1)) == 1
    assert got == [free]


# -- streams ---------------------------------------------------------------------------------------


def test_a_keyed_event_of_a_paused_type_holds_its_stream() -> None:
    with noting(SENT, OTHER) as got:
        first = keyed("k", 2, event_type=OTHER)
        (held,) = keyed("k", event_type=SENT)
        behind = keyed("k", 2, event_type=OTHER)
        (other,) = keyed("another", event_type=OTHER)
        pause(*TYPE)
        outbox.drain()
        assert sorted(got) == sorted([*first, other])
        assert is_parked(stream("k"))
        assert (row(held).attempts, row(held).status) == (0, Status.NEW)
        assert resume(*TYPE) == Resumed(pauses=1, events=0, streams=1)
        outbox.drain()
    assert [each for each in got if each != other] == [*first, held, *behind]


@pytest.mark.parametrize("route", ["writer", "worker"])
def test_a_paused_key_waits_in_all_of_its_lanes(route: str) -> None:
    with noting(SENT, name="mail") as mail, noting(SENT) as other:
        with override_settings(OUTBOX={"ROUTE": route}):
            ids = write(2, SENT, key="k")
        pause("stream", "k")
        assert (outbox.drain(), mail, other) == (0, [], [])
        assert resume("stream", "k").events == 0
        assert outbox.drain() == 4
    assert mail == other == ids


# -- a listener ------------------------------------------------------------------------------------


@pytest.mark.parametrize("routed", [True, False], ids=["by the writer", "by the worker"])
@pytest.mark.parametrize("key", [None, "k"])
def test_of_several_listeners_the_others_run_and_the_paused_one_waits(
    key: str | None, routed: bool
) -> None:
    held = Q(listener=f"{SENT} mail")
    with noting(SENT, name="mail") as mail, noting(SENT, name="stock") as stock:
        if not routed:
            with override_settings(OUTBOX={"ROUTE": "worker"}):
                (event_id,) = write(event_type=SENT, key=key)
        else:
            (event_id,) = write(event_type=SENT, key=key)
        pause("listener", f"{SENT} mail")
        assert outbox.drain() == 1
        assert (mail, stock) == ([], [event_id])
        found = OutboxEvent.objects.get(held)
        assert (found.status, found.attempts, found.locked_by) == (Status.NEW, 0, None)
        if key is None:
            assert is_parked(found)
        else:
            assert is_parked(stream(key, "mail"))
        resumed = resume("listener", f"{SENT} mail")
        assert (resumed.events, resumed.streams) == ((1, 0) if key is None else (0, 1))
        assert outbox.drain() == 1
    assert (mail, stock) == ([event_id], [event_id])
    assert {each.status for each in OutboxEvent.objects.of_event(event_id)} == {Status.DONE}


@pytest.mark.parametrize("title", [f"{SENT} mail", f"{SENT} letters"])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_pause_of_a_renamed_listener_holds_its_rows_of_before_and_after(
    key: str | None, title: str
) -> None:
    with noting(SENT, name="letters"):
        ids = write(1, SENT, key=key)
    with noting(SENT, name="mail", formerly=[f"{SENT} letters"]) as mail:
        ids += write(1, SENT, key=key)
        pause("listener", title)
        assert outbox.drain() == 0
        resumed = resume("listener", title)
        assert (resumed.events, resumed.streams) == ((2, 0) if key is None else (0, 2))
        assert outbox.drain() == 2
    assert sorted(mail) == ids


# -- a claim costs the same ------------------------------------------------------------------------


def test_without_a_pause_nothing_but_its_table_is_asked() -> None:
    looking = KnownPauses()
    asked = sent(lambda: perform(connection, looking.refresh()))
    assert len(asked) == 1
    assert "outbox_pause" in asked[0]
    assert sent(lambda: perform(connection, looking.refresh())) == []  # just read


# -- a resume while a worker parks -------------------------------------------------------------


def test_a_stream_is_not_parked_for_a_pause_that_is_over() -> None:
    with noting(SENT) as got:
        keyed("k", event_type=SENT)
        pause(*TYPE)
        stale = KnownPauses()
        stale.read(connection)
        resume(*TYPE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("django_outbox.worker.drain.KnownPauses", lambda: stale)
            outbox.drain()
    assert len(got) == 1


def test_resumed_events_come_in_the_order_of_their_writes() -> None:
    with noting(SENT) as got:
        ids = insert(7, event_type=SENT)
        pause(*TYPE)
        outbox.drain()
        resume(*TYPE)
        outbox.drain()
    assert got == ids


def test_a_drain_inside_a_transaction_goes_on_behind_what_is_paused() -> None:
    with noting(SENT, OTHER) as got:
        insert(3, event_type=SENT)
        keyed("paused", event_type=SENT)
        (free,) = insert(event_type=OTHER)
        (other,) = keyed("other", event_type=OTHER)
        pause(*TYPE)
        with transaction.atomic():
            assert outbox.drain() == 2
    assert sorted(got) == sorted([free, other])


def test_a_paused_stream_keeps_its_order_and_its_writers_go_on() -> None:
    with noting(SENT) as got:
        ids = keyed("k", 2, event_type=SENT)
        (free,) = keyed("free", event_type=SENT)
        pause("stream", "k")
        outbox.drain()
        ids += write(2, SENT, key="k")
        outbox.drain()
        assert got == [free]
        assert resume("stream", "k") == Resumed(pauses=1, events=0, streams=1)
        outbox.drain()
    assert got == [free, *ids]


@pytest.mark.parametrize("key", [None, "k"])
def test_what_is_parked_for_a_pause_that_is_gone_is_delivered(key: str | None) -> None:
    with noting(SENT) as got:
        ids = write(2, SENT, key=key)
        pause(*TYPE)
        outbox.drain()
        OutboxPause.objects.all().delete()  # not ``resume``, so nothing is moved
        assert outbox.drain() == 2
    assert got == ids


def test_a_parked_stream_goes_on_when_its_paused_event_is_cancelled() -> None:
    with noting(SENT, OTHER) as got:
        (paused,) = keyed("k", event_type=SENT)
        (behind,) = keyed("k", event_type=OTHER)
        pause(*TYPE)
        outbox.drain()
        assert OutboxEvent.objects.filter(pk=paused).cancel() == 1
        outbox.drain()
    assert got == [behind]


def test_what_is_parked_can_be_cancelled_and_rescheduled() -> None:
    with noting(SENT) as got:
        cancelled, later = insert(2, event_type=SENT)
        pause(*TYPE)
        outbox.drain()
        assert outbox.cancel(event_id=cancelled) == 1
        assert outbox.reschedule(event_id=later, deliver_after=60) == 1
        assert is_parked(row(later))
        assert resume(*TYPE).events == 1
        assert outbox.drain() == 0
        assert outbox.drain(at=now() + timedelta(seconds=90)) == 1
    assert got == [later]
