"""Timeouts of calls in threads: a call either returns in time or is abandoned."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..clocks import monotonic

if TYPE_CHECKING:
    from .invocation import Invocation

CANCELLATION_GRACE = 1.0  # seconds in which a cancelled coroutine has to end


class CallAbandoned(BaseException):
    """Ends a thread whose call was abandoned: another thread has taken over the delivery."""


class TimedCall:
    """A call that has a timeout; its thread and the watchdog compete to end it."""

    __slots__ = ("_ended", "_timeout", "call", "ends_at", "has_returned", "seconds", "started")

    def __init__(self, call: Invocation, started: float, timeout: float) -> None:
        self.call, self.started = call, started
        self.ends_at = started + timeout  # monotonic; from then on it may be abandoned
        self.has_returned = False  # before it was abandoned; owner: its thread
        self.seconds = 0.0  # duration, set when it ends
        self._timeout = timeout
        self._ended = threading.Lock()  # acquired by the thread that ends the call, never released

    @property
    def timed_out(self) -> bool:
        """Return whether it has ended after its timeout."""
        return self.seconds >= self._timeout

    def mark_awaited(self) -> None:
        """Note that it is a coroutine: its timeout starts now.

        After the timeout it has ``CANCELLATION_GRACE`` to end.
        """
        self.ends_at = monotonic() + self._timeout + CANCELLATION_GRACE

    def mark_returned(self) -> bool:
        """End the call in its thread; return whether it was not abandoned before."""
        self.has_returned = self._end()
        return self.has_returned

    def abandon(self) -> bool:
        """End the call from another thread; return whether it had not returned before."""
        return self._end()

    def _end(self) -> bool:
        """End the call once; return whether this thread did it."""
        if not self._ended.acquire(blocking=False):
            return False
        self.seconds = monotonic() - self.started
        return True
