"""Queues on each database: rows that move between them, and those of version 0.1."""

from __future__ import annotations

from collections import Counter

import pytest
from django.db import transaction

import django_outbox as outbox
from django_outbox.models import OutboxEvent, OutboxPause
from tests.table import insert, listening, now, statuses, stream, write
from tests.test_queues import Seen, both, queues, two_queues
from tests.waiting import Gate, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


__all__ = ["two_queues"]  # fixtures


def test_an_atomic_listener_commits_its_progress_and_the_event_moves_on() -> None:
    hook = Seen()

    def buy(event: outbox.Event) -> None:
        OutboxPause.objects.create(kind="stream", name=event.event_id, paused_at=now())

    with (
        listening(buy, name="local", atomic=True),
        listening(hook, name="hook", queue="hooks"),
        outbox.Worker(),
    ):
        ids = write(20)
        wait_until(lambda: statuses() == {"DONE": 20})
    assert OutboxPause.objects.count() == 20
    assert Counter(hook.ids) == Counter(ids)


def test_dedicated_workers_pass_a_shared_event_on_through_the_table() -> None:
    local, hook = Seen(), Seen()
    with both(local, hook):
        with outbox.Worker(queues=["default"]):
            ids = write(10)
            wait_until(lambda: len(local.ids) == 10)
            wait_until(lambda: queues() == {"hooks": 10})
            assert hook.ids == []
        with outbox.Worker(queues=["hooks"]):
            wait_until(lambda: statuses() == {"DONE": 10})
    assert Counter(local.ids) == Counter(hook.ids) == Counter(ids)


def test_dedicated_workers_pass_a_stream_on() -> None:
    local, hook = Seen(), Seen()
    with listening(local), listening(hook, "hook.sent", queue="hooks"):
        with transaction.atomic():
            outbox.write("order.placed", key="a")
            outbox.write("hook.sent", key="a")
        with outbox.Worker(queues=["default"]):
            wait_until(lambda: stream("a").queue == "hooks" and stream("a").locked_by is None)
        assert (len(local.ids), hook.ids) == (1, [])
        with outbox.Worker(queues=["hooks"]):
            wait_until(lambda: statuses() == {"DONE": 2})


def test_a_backlog_in_a_wrong_queue_is_moved_and_does_not_fill_the_worker() -> None:
    gate, seen = Gate(), Seen()
    with listening(gate, "hook.sent", queue="hooks"), listening(seen), outbox.Worker() as worker:
        insert(2000, event_type="hook.sent")
        try:
            wait_until(lambda: queues()["hooks"] > 1900, what="the backlog moved")
            assert worker.depths()["held"] < 100
            write(5)
            wait_until(lambda: len(seen.ids) == 5)
        finally:
            OutboxEvent.objects.filter(event_type="hook.sent", locked_by=None).delete()
            gate.open.set()
    assert OutboxEvent.objects.filter(rescues__gt=0).count() == 0
