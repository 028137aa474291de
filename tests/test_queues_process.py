"""Queues and real worker processes: dedicated workers, a queue that nobody serves, kills."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from django_outbox.models import OutboxEvent
from tests.fleet import Fleet, wait_until
from tests.table import insert, statuses

pytestmark = pytest.mark.django_db(transaction=True)

QUEUES = {"hooks": {"WORKERS": 2}}
OUTBOX: dict[str, Any] = {
    "LEASE": 1.5,
    "DRAIN_TIMEOUT": 1.2,
    "LOCK_WAIT": 1,
    "POLL_INTERVAL": 0.5,
    "WORKERS": 2,
    "QUEUES": QUEUES,
    "LISTENER_MODULE": "queue_listeners",
}


@pytest.fixture
def fleet(database_env: dict[str, str], tmp_path: Path, settings: Any) -> Iterator[Fleet]:
    settings.OUTBOX = {"QUEUES": QUEUES}
    fleet = Fleet(database_env, tmp_path, **OUTBOX)
    yield fleet
    fleet.kill_all()
    sys.stdout.write(fleet.log.read_text()[-6000:])  # pytest shows it where the test failed


def calls(fleet: Fleet, phase: str) -> Counter[str]:
    return Counter(each.id for each in fleet.lines() if each.phase == phase)


def pids(fleet: Fleet, phase: str) -> set[int]:
    return {each.pid for each in fleet.lines() if each.phase == phase}


def test_dedicated_workers_share_the_work_by_queue(fleet: Fleet) -> None:
    ids = insert(200, event_type="shared.sent")
    local = fleet.start("--exclude-queue", "hooks")
    hooks = fleet.start("--queue", "hooks")
    wait_until(lambda: statuses() == {"DONE": 200}, what="DONE")
    assert calls(fleet, "local") == calls(fleet, "hook") == Counter(ids)
    assert (pids(fleet, "local"), pids(fleet, "hook")) == ({local.pid}, {hooks.pid})
    assert (fleet.end(local), fleet.end(hooks)) == (0, 0)


def test_a_kill_repeats_no_more_finished_listeners_than_there_are_threads(fleet: Fleet) -> None:
    """Of events whose second queue is slow: their progress is in the table."""
    ids = insert(300, event_type="shared.sent", payload='{"n": 1}')
    blocking = insert(2, event_type="hook.sent", queue="hooks", payload='{"seconds": 60}')
    worker = fleet.start()
    wait_until(lambda: len(calls(fleet, "start")) == 2, what="both threads of hooks busy")
    wait_until(lambda: len(calls(fleet, "local")) == 300, what="all local listeners")
    worker.kill()
    worker.wait(20)
    OutboxEvent.objects.filter(pk__in=blocking).delete()
    fleet.start()
    wait_until(lambda: statuses() == {"DONE": 300}, what="DONE")
    assert calls(fleet, "hook") == Counter(ids)
    repeated = sum(count - 1 for count in calls(fleet, "local").values())
    assert repeated <= 4  # two threads of each queue
