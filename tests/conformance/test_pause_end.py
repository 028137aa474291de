"""Pauses that end by themselves, on each database: by its clock, in batches, once."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

import pytest

import django_outbox as outbox
from django_outbox import signals
from django_outbox.models import OutboxEvent, OutboxPause, pause_queryset
from django_outbox.worker.pauses import end_pauses
from tests.surroundings import heard
from tests.table import in_thread, insert, keyed, now
from tests.test_pause import SENT, TYPE
from tests.test_pause_end import let_end, pause, two_queues
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


def test_each_batch_is_moved_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause_queryset, "AT_ONCE", 10)
    insert(25, event_type=SENT)
    pause(*TYPE)
    outbox.drain()
    let_end()
    counts = []
    for _ in OutboxPause.objects.ended().resume_batches():
        assert not OutboxPause.objects.exists()  # from the first step on
        counts.append(OutboxEvent.objects.due().count())
    assert counts == [0, 10, 20, 25]


def test_several_that_notice_at_once_end_it_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_outbox")
    insert(40, event_type=SENT)
    keyed("k", event_type=SENT)
    pause(*TYPE)
    outbox.drain()
    let_end()
    start = threading.Barrier(4)

    def end() -> None:
        start.wait(20)
        end_pauses("default")

    with heard(signals.delivery_resumed) as told:
        for each in [in_thread(end) for _ in range(4)]:
            each.result(30)
    assert [each["count"] for each in told] == [41]
    assert [each for each in caplog.messages if each.startswith("pause ended")] == [
        f"pause ended kind=event_type name={SENT} events=40 streams=1"
    ]
    assert OutboxEvent.objects.due().count() == 40
