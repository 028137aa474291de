"""Batch listeners on each database: atomic ones, and rows that others change meanwhile."""

from __future__ import annotations

import threading

import pytest
from django.db import connection

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.table import listening, write
from tests.test_batches import (
    AT_ONCE,
    FAR,
    Bulk,
    all_are,
    deliver,
    everywhere,
    note_all,
    outside,
    statuses,
    working,
)
from tests.testapp.models import Effect
from tests.waiting import MovedClock, wait_until

# -- keys ------------------------------------------------------------------------------------------


@outside
@everywhere
def test_an_atomic_batch_that_raises_leaves_nothing(run: str) -> None:
    ids = write(8)

    def work(events: list[outbox.Event]) -> None:
        note_all(events)
        if any(each.event_id == ids[3] for each in events):
            raise LookupError("no")

    with listening(Bulk(work), batch=8, atomic=True, retry=FAR):
        deliver(run, lambda: Status.NEW not in statuses().values())
    assert sorted(Effect.objects.values_list("event_id", flat=True)) == sorted({*ids} - {ids[3]})


@outside
@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="one writer at a time")
def test_an_event_that_ended_elsewhere_is_not_called_again() -> None:
    """A keyed event may have ended while its stream was another worker's for a while."""
    ids = write(4)

    def finish() -> None:
        OutboxEvent.objects.filter(pk=ids[1]).update(status=Status.DONE, available_at=None)
        connection.close()

    def work(events: list[outbox.Event]) -> None:
        if len(bulk.batches) == 1:
            thread = threading.Thread(target=finish)
            thread.start()
            thread.join()

    bulk = Bulk(work)
    with listening(bulk, batch=4, within=1.0, atomic=True), working():
        wait_until(all_are(Status.DONE), within=4)  # less than a delay after an error
    assert bulk.sizes == [4, 3]


@outside
def test_an_atomic_batch_whose_thread_is_written_off_commits_nothing(clock: MovedClock) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("the hanging thread locks the file")
    ids = write(4)
    over = threading.Event()

    def work(events: list[outbox.Event]) -> None:
        if len(bulk.batches) == 1:
            clock.advance(6)
            over.wait(60)
        note_all(events)

    bulk = Bulk(work)
    with listening(bulk, batch=4, atomic=True, timeout=5, retry=AT_ONCE), working():
        wait_until(all_are(Status.DONE))
        over.set()
    assert sorted(Effect.objects.values_list("event_id", flat=True)) == sorted(ids)
