"""All modes, ``single_node`` and ``writer_only`` in detail, the purge, and the workers' table."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

import django_outbox as outbox
from django_outbox.models import OutboxEvent, OutboxLease, OutboxWorker
from django_outbox.worker import heartbeat, housekeeper
from tests.reach.children import Child, Site, nothing_is_left, workers_show
from tests.table import PLACED, insert, listening, now, purging, rest_of, row, statuses, write
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

DAY = 86400.0
DONE = {"status": 1, "due": None}


# -- single_node -----------------------------------------------------------------------------------

SINGLE = {"MODE": "single_node", "POLL_INTERVAL": 0.3, "PROBE_INTERVAL": 0.1, "DRAIN_TIMEOUT": 1}


def active() -> int:
    """Return the process id of the active worker; 0 if there is none."""
    lease = OutboxLease.objects.filter(pk="single_node")
    owner = lease.values_list("locked_by", flat=True).first()
    return int(owner.split("-")[-2]) if owner else 0


def two(stack: ExitStack, site: Site, **settings: Any) -> tuple[Child, Child]:
    """Start two workers; return the active one first."""
    one = stack.enter_context(site.worker(**{**SINGLE, **settings}))
    other = stack.enter_context(site.worker(**{**SINGLE, **settings}))
    workers_show(2)
    first = wait_until(active, what="an active worker")
    return (one, other) if first == one.pid else (other, one)


def delivered_by(ids: list[str]) -> set[int]:
    """Wait until these events are delivered; return the ids of the processes that did it."""
    found = Effect.objects.filter(event_id__in=ids)
    wait_until(lambda: found.values("event_id").distinct().count() == len(ids), what="deliveries")
    return {*found.values_list("pid", flat=True)}


def test_404_one_works_and_the_other_takes_over_at_once_after_a_clean_stop(site: Site) -> None:
    """The successor does not wait for the end of the lease, which lasts ten minutes."""
    with ExitStack() as stack:
        first, second = two(stack, site, LEASE=600)
        assert delivered_by(write(40, "reach.noted")) == {first.pid}
        assert first.stop() == 0
        wait_until(lambda: active() == second.pid, what="a successor")
        assert delivered_by(write(5, "reach.noted")) == {second.pid}
        assert second.stop() == 0
    assert active() == 0
    nothing_is_left()


# -- writer_only -----------------------------------------------------------------------------------

WRITER = {"MODE": "writer_only", "PURGE_INTERVAL": 0.05, "RETENTION_DONE": DAY}


def test_j9_nothing_is_handed_over_or_claimed(settings: Any) -> None:
    settings.OUTBOX = {**WRITER, "POLL_INTERVAL": 0.05, "PROBE_INTERVAL": 0.05}
    calls: list[str] = []
    (old,) = insert(created_at=now() - timedelta(days=2), made=2 * DAY)
    with listening(lambda event: calls.append(event.event_id)), outbox.Worker():
        with transaction.atomic():
            event_id = outbox.write(PLACED)
            assert connection.run_on_commit == []
        names = [each.name for each in threading.enumerate() if each.name.startswith("outbox-")]
        assert names == ["outbox-default-housekeeper"]
        wait_until(lambda: not OutboxEvent.objects.filter(pk=old).exists(), what="a purge")
        assert row(str(event_id)).status == 0
        assert row(str(event_id)).locked_by is None
    assert not calls


def test_458_only_writer_only_purges_by_age_alone(settings: Any) -> None:
    settings.OUTBOX = WRITER
    past = now() - timedelta(days=2)
    old = {
        *insert(created_at=past),
        *insert(created_at=past, status=2),
        *insert(created_at=past, status=3, due=None, done_at=now()),
        *insert(created_at=past, status=1, due=None, done_at=now()),
    }
    young = {*insert(2), *insert(**DONE, done_at=past)}
    settings.OUTBOX = {**WRITER, "MODE": "multi_node", "RETENTION_DEAD": DAY}
    # Other modes go by ``done_at``: only the young finished event ended long enough ago.
    assert sum(OutboxEvent.objects.purge_batches()) == 1
    assert {*OutboxEvent.objects.values_list("pk", flat=True)} >= old
    settings.OUTBOX = WRITER
    assert sum(OutboxEvent.objects.purge_batches()) == 4
    left = {*OutboxEvent.objects.values_list("pk", flat=True)}
    assert left < young
    assert len(left) == 2


# -- the purge -------------------------------------------------------------------------------------

PURGING = {"PURGE_INTERVAL": 0.05, "PURGE_BATCH_SIZE": 10, "RETENTION_DONE": 1}


def expired(count: int, **columns: Any) -> list[str]:
    at = now() - timedelta(days=1)
    return insert(count, **{**DONE, "done_at": at, "made": DAY + 60, **columns})


def test_274_the_worker_purges_in_batches(settings: Any) -> None:
    settings.OUTBOX = PURGING
    expired(57)
    (kept,) = insert(**DONE, done_at=now() + timedelta(seconds=60))
    sizes = [*OutboxEvent.objects.purge_batches()]
    assert sum(sizes) == 57
    assert max(sizes) == 10
    expired(57)
    with outbox.Worker():
        wait_until(lambda: OutboxEvent.objects.count() == 1, what="a purge")
    assert row(kept)


def test_a_run_is_bounded_in_time(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run comes soon and continues where this one stopped."""
    settings.OUTBOX = PURGING
    monkeypatch.setattr(housekeeper, "MAX_RUN", 0.0)
    later = now() + timedelta(seconds=60)
    kept = insert(20, **DONE, done_at=later, made=2 * DAY)  # an upward scan reads these rows first
    expired(35)
    run = purging(100)
    left = []
    for _ in range(6):
        assert run.run() < 1
        left.append(OutboxEvent.objects.count() - len(kept))
    assert left == [35, 35, 25, 15, 5, 0]
    monkeypatch.setattr(housekeeper, "MAX_RUN", 15.0)
    assert 80 < rest_of(run) <= 100  # the rest of the interval, because the run was not cut


def test_8_w17_a_workers_row_comes_goes_and_is_written_again(settings: Any) -> None:
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
    monkeypatch.setattr(heartbeat, "MAX_LOST", 2)
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
