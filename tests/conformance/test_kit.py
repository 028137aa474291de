"""The test kit's clock on each database: SQL moves every time in the tables."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

import django_outbox as outbox
from django_outbox import inbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxInbox, OutboxStream
from django_outbox.testing import drain, pass_time, running_worker, wait_until
from tests.table import claim, insert, listening, now, row, statuses
from tests.test_kit import both, no_queue_left, outside_alone, place, ship, shipped

__all__ = ["no_queue_left"]  # fixtures


@both
def test_time_moves_what_is_delayed(outside: bool) -> None:
    with listening(ship):
        event_id = place(deliver_after=timedelta(hours=24))
        before = row(event_id)
        pass_time(timedelta(hours=23))
        assert drain() == 0
        pass_time(3601)
        assert drain() == 1
    after = row(event_id)
    day = timedelta(hours=23, seconds=3601)
    assert before.deliver_at and before.created_at and before.first_due_at
    assert after.deliver_at == before.deliver_at - day
    assert after.created_at == before.created_at - day
    assert after.first_due_at == before.first_due_at - day
    assert after.occurred_at == before.occurred_at


@both
def test_time_moves_retries_and_each_listeners_own(outside: bool) -> None:
    calls: list[str] = []

    def slow(event: outbox.Event) -> outbox.Defer | None:
        calls.append("slow")
        return outbox.Defer(3000) if calls.count("slow") == 1 else None

    def quick(event: outbox.Event) -> outbox.Defer | None:
        calls.append("quick")
        return outbox.Defer(600) if calls.count("quick") == 1 else None

    with listening(slow, name="slow"), listening(quick, name="quick"):
        place()
        assert drain() == 1
        pass_time(599)
        assert drain() == 0
        pass_time(2)
        assert drain() == 1
        assert sorted(calls) == ["quick", "quick", "slow"]
        pass_time(2400)
        assert drain() == 1
    assert sorted(calls) == ["quick", "quick", "slow", "slow"]
    assert statuses() == {"DONE": 1}


@both
def test_time_moves_ages(outside: bool) -> None:
    """``pass_time`` also applies to UNROUTABLE_GRACE, the retentions and the inbox."""
    event_id = place()
    assert drain() == 1
    assert row(event_id).status == Status.NEW
    with transaction.atomic(), inbox.once("bank", 1):
        pass
    pass_time(601)
    with pytest.raises(AssertionError, match="No listener for event type"):
        drain()
    insert(status=Status.DONE, due=None, done_at=now())
    pass_time(timedelta(days=8))
    assert OutboxEvent.objects.purge() == 1
    assert OutboxInbox.objects.purge() == 1


@both
def test_time_moves_streams_and_leaves_leases_alone(outside: bool) -> None:
    clock = now()
    free = OutboxStream.objects.create(key="free", seq=1, due_at=clock)
    OutboxStream.objects.create(key="held", seq=1, due_at=clock, locked_by="another")
    (held,) = insert()
    claim("another", lease=30)
    lease = row(held).available_at
    pass_time(60)
    free.refresh_from_db()
    assert free.due_at == clock - timedelta(seconds=60)
    assert OutboxStream.objects.get(key="held").due_at == clock
    assert row(held).available_at == lease
    assert drain() == 0


@outside_alone
def test_time_wakes_a_running_worker(settings: Any) -> None:
    slow = {"POLL_INTERVAL": 600, "PROBE_INTERVAL": 600}
    settings.OUTBOX = {**slow, "LEASE": 0.5, "DRAIN_TIMEOUT": 0.4}  # keeps the probation short
    with listening(ship), running_worker() as worker:
        place(deliver_after=3600)
        intake, wakeup = worker._claimer._intakes["default"], worker._wakeup
        wait_until(
            lambda: (
                not wakeup.poll_wanted
                and min(intake.poll_at, wakeup.next_poll()) > time.monotonic() + 400
            ),
            what="a claimer at rest",
        )
        pass_time(3601)
        wait_until(shipped, what="the shipment")
