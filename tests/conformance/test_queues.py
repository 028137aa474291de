"""Queues on each database: rows that move between them, and those of version 0.1."""

from __future__ import annotations

from collections import Counter

import pytest

import django_outbox as outbox
from django_outbox.models import OutboxPause
from tests.table import listening, now, statuses, write
from tests.test_queues import Seen, two_queues
from tests.waiting import wait_until

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
