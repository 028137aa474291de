"""Worker processes beside the benchmark: ``manage.py outbox_worker`` as anybody starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from django.db import connections

from django_outbox.models import OutboxEvent
from tests import databases

END = 30.0  # seconds that a worker gets to end
PATIENCE = 300.0  # seconds that a backlog may take


class WorkerProcess:
    """One ``outbox_worker``; a context manager. ``outbox`` are its settings, the default ones."""

    def __init__(self, *arguments: str, **outbox: Any) -> None:
        self._environment = {**environment(), "OUTBOX_BENCH_SETTINGS": json.dumps(outbox)}
        self._command = [sys.executable, "-m", "django", "outbox_worker", "--no-purge", *arguments]

    def __enter__(self) -> WorkerProcess:
        self.process = subprocess.Popen(self._command, env=self._environment)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def wait_for(self, fact: Callable[[], bool], what: str, *, every: float = 0.005) -> float:
        """Wait for a fact; return when it was seen (monotonic seconds)."""
        deadline = time.monotonic() + PATIENCE
        while not fact():
            if self.process.poll() is not None:
                raise RuntimeError(f"the worker ended: exit code {self.process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} after {PATIENCE:g} s")
            time.sleep(every)  # between two looks
        return time.monotonic()

    def wait_until_settled(self, keys: str = "") -> float:
        """Wait until no due event, or none whose key begins with ``keys``, is left."""
        left = OutboxEvent.objects.filter(available_at__isnull=False)
        if keys:
            left = OutboxEvent.objects.pending().filter(key__startswith=keys)
        return self.wait_for(lambda: not left.exists(), "end of the backlog", every=0.02)


def environment() -> dict[str, str]:
    """Return what a process needs to meet our databases."""
    aliases = {alias: connections[alias].settings_dict for alias in connections}
    return {**os.environ, **databases.environment(aliases)}
