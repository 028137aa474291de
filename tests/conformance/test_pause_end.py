"""Pauses that end by themselves, on each database: by its clock, in batches, once."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

import pytest
from django.db import connection, transaction

import django_outbox as outbox
from django_outbox import signals
from django_outbox.clocks import monotonic
from django_outbox.models import OutboxEvent, OutboxPause, pause_queryset
from django_outbox.models.pause_queryset import Resumed
from django_outbox.worker.pauses import PauseEnds
from tests.table import in_thread, insert, keyed, listening, now, write
from tests.test_pause import OTHER, SENT, TYPE, heard, is_far, noting
from tests.test_pause_end import known, let_end, pause, two_queues
from tests.test_queue_status import breaker

pytestmark = pytest.mark.django_db(transaction=True)


__all__ = ["two_queues"]  # fixtures


def test_only_pauses_whose_time_has_come_have_ended() -> None:
    pause("event_type", "later")
    OutboxPause.objects.pause("event_type", "open")
    breaker(until=now() - timedelta(seconds=60))
    pause(*TYPE)
    assert not OutboxPause.objects.ended().exists()
    let_end(name=SENT)
    assert [each.name for each in OutboxPause.objects.ended()] == [SENT]


@pytest.mark.parametrize("kind", ["event_type", "listener", "stream", "queue"])
def test_every_kind_of_pause_ends(kind: str) -> None:
    names = {"event_type": SENT, "listener": f"{SENT} mail", "stream": "k", "queue": "hooks"}
    got: list[str] = []
    queue = "hooks" if kind == "queue" else "default"
    with listening(lambda event: got.append(event.event_id), SENT, name="mail", queue=queue):
        ids = write(2, SENT, key="k") if kind == "stream" else write(2, SENT)
        pause(kind, names[kind])
        outbox.drain()
        assert got == []
        let_end()
        outbox.drain()
    assert got == ids
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
    assert is_far(held)
    assert OutboxPause.objects.get().name == OTHER


def test_a_drain_in_a_transaction_ends_pauses_in_it() -> None:
    with noting(SENT) as got:
        ids = insert(2, event_type=SENT)
        pause(*TYPE)
        let_end()
        with transaction.atomic():
            assert outbox.drain() == 2
            transaction.set_rollback(True)
    assert got == ids
    assert OutboxPause.objects.exists()


def test_each_step_makes_one_batch_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause_queryset, "EVENTS_PER_STATEMENT", 10)
    insert(25, event_type=SENT)
    pause(*TYPE)
    outbox.drain()
    let_end()
    ends = PauseEnds("default", known())
    counts = []
    while ends.step(connection, monotonic()):
        assert not OutboxPause.objects.exists()  # from the first step on
        counts.append(OutboxEvent.objects.due().count())
    assert counts[:4] == [0, 10, 20, 25]
    assert {*counts[4:]} == {25}
    assert ends.next_step() > monotonic() + 3600


def test_several_that_notice_at_once_end_it_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_outbox")
    insert(40, event_type=SENT)
    keyed("k", event_type=SENT)
    pause(*TYPE)
    outbox.drain()
    let_end()
    start = threading.Barrier(4)

    def end() -> None:
        ends = PauseEnds("default", known())
        start.wait(20)
        ends.finish(connection, monotonic())

    with heard(signals.delivery_resumed) as told:
        for each in [in_thread(end) for _ in range(4)]:
            each.result(30)
    assert [each["count"] for each in told] == [41]
    assert [each for each in caplog.messages if each.startswith("pause ended")] == [
        f"pause ended kind=event_type name={SENT} events=40 streams=1"
    ]
    assert OutboxEvent.objects.due().count() == 40


def test_a_pause_set_again_meanwhile_is_not_ended() -> None:
    pause(*TYPE)
    let_end()
    ends = PauseEnds("default", known())
    assert OutboxPause.objects.resume() == Resumed(pauses=1, events=0, streams=0)
    OutboxPause.objects.pause(*TYPE)
    ends.finish(connection, monotonic())
    assert OutboxPause.objects.get().until is None
