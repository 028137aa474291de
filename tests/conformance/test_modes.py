"""Modes and workers' rows on each database: who is active, and what a purge waits for."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

import django_outbox as outbox
from django_outbox.models import OutboxEvent, OutboxLease
from django_outbox.worker.effects import perform
from django_outbox.worker.leases import ActiveLease
from django_outbox.worker.polling import Throttle
from tests.table import elsewhere, in_thread, listening, write
from tests.test_modes import PURGING, expired
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def test_w3_it_stops_claiming_by_itself_before_others_may_take_over() -> None:
    """It goes by its own deadline, because a suspended machine could not ask the database."""
    mine = ActiveLease(me="host-1-a", lease=2.0, poll=5)
    other = ActiveLease(me="host-2-b", lease=2.0, poll=5)

    def is_active(each: ActiveLease) -> bool:
        perform(connection, each.step())
        return each.leader.holds

    assert (is_active(mine), is_active(other)) == (True, False)
    wait_until(lambda: not mine.leader.holds, what="an end by its own deadline")
    assert not is_active(other)  # the lease in the table lasts a fifth longer
    wait_until(lambda: is_active(other), what="a successor")
    assert not is_active(mine)


def test_28_a_purge_waits_for_nobody_and_holds_nobody_up(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A business transaction holds the lock of one row while another one writes."""
    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time: the file is locked, not a row")
    monkeypatch.setattr(Throttle, "after", lambda self, started: None)  # no pause after a slow run
    settings.OUTBOX = {**PURGING, "LOCK_WAIT": 30}
    ids = expired(25)

    def lock() -> None:
        OutboxEvent.objects.select_for_update().get(pk=ids[3])
        outbox.write("order.ignored")

    with elsewhere(lock), outbox.Worker():
        wait_until(
            lambda: OutboxEvent.objects.filter(pk__in=ids).count() == 1,
            within=10,
            what="a purge of all others",
        )
        in_thread(lambda: write(event_type="order.ignored")).result(5)
        assert OutboxEvent.objects.filter(pk=ids[3]).exists()
    OutboxLease.objects.update(state="")  # as a day later: full scan finds the locked row
    with outbox.Worker():
        wait_until(lambda: not OutboxEvent.objects.filter(pk__in=ids).exists(), what="the last")


def test_retention_zero_waits_for_no_open_transaction(settings: Any) -> None:
    """Some optimizers scan a small table, including rows that other transactions have locked."""
    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time: the file is locked, not a row")
    settings.OUTBOX = {"RETENTION_DONE": 0, "LOCK_WAIT": 30}
    with (
        listening(lambda event: None),
        elsewhere(lambda: outbox.write("order.ignored")),
        outbox.Worker(),
    ):
        in_thread(lambda: write(5)).result(15)
        wait_until(lambda: not OutboxEvent.objects.exists(), within=10, what="an empty table")


def test_w2_several_may_purge_at_once(settings: Any) -> None:
    settings.OUTBOX = {**PURGING, "PURGE_BATCH_SIZE": 20}
    ids = expired(400)
    runs = [in_thread(lambda: sum(OutboxEvent.objects.purge_batches())) for _ in range(3)]
    counts = [each.result(60) for each in runs]
    assert sum(counts) == len(ids)
    assert not OutboxEvent.objects.exists()
