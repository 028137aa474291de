"""Start and stop ``manage.py outbox_worker`` as an operator would."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MANAGE = Path(__file__).resolve().parents[1] / "manage.py"
DEADLINE = 60  # seconds; a busy machine needs a few, and what takes longer is broken


class DemoFailed(Exception):
    """Something that everything else depends on did not happen."""


class WorkerProcess:
    """The running process; for `contextlib.closing`, so that it never outlives its block."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, str(MANAGE), "outbox_worker"], stdout=stream, stderr=stream
            )

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def wait_until(self, fact: Callable[[], bool], says: str) -> float:
        """Look at the fact until it holds; return the seconds it took, or ``DemoFailed``."""
        started = time.monotonic()
        while not fact():
            if time.monotonic() - started > DEADLINE:
                raise DemoFailed(f"{DEADLINE} s have passed, and still not: {says}.")
            try:
                code = self.process.wait(timeout=0.02)
            except subprocess.TimeoutExpired:
                continue
            raise DemoFailed(f"The worker ended with exit code {code} before this: {says}.")
        return time.monotonic() - started

    def terminate(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"The worker is still running {DEADLINE} s after SIGTERM.") from None

    def complaints(self) -> list[str]:
        """Return what the worker warned of, beside the failures that the demonstration provokes."""
        loud = (line for line in self.lines() if re.search("WARNING|ERROR|Traceback", line))
        return [line for line in loud if not re.search("django_outbox (retry|dead) event_id", line)]

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def last_words(self) -> str:
        lines = self.lines()
        return "\n".join(f"  | {line}" for line in lines[-30:])
