"""A contestant as the benchmark sees it: its environment, its database, its two processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from django.db import connection

from tests.benchmarks import raw

from .environments import python_of
from .roster import Peer

END = 10.0  # seconds that a process gets to end
PATIENCE = 60.0  # seconds without anything heard from a worker
KEYS = ("ENGINE", "NAME", "HOST", "PORT", "USER", "PASSWORD", "OPTIONS")


class Running:
    """One contestant, ready to be asked; ``None`` is django_outbox itself. Close it at the end."""

    def __init__(self, peer: Peer | None) -> None:
        self.peer = peer
        self.name = peer.name if peer else "django_outbox"
        python = str(python_of(peer)) if peer else sys.executable
        module = peer.module if peer else "ours"
        self._command = [python, "-m", "tests.benchmarks.contestants", module]
        self._settings = {key: connection.settings_dict[key] for key in KEYS}
        self._settings["NAME"] = f"{self._settings['NAME']}_{module}"
        self._environment = {
            **os.environ,
            "OUTBOX_BENCH_DATABASE": json.dumps(self._settings),
            "DJANGO_SETTINGS_MODULE": "",
            "PYTHONWARNINGS": "ignore",
        }
        self._make_database()
        subprocess.run([*self._command, "prepare"], env=self._environment, check=True, timeout=120)
        self._server = subprocess.Popen(
            [*self._command, "serve"],
            env=self._environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, command: str, *numbers: float) -> Any:
        """Have the serving process do something; return its answer."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([command, *numbers]) + "\n")
        self._server.stdin.flush()
        if not (answer := self._server.stdout.readline()):
            raise RuntimeError(f"its process ended: exit code {self._server.wait()}")
        return json.loads(answer)

    @contextmanager
    def working(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run its worker for the length of a block."""
        process = subprocess.Popen([*self._command, "work"], env=self._environment)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        self._server.communicate()  # the end of its input is its end
        self._drop_database()

    def _make_database(self) -> None:
        self._drop_database()
        if connection.vendor != "sqlite":
            self._execute(f"CREATE DATABASE {self._settings['NAME']}")

    def _drop_database(self) -> None:
        if connection.vendor == "sqlite":
            Path(self._settings["NAME"]).unlink(missing_ok=True)
        else:
            self._execute(f"DROP DATABASE IF EXISTS {self._settings['NAME']}")

    def _execute(self, sql: str) -> None:
        with closing(raw.connect()) as session:
            session.cursor().execute(sql)


def wait_for_lines(worker: subprocess.Popen[bytes], witness: Any, lines: int) -> None:
    """Wait until the worker's jobs have left so many lines; no word for a minute is an end."""
    seen, deadline = -1, time.monotonic() + PATIENCE
    while len(witness) < lines:
        if len(witness) > seen:
            seen, deadline = len(witness), time.monotonic() + PATIENCE
        if worker.poll() is not None:
            raise RuntimeError(f"its worker ended: exit code {worker.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{seen} of {lines} lines, and none for {PATIENCE:g} s")
        time.sleep(0.005)  # between two looks
