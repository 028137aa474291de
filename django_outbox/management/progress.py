"""How far a long command is: one line that is written over, on a terminal alone."""

from __future__ import annotations

import time
from typing import Any, Final

EVERY: Final = 0.1  # seconds


class Progress:
    """Counts what is done; ``stream`` is a command's standard error."""

    def __init__(self, stream: Any, *, verb: str) -> None:
        self._stream, self._verb = stream, verb
        self._is_seen = bool(getattr(stream, "isatty", lambda: False)())
        self._started, self._next = time.monotonic(), 0.0
        self.count = 0

    def add(self, count: int) -> None:
        self.count += count
        now = time.monotonic()
        if self._is_seen and now >= self._next:
            self._next = now + EVERY
            rate = self.count / max(now - self._started, 0.001)
            self._write(f"{self._verb} {self.count:,} ({rate:,.0f} a second)")

    def close(self) -> None:
        """Leave an empty line to whoever writes next."""
        if self._is_seen and self._next:
            self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}", style_func=str, ending="")  # not red: no error
        self._stream.flush()
