"""New event ids: ULIDs that only rise within a process."""

from __future__ import annotations

import os
import threading
import time

from ulid import ULID


class _Ids:
    """Rises over threads and clock steps alike."""

    def __init__(self) -> None:
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Start anew: a child must not go on counting from its parent's last id."""
        self._lock = threading.Lock()
        self._at = 0  # milliseconds, never backwards
        self._low = 0  # the 80 random bits

    def __call__(self) -> str:
        with self._lock:
            now = time.time_ns() // 1_000_000
            if now > self._at:
                self._at, self._low = now, int.from_bytes(os.urandom(10), "big") >> 1
            else:
                self._low += 1
            value = (self._at << 80) + self._low
        return str(ULID.from_bytes(value.to_bytes(16, "big")))


new_id = _Ids()
