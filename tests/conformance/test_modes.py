"""Modes and workers' rows on each database: who is active, and what a purge waits for."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F

import django_outbox as outbox
from django_outbox.models import OutboxEvent, OutboxLease, OutboxWorker
from django_outbox.worker import worker_registry
from django_outbox.worker.single_node import ActiveLease
from django_outbox.worker.throttle import Throttle
from tests.reach.children import Site, nothing_is_left, workers_show
from tests.table import PLACED, elsewhere, in_thread, listening, now, statuses, write
from tests.test_modes import DELIVERING, PURGING, delivered_by, expired, site
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


__all__ = ["site"]  # fixtures


@pytest.mark.parametrize("mode", DELIVERING)
def test_two_workers_deliver_each_event_once_in_every_mode(
    site: Site, settings: Any, mode: str
) -> None:
    settings.OUTBOX = {"MODE": mode}  # for the writer: in "ordered" its events have keys
    with ExitStack() as stack:
        children = [
            stack.enter_context(site.worker(MODE=mode, POLL_INTERVAL=0.3, PROBE_INTERVAL=0.1))
            for _ in range(2)
        ]
        workers_show(2)
        ids = [
            event_id
            for n in range(10)
            for event_id in write(4, "reach.noted", aggregate_type="Order", aggregate_id=f"{n}")
        ]
        assert delivered_by(ids) <= {each.pid for each in children}
        wait_until(lambda: statuses() == {"DONE": 40}, what="40 DONE")
        assert [each.stop() for each in children] == [0, 0]
    assert Effect.objects.count() == 40
    keys = OutboxEvent.objects.values_list("key", flat=True).distinct().count()
    assert keys == (10 if mode == "ordered" else 1)
    nothing_is_left()


def test_w3_it_stops_claiming_by_itself_before_others_may_take_over() -> None:
    """It goes by its own deadline, because a suspended machine could not ask the database."""
    mine = ActiveLease(alias="default", me="host-1-a", lease=2.0, poll=5)
    other = ActiveLease(alias="default", me="host-2-b", lease=2.0, poll=5)
    mine.step()
    other.step()
    assert (mine(), other()) == (True, False)
    wait_until(lambda: not mine(), what="an end by its own deadline")
    other.step()
    assert not other()  # the lease in the table lasts a fifth longer

    def taken_over() -> bool:
        other.step()
        return other()

    wait_until(taken_over, what="a successor")
    mine.step()
    assert not mine()


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


def test_w2_several_may_purge_at_once(settings: Any) -> None:
    settings.OUTBOX = {**PURGING, "PURGE_BATCH_SIZE": 20}
    ids = expired(400)
    runs = [in_thread(lambda: sum(OutboxEvent.objects.purge_batches())) for _ in range(3)]
    counts = [each.result(60) for each in runs]
    assert sum(counts) == len(ids)
    assert not OutboxEvent.objects.exists()


def test_retention_zero_keeps_what_has_a_unique_key(settings: Any) -> None:
    settings.OUTBOX = {"RETENTION_DONE": 0, "PURGE_INTERVAL": 0.05}
    with listening(lambda event: None), outbox.Worker():
        with transaction.atomic():
            unique = outbox.write(PLACED, unique_key="once")
            for _ in range(5):
                outbox.write(PLACED)
        wait_until(lambda: statuses() == {"DONE": 1}, what="one row left")
        (left,) = OutboxEvent.objects.all()
        with transaction.atomic(), pytest.raises(outbox.DuplicateEvent):
            outbox.write(PLACED, unique_key="once")
        OutboxEvent.objects.update(
            done_at=F("done_at") - timedelta(days=8)
        )  # past RETENTION_UNIQUE
        wait_until(lambda: not OutboxEvent.objects.exists(), what="a purge of the key")
    assert left.event_id == unique


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


def test_w17_a_workers_row_comes_goes_and_is_written_again(settings: Any) -> None:
    settings.OUTBOX = {"LEASE": 0.6, "DRAIN_TIMEOUT": 0.5}
    with listening(lambda event: None):
        worker = outbox.Worker()
        with worker:
            mine = wait_until(lambda: OutboxWorker.objects.filter(pk=worker.id).first())
            assert mine.started_at is not None
            wait_until(
                lambda: OutboxWorker.objects.get().heartbeat_at > mine.heartbeat_at,
                what="another heartbeat",
            )
            OutboxWorker.objects.all().delete()
            write(3)
            wait_until(lambda: statuses() == {"DONE": 3}, what="3 DONE")
            wait_until(lambda: OutboxWorker.objects.filter(pk=worker.id).exists(), what="its row")
    assert not OutboxWorker.objects.exists()


def test_w17_the_row_of_a_lost_worker_goes_after_a_day(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most ``MAX_LOST`` of them stay, those lost last; a silent one is not yet lost."""
    monkeypatch.setattr(worker_registry, "MAX_LOST", 2)
    settings.OUTBOX = {"LEASE": 3, "DRAIN_TIMEOUT": 1}
    clock = now()
    for name, seconds in (
        ("yesterday", 86_401),
        ("third", 3000),
        ("second", 2000),
        ("first", 31),
        ("silent", 20),
    ):
        seen = clock - timedelta(seconds=seconds)
        OutboxWorker.objects.create(
            id=name, hostname="h", pid=1, started_at=seen, heartbeat_at=seen
        )

    def left() -> set[str]:
        return {*OutboxWorker.objects.values_list("pk", flat=True)}

    with outbox.Worker() as worker:
        wait_until(lambda: left() == {"silent", "first", "second", worker.id}, what="two lost ones")
        OutboxWorker.objects.filter(pk="first").update(heartbeat_at=clock - timedelta(days=2))
        wait_until(lambda: left() == {"silent", "second", worker.id}, what="those of the last day")
