"""Workers that are killed from outside: the innocent events that they held live."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from django_outbox.models import OutboxEvent
from tests.conformance.test_rescue import MAX_RESCUES, OUTBOX, PROCESSES, fleet, pending, rescues
from tests.fleet import Fleet, children, wait_until
from tests.table import statuses, write

pytestmark = pytest.mark.django_db(transaction=True)


__all__ = ["fleet"]  # fixtures


@pytest.fixture
def long_leases(database_env: dict[str, str], tmp_path: Path) -> Iterator[Fleet]:
    """Return a fleet whose live workers keep their leases, however slow the machine."""
    fleet = Fleet(database_env, tmp_path, **{**OUTBOX, "LEASE": 3})
    yield fleet
    fleet.kill_all()


def test_the_innocent_live_when_each_worker_dies_soon_after_its_start(long_leases: Fleet) -> None:
    fleet = long_leases
    write(2000, payload={"seconds": 0.005})
    workers = fleet.start_several(PROCESSES)
    kills = kill(24, workers, lambda child: time.time() - child.create_time() > 0.45)
    check_all_done(fleet, workers, 2000, kills)


def test_the_innocent_live_when_all_workers_die_as_soon_as_all_deliver(long_leases: Fleet) -> None:
    fleet = long_leases
    write(1200, payload={"seconds": 0.1})
    workers = fleet.start_several(PROCESSES)
    kills = 0
    for _ in range(6):
        wait_until(lambda: all_deliver(fleet, workers), what="an event started by each worker")
        kills += kill(PROCESSES, workers, lambda child: True)
    check_all_done(fleet, workers, 1200, kills)


def all_deliver(fleet: Fleet, workers: psutil.Process) -> bool:
    """Return whether each worker has called a listener."""
    found = {child.pid for child in children(workers)}
    return len(found) == PROCESSES and found <= {line.pid for line in fleet.lines()}


def kill(count: int, workers: psutil.Process, wanted: Callable[[psutil.Process], bool]) -> int:
    """Kill workers that ``wanted`` selects until there were ``count``; return their number."""
    killed: list[psutil.Process] = []

    def are_enough() -> bool:
        for child in children(workers):
            with suppress(psutil.NoSuchProcess):  # it may end in the meantime
                if child not in killed and wanted(child):
                    child.kill()
                    killed.append(child)
        return len(killed) >= count

    wait_until(are_enough, what="kills")
    psutil.wait_procs(killed, timeout=20)  # until then, they look like running workers
    return len(killed)


def check_all_done(fleet: Fleet, workers: psutil.Popen, count: int, kills: int) -> None:
    assert kills >= 2 * PROCESSES
    assert pending() or max(rescues()), "the kills met nothing"
    wait_until(lambda: not pending(), within=90, what="an event pending")
    wait_until(lambda: all_started(fleet, workers), what="a worker for each one killed")
    assert fleet.end(workers) == 0
    assert statuses() == {"DONE": count}
    assert max(rescues()) < MAX_RESCUES
    assert {*OutboxEvent.objects.values_list("attempts", flat=True)} == {0}
    assert len({line.id for line in fleet.lines() if line.phase == "end"}) == count
    again = sum(fleet.starts().values()) - count
    assert again <= kills * int(OUTBOX["WORKERS"]) + len(fleet.logged("lost leases"))


def all_started(fleet: Fleet, workers: psutil.Popen) -> bool:
    """Return whether all workers run: until then, the supervisor's exit code reports the kill."""
    found = [child.pid for child in children(workers)]
    return len(found) == PROCESSES and all(
        fleet.logged(f"worker started id={socket.gethostname()[:80]}-{pid}-") for pid in found
    )
