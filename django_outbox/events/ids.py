"""Event ids: ULIDs that only increase within a process."""

from __future__ import annotations

import os
import threading
import time
from datetime import datetime

from ulid import ULID, base32


class _IdGenerator:
    """A generator of ids that increase across threads, and even if the clock is set back."""

    def __init__(self) -> None:
        self.reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Reset, because a forked child must not continue from its parent's last id."""
        self._lock = threading.Lock()
        self._millis = 0  # of the last id; never decreases
        self._random = 0  # the lower 80 bits of the last id

    def __call__(self) -> str:
        with self._lock:
            now = time.time_ns() // 1_000_000
            if now > self._millis:
                self._millis, self._random = now, int.from_bytes(os.urandom(10), "big") >> 1
            else:
                self._random += 1
            value = (self._millis << 80) + self._random
        return base32.encode(value.to_bytes(16, "big"))


new_id = _IdGenerator()


def least_id(at: datetime) -> str:
    """Return the smallest id of an event created at this instant; before 1970 counts as 1970."""
    millis = max(int(at.timestamp() * 1000), 0)
    return str(ULID.from_bytes((millis << 80).to_bytes(16, "big")))
