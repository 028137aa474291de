"""What listeners leave for the benchmark in a file; processes share one monotonic clock."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

STEP = 100  # calls for which a counting listener leaves one line
VARIABLE = "OUTBOX_BENCH_WITNESS"  # the environment variable with the file's path


class Testifying:
    """The listener's end. O_APPEND keeps the lines of several processes apart."""

    def __init__(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(os.environ.get(VARIABLE, os.devnull), flags)
        self._counter = itertools.count(1)

    def count(self, events: int = 1) -> None:
        """Count the events of a call; the counter is C, so that threads need no lock."""
        for _ in range(events):
            if not next(self._counter) % STEP:
                self.tell("call")

    def tell(self, name: object) -> None:
        """Say when this happened; 32 bytes, so that the file's size counts lines."""
        now = time.monotonic()
        os.write(self._file, f"{name!s:<12} {now:18.6f}\n".encode())


LINE = 32  # bytes


class Witness:
    """The benchmark's end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clear()

    def clear(self) -> None:
        self.path.write_bytes(b"")

    def __len__(self) -> int:
        return self.path.stat().st_size // LINE

    def lines(self) -> list[tuple[str, float]]:
        """Return names and times (monotonic seconds), earliest first."""
        pairs = (line.split() for line in self.path.read_text().splitlines())
        return sorted(((name, float(at)) for name, at in pairs), key=lambda line: line[1])

    def calls(self) -> list[float]:
        """Return when each ``STEP`` calls were complete."""
        return [at for name, at in self.lines() if name == "call"]
