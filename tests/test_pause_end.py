"""The end time of a pause: who ends it, when, and what becomes due."""

from __future__ import annotations

import logging
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

import django_outbox as outbox
from django_outbox import signals
from django_outbox.models import OutboxEvent, OutboxPause
from django_outbox.models.pause_queryset import Resumed
from django_outbox.sql import dialect_of
from django_outbox.worker.pauses import end_pauses
from tests.surroundings import heard
from tests.table import insert, listening, now, row, statuses, write
from tests.test_pause import OTHER, SENT, TYPE, is_parked, noting
from tests.test_queue_status import breaker
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

QUEUES = {"QUEUES": {"hooks": {}}}


@pytest.fixture(autouse=True)
def two_queues(settings: Any) -> None:
    settings.OUTBOX = QUEUES


def pause(kind: str, name: str, seconds: float = 3600, **more: Any) -> None:
    assert OutboxPause.objects.pause(kind, name, until=now() + timedelta(seconds=seconds), **more)


def let_end(**pauses: str) -> None:
    """Move the end of these pauses into the past."""
    OutboxPause.objects.filter(**pauses).update(until=now() - timedelta(seconds=1))


# -- a drain ---------------------------------------------------------------------------------------


def test_a_drain_ends_a_pause_as_a_resume_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_outbox")
    with noting(SENT) as got, heard(signals.delivery_resumed) as told:
        ids = insert(3, event_type=SENT, first_due_at=now() - timedelta(days=3))
        pause(*TYPE)
        assert outbox.drain() == 0
        assert all(is_parked(row(each)) for each in ids)
        let_end()
        assert outbox.drain() == 3
    assert got == ids
    assert not OutboxPause.objects.exists()
    facts = {"kind": "event_type", "name": SENT, "count": 3}
    assert told == [{"sender": "default", **facts}]
    assert f"pause ended kind=event_type name={SENT} events=3 streams=0" in caplog.messages
    first = row(ids[0]).first_due_at
    assert first is not None
    assert (now() - first).total_seconds() < 60


def test_the_pause_of_a_breaker_that_is_over_is_no_end() -> None:
    """A probe decides whether it closes."""
    made = breaker(until=now() - timedelta(seconds=60))
    OutboxPause.objects.pause("event_type", OTHER)
    end_pauses("default")
    outbox.drain()
    assert OutboxPause.objects.get(kind="breaker") == made


def test_after_an_error_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pause("event_type", OTHER)
    pause(*TYPE)
    let_end()

    def fail(*arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(type(dialect_of(connection)), "unpark", fail)
        with pytest.raises(ZeroDivisionError):
            end_pauses("default")
    end_pauses("default")
    assert not OutboxPause.objects.exists()


# -- workers ---------------------------------------------------------------------------------------

PATIENT = {"POLL_INTERVAL": 60, "PROBE_INTERVAL": 60, "WORKERS": 2, "DOORBELL": None}


@pytest.mark.parametrize("kind", ["event_type", "stream", "queue"])
def test_an_idle_worker_ends_a_pause_in_time(settings: Any, kind: str) -> None:
    """It knows when, so it does not wait for its next poll, which is a minute away."""
    settings.OUTBOX = PATIENT | QUEUES
    name = {"event_type": SENT, "stream": "k", "queue": "hooks"}[kind]
    queue = "hooks" if kind == "queue" else "default"
    got: Counter[str] = Counter()
    with listening(lambda event: got.update([event.event_id]), SENT, queue=queue):
        pause(kind, name, seconds=5)  # later than a new worker's first polls
        end = OutboxPause.objects.get().until
        ids = write(3, SENT, key="k") if kind == "stream" else write(3, SENT)
        with outbox.Worker():  # its next poll is later than this waits
            wait_until(lambda: statuses() == {"DONE": 3}, what="3 DONE")
    assert got == Counter(ids)
    done = OutboxEvent.objects.order_by("done_at").values_list("done_at", flat=True)[0]
    assert done is not None
    assert end is not None
    assert done >= end
    assert not OutboxPause.objects.exists()


def test_what_another_pause_holds_stays_paused() -> None:
    with noting(SENT, OTHER) as got:
        (ended,) = insert(event_type=SENT)
        (held,) = insert(event_type=OTHER)
        pause(*TYPE)
        OutboxPause.objects.pause("event_type", OTHER)
        outbox.drain()
        let_end(name=SENT)
        outbox.drain()
    assert got == [ended]
    assert is_parked(row(held))
    assert OutboxPause.objects.get().name == OTHER


def test_a_pause_set_again_meanwhile_is_not_ended() -> None:
    pause(*TYPE)
    let_end()
    assert OutboxPause.objects.resume() == Resumed(pauses=1, events=0, streams=0)
    OutboxPause.objects.pause(*TYPE)
    end_pauses("default")
    assert OutboxPause.objects.get().until is None
