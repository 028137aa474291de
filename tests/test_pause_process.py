"""Pauses and real workers: told by another process, killed while they wait, resumed (issue 8)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import call_command

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.fleet import Fleet, wait_until
from tests.table import insert, row, statuses, write

pytestmark = pytest.mark.django_db(transaction=True)

PLACED, OTHER = "order.placed", "order.followed"
OUTBOX = {
    "LEASE": 60,
    "DRAIN_TIMEOUT": 1.2,
    "LOCK_WAIT": 1,
    "POLL_INTERVAL": 0.5,
    "WORKERS": 2,
    "COLD_QUEUE_CAPACITY": 50,
    "POLL_BATCH_SIZE": 50,
}


@pytest.fixture
def fleet(database_env: dict[str, str], tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(database_env, tmp_path, **OUTBOX)
    yield fleet
    fleet.kill_all()
    sys.stdout.write(fleet.log.read_text()[-6000:])  # pytest shows it where the test failed


def manage(*arguments: str) -> None:
    """Run a command in this process, which to the workers is another one."""
    call_command(*arguments, stdout=StringIO(), stderr=StringIO())


def ends(fleet: Fleet, event_type: str) -> Counter[str]:
    found = (each for each in fleet.lines() if each.type == event_type and each.phase == "end")
    return Counter(each.id for each in found)


def test_a_pause_of_another_process_holds_through_a_kill_until_the_resume(fleet: Fleet) -> None:
    """Zero lost, none delivered meanwhile, attempts unchanged."""
    first = insert(200, due=-60, event_type=PLACED, payload='{"seconds": 0.05}')
    retried = insert(20, due=-30, event_type=PLACED, status=Status.RETRY, attempts=3)
    worker = fleet.start()
    wait_until(lambda: len(ends(fleet, PLACED)) >= 10, what="10 deliveries")

    manage("outbox_pause", "--event-type", PLACED)
    wait_until(lambda: not OutboxEvent.objects.leased().exists(), what="empty hands")
    paused = {*OutboxEvent.objects.paused().values_list("pk", flat=True)}
    delivered = ends(fleet, PLACED)
    assert delivered.keys() | paused == {*first, *retried}
    assert not delivered.keys() & paused
    assert len(paused) > 100  # what was claimed and not started waits, too

    (free,) = insert(event_type=OTHER)
    wait_until(lambda: free in ends(fleet, OTHER), what="another type is delivered")
    worker.kill()
    worker.wait()
    more = write(30, PLACED, payload={})
    fleet.start()
    (again,) = insert(event_type=OTHER)
    wait_until(lambda: again in ends(fleet, OTHER), what="delivery by the next worker")
    postponed = OutboxEvent.objects.postponed().filter(event_type=PLACED)
    wait_until(lambda: postponed.count() == len(paused) + 30, what="all are postponed")
    assert ends(fleet, PLACED) == delivered
    assert {row(each).attempts for each in paused if each in retried} == {3}
    assert {row(each).attempts for each in paused if each in first} == {0}

    manage("outbox_pause", "--end", "--event-type", PLACED)
    count = len(first) + len(retried) + len(more) + 2
    wait_until(lambda: statuses() == {"DONE": count}, what=f"{count} DONE")
    assert ends(fleet, PLACED) == Counter([*first, *retried, *more])  # once each
    assert fleet.starts(PLACED) == ends(fleet, PLACED)
    assert {row(each).attempts for each in retried} == {3}
