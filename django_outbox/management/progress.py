"""The progress of a long command: one line that is overwritten, shown only on a terminal."""

from __future__ import annotations

import time
from typing import Any, Final

REDRAW_INTERVAL: Final = 0.1  # seconds between updates of the line


class Progress:
    """Counts finished items and shows the count; ``stream`` is a command's standard error."""

    def __init__(self, stream: Any, *, verb: str) -> None:
        self._stream, self._verb = stream, verb
        self._is_terminal = bool(getattr(stream, "isatty", lambda: False)())
        self._started, self._redraw_at = time.monotonic(), 0.0
        self.count = 0

    def add(self, count: int) -> None:
        self.count += count
        now = time.monotonic()
        if self._is_terminal and now >= self._redraw_at:
            self._redraw_at = now + REDRAW_INTERVAL
            rate = self.count / max(now - self._started, 0.001)
            self._write(f"{self._verb} {self.count:,} ({rate:,.0f} a second)")

    def close(self) -> None:
        """Clear the line for the next output."""
        if self._is_terminal and self._redraw_at:
            self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}", style_func=str, ending="")  # not red: not an error
        self._stream.flush()
