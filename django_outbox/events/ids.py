"""Event ids: ULIDs that only increase within a process."""

from __future__ import annotations

import os
import threading
import time
from datetime import datetime

from ulid import ULID, base32


class _Ids:
    """A generator of ids that increase across threads, and even if the clock is set back."""

    def __init__(self) -> None:
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Reset, because a forked child must not continue from its parent's last id."""
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
    """Return the smallest id of an event created at this instant; before 1970 counts as 1970."""
    millis = max(int(at.timestamp() * 1000), 0)
    return str(ULID.from_bytes((millis << 80).to_bytes(16, "big")))


def made_at(event_id: str) -> datetime | None:
    """Return when an id was created, by its writer's clock; None if it is not a ULID."""
    try:
        made: datetime = ULID.from_str(event_id).datetime
    except (ValueError, OverflowError, OSError):
        return None
    return made
