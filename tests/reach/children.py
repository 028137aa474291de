"""Processes of the site: each in a group of its own, and ended with the test."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from django.db import connection

from django_outbox.models import OutboxEvent, OutboxWorker
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


class Child:
    """A command that runs, and what it said so far."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=env, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
            )
        self.pid = self._process.pid

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def children(self) -> list[psutil.Process]:
        """Its child processes that live."""
        try:
            found = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [each for each in found if is_alive(each)]

    def says(self, pattern: str, *, within: float = 60) -> str:
        """Wait until its output matches; return the match."""

        def look() -> str | None:
            found = re.search(pattern, self.output)
            if found is None and self._process.poll() is not None:
                raise AssertionError(f"ended with {self._process.returncode}: {self.output}")
            return found and found.group(0)

        return str(wait_until(look, within=within, what=f"{pattern!r} in {self.output!r}"))

    def tell(self, number: int, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.pid, number)

    def wait(self, within: float = 60) -> int:
        """Wait for its end; return the exit code."""
        try:
            return self._process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within} s: {self.output}") from None

    def stop(self, number: int = signal.SIGTERM, *, within: float = 60) -> int:
        self.tell(number)
        return self.wait(within)

    def close(self) -> None:
        """End whatever is left of its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class Site:
    """Starts processes of the site with this test's databases."""

    def __init__(self, env: dict[str, str], logs: Path) -> None:
        self._env, self._logs, self._count = env, logs, 0

    @contextmanager
    def run(
        self, *command: str, env: dict[str, str] | None = None, **outbox: Any
    ) -> Iterator[Child]:
        """Run ``python -m command`` with these keys of ``OUTBOX``."""
        self._count += 1
        whole = {
            **self._env,
            "DJANGO_SETTINGS_MODULE": "tests.reach.settings",
            "PYTHONUNBUFFERED": "1",
            "REACH_OUTBOX": json.dumps(outbox),
            **(env or {}),
        }
        log = self._logs / f"child-{self._count}.log"
        child = Child([sys.executable, "-m", *command], whole, log)
        try:
            yield child
        finally:
            child.close()

    def worker(self, *options: str, **outbox: Any) -> Any:
        """Run ``outbox_worker``."""
        return self.run("django", "outbox_worker", *options, **outbox)


def workers_show(count: int, *, within: float = 60) -> set[int]:
    """Wait until that many workers show; return their process ids."""

    def look() -> set[int]:
        found = {*OutboxWorker.objects.values_list("pid", flat=True)}
        return found if len(found) == count else set()

    return wait_until(look, within=within, what=f"{count} workers in their table")


def holds_a_database(process: psutil.Process) -> bool:
    """Whether a process has the database open: its file, or a connection to its server."""
    if connection.vendor == "sqlite":
        return str(connection.settings_dict["NAME"]) in [each.path for each in process.open_files()]
    if connection.vendor == "postgresql":  # where the settings of the site sign each session
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = %s",
                [f"pid {process.pid}"],
            )
            return bool(cursor.fetchone()[0])
    port = int(connection.settings_dict["PORT"] or 3306)
    return any(each.raddr and each.raddr.port == port for each in process.net_connections("tcp"))


def nothing_is_left() -> None:
    """No lease, and no worker in its table."""
    assert not OutboxEvent.objects.leased().exists()
    assert not OutboxWorker.objects.exists()


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
