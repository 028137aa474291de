"""``outbox_worker`` in several processes: supervisor, signals, replaced processes, reload."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from django_outbox.models import OutboxEvent, OutboxWorker
from tests.fleet import wait_until
from tests.reach.children import (
    Child,
    Site,
    holds_a_database,
    is_alive,
    nothing_is_left,
    workers_show,
)
from tests.table import statuses, write
from tests.testapp.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

TWO = ("--processes", "2")
MANY = 500  # events of which a worker that is told to stop leaves some, however slow the machine


def pids(child: Child) -> set[int]:
    return {each.pid for each in child.children}


def running(child: Child) -> set[int]:
    """Wait until two workers are registered; return the ids of their processes."""
    shown = workers_show(2)
    assert shown == pids(child)
    return shown


def all_gone(processes: list[psutil.Process]) -> None:
    wait_until(lambda: not any(map(is_alive, processes)), what=f"an end of {processes}")


def started(count: int) -> None:
    wait_until(
        lambda: Effect.objects.filter(phase="start").count() >= count, what=f"{count} starts"
    )


def phases() -> dict[str, set[str]]:
    """Return the event ids by phase."""
    found: dict[str, set[str]] = {"start": set(), "end": set()}
    for event_id, phase in Effect.objects.values_list("event_id", "phase"):
        found[phase].add(event_id)
    return found


def test_38_j8_two_processes_share_the_work_and_end_with_their_supervisor(site: Site) -> None:
    with site.worker(*TWO, WORKERS=1, COLD_QUEUE_CAPACITY=2, POLL_BATCH_SIZE=2) as child:
        workers = running(child)
        processes = child.children
        supervisor = psutil.Process(child.pid)
        assert not holds_a_database(supervisor)
        assert all(map(holds_a_database, processes))
        write(40, "reach.slow", payload={"seconds": 0.01})
        wait_until(lambda: statuses() == {"DONE": 40}, what="40 DONE")
        assert not holds_a_database(supervisor)
        assert child.stop() == 0
        all_gone(processes)
    by_session: dict[str, set[int]] = {}
    for pid, session in Effect.objects.values_list("pid", "worker"):
        by_session.setdefault(session or str(pid), set()).add(pid)
    assert set().union(*by_session.values()) == workers
    assert all(len(users) == 1 for users in by_session.values())  # no connection in two processes
    nothing_is_left()


def test_38_a_dead_process_is_replaced_with_backoff(site: Site) -> None:
    with site.worker(*TWO) as child:
        before = running(child)
        survivor, victim = sorted(before)
        for deaths in range(1, 4):
            os.kill(victim, signal.SIGKILL)
            child.says(f"(?s)(ended pid=.*){{{deaths}}}")
            (victim,) = wait_until(lambda old=victim: pids(child) - {survivor, old})
        waits = [float(each) for each in re.findall(r"code=-9 next=([\d.]+)s", child.output)]
        assert waits == sorted({*waits})  # each longer than the one before
        assert len(waits) == 3
        assert survivor in pids(child)
        write(5, "reach.noted")
        wait_until(lambda: statuses() == {"DONE": 5}, what="5 DONE")
        assert child.stop() == 0
    assert not OutboxEvent.objects.leased().exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_38_444_a_signal_lets_every_process_finish_what_runs(site: Site, number: int) -> None:
    """Ctrl-C in a terminal reaches the children too; those of a killed supervisor end alone."""
    with site.worker(*TWO, WORKERS=1) as child:
        running(child)
        write(MANY, "reach.slow", payload={"seconds": 0.2})
        started(1)
        processes = child.children
        child.tell(number, group=number == signal.SIGINT)
        assert child.wait() == (-number if number == signal.SIGKILL else 0)
        all_gone(processes)
    assert phases()["start"] == phases()["end"]
    done = len(phases()["end"])
    assert statuses() == {"DONE": done, "NEW": MANY - done}
    nothing_is_left()


@pytest.mark.parametrize(("options", "shown"), [("", 1), ("--processes 2", 2)])
def test_a_worker_needs_no_open_stream(
    options: str, shown: int, database_env: dict[str, str], tmp_path: Path
) -> None:
    command = f"exec {sys.executable} -m django outbox_worker {options} <&- >&- 2>&-"
    with closing(Child(["sh", "-c", command], database_env, tmp_path / "log")) as child:
        workers_show(shown)
        assert child.stop() == 0
    nothing_is_left()


def test_max_events_recycles(site: Site) -> None:
    with site.worker(*TWO, "--max-events", "20", WORKERS=1, COLD_QUEUE_CAPACITY=10) as child:
        first = running(child)
        write(100, "reach.slow", payload={"seconds": 0.04})
        wait_until(lambda: statuses() == {"DONE": 100}, what="100 DONE")
        assert child.stop() == 0
    ends = Effect.objects.filter(phase="end")
    assert {*ends.values_list("pid", flat=True)} - first
    assert ends.count() == 100
    nothing_is_left()


# -- reload ----------------------------------------------------------------------------------------


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """Write a settings module for the test, so that it touches no file of the project."""
    path = tmp_path / "watched_settings.py"
    path.write_text("from tests.reach.settings import *\n")
    return path


def touch(path: Path, number: int) -> None:
    stamp = path.stat().st_mtime + number
    os.utime(path, (stamp, stamp))


def owners() -> set[str]:
    return {*OutboxWorker.objects.values_list("pk", flat=True)}


def reloading(site: Site, watched: Path, **outbox: Any) -> Any:
    env = {"DJANGO_SETTINGS_MODULE": watched.stem, "PYTHONPATH": str(watched.parent)}
    return site.run("django", "outbox_worker", "--reload", env=env, **outbox)


def test_reload_starts_anew_when_a_file_is_touched(site: Site, watched: Path) -> None:
    """The new process gets the old one's events at once, long before their leases would end."""
    with reloading(site, watched, WORKERS=1, LEASE=600) as child:
        workers_show(1)
        (old,) = owners()
        write(8, "reach.slow", payload={"seconds": 0.1})
        started(1)

        touched = count(1)

        def another() -> set[str]:
            touch(watched, next(touched))  # again, in case the reloader did not watch yet
            with suppress(AssertionError):
                return wait_until(lambda: owners() - {old}, within=4)
            return set()

        wait_until(another, what="another worker")
        wait_until(lambda: statuses() == {"DONE": 8}, what="8 DONE")
        assert child.stop() == 0
    assert Effect.objects.filter(phase="end").count() == 8
    nothing_is_left()
