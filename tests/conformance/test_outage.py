"""The database goes away and comes back; the worker process recovers by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from django.db import connections

from django_outbox.models import OutboxEvent
from tests import databases
from tests.fleet import Fleet, wait_until
from tests.servers import Server
from tests.table import write

LASTS = 4.0  # seconds without a database
BACK_WITHIN = 60  # seconds: the longest back-off, with jitter, on a slow machine
OUTBOX = {"LEASE": 3, "DRAIN_TIMEOUT": 2, "WORKERS": 2, "POLL_INTERVAL": 0.5, "LOCK_WAIT": 0.5}

on_sqlite = pytest.mark.skipif(
    databases.vendor() != "sqlite", reason="only SQLite locks a whole database"
)


@pytest.fixture
def fleet(server: Server, alias: str, tmp_path: Path) -> Iterator[Fleet]:
    environment = {
        **os.environ,
        "OUTBOX_TEST_DB": databases.vendor(),
        "DATABASE_URL": server.url,
        "DATABASE_URL_OTHER": server.url,
    }
    fleet = Fleet(environment, tmp_path, **OUTBOX)
    yield fleet
    fleet.kill_all()


class Watch:
    """Measures the processor time and log lines of a worker while its database is away."""

    def __init__(self, fleet: Fleet, worker: psutil.Popen) -> None:
        self._fleet, self._worker = fleet, worker
        self._began, self._cpu, self._lines = time.monotonic(), self._seconds(), self._count()

    def _seconds(self) -> float:
        times = self._worker.cpu_times()
        return float(times.user + times.system)

    def _count(self) -> int:
        return len(self._fleet.log.read_text().splitlines())

    def check(self) -> None:
        """Check that it used under a fifth of a processor and logged at most 3 lines a second."""
        lasted = time.monotonic() - self._began
        lines = self._fleet.log.read_text().splitlines()[self._lines :]
        assert self._seconds() - self._cpu < 0.2 * lasted
        assert len(lines) <= 3 * lasted, "\n".join(lines)
        assert not [line for line in lines if "works again" in line]


def delivered(fleet: Fleet) -> int:
    return sum(line.phase == "end" for line in fleet.lines())


def pending(alias: str) -> int:
    connections[alias].close()  # an outage may have broken it
    return OutboxEvent.objects.using(alias).pending().count()


def check_oracle(
    fleet: Fleet, alias: str, committed: Sequence[str | None], *, again: int = 0
) -> None:
    """Check that nothing is lost, and that at most ``again`` events ran twice."""
    rows = OutboxEvent.objects.using(alias)
    assert {*rows.values_list("status", "attempts")} == {(OutboxEvent.Status.DONE, 0)}
    assert not rows.exclude(locked_by=None).exists()
    starts = fleet.starts()
    assert {*committed} <= {*starts}, "lost"
    assert {*starts} == {*rows.values_list("event_id", flat=True)}, "ghosts, or no effect"
    twice = [each for each, count in starts.items() if count > 1]
    assert len(twice) <= again, "one worker that lived through it ran events twice"
    assert max(starts.values()) <= 2


LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=20, isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Let another process hold the database's only write lock."""
    command = [sys.executable, "-c", LOCK, path]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "locked\n"
        try:
            yield
        finally:
            holder.stdin.close()
            holder.wait(10)


@on_sqlite
@pytest.mark.django_db(transaction=True)
def test_a_worker_carries_on_after_a_long_lock(
    database_env: dict[str, str], tmp_path: Path
) -> None:
    fleet = Fleet(database_env, tmp_path, **OUTBOX)
    try:
        written = write(100, payload={"seconds": 0.02})
        worker = fleet.start()
        wait_until(lambda: delivered(fleet) > 20, what="more than 20 deliveries")
        with locked(str(connections["default"].settings_dict["NAME"])):
            watch = Watch(fleet, worker)
            time.sleep(LASTS)  # duration of the fault: longer than any timeout of the worker
            watch.check()
        written += write(20)
        wait_until(lambda: not pending("default"), within=BACK_WITHIN, what="an event pending")
        assert fleet.end(worker) == 0
        check_oracle(fleet, "default", written)
    finally:
        fleet.kill_all()
