"""New event ids: ULIDs that only rise within a process."""

from __future__ import annotations

import os
import threading
import time
from datetime import datetime

from ulid import ULID, base32


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
        return base32.encode(value.to_bytes(16, "big"))


new_id = _Ids()


def least_id(at: datetime) -> str:
    """Return the least id that an event made at this instant could have."""
    return str(ULID.from_bytes((int(at.timestamp() * 1000) << 80).to_bytes(16, "big")))


def made_at(event_id: str) -> datetime | None:
    """Return when an id was made, by the clock of its writer; None for one that is no ULID."""
    try:
        made: datetime = ULID.from_str(event_id).datetime
    except (ValueError, OverflowError, OSError):
        return None
    return made
