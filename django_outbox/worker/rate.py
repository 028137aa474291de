"""``RateLimit``: this worker's share of the events per second that a queue may deliver."""

from __future__ import annotations

import random
from threading import Lock

from ..clocks import monotonic

WORTHWHILE = 0.25  # seconds' worth of events to wait for, rather than claim each by itself


class RateLimit:
    """A token bucket for one second's worth of events, or for one event if that is more.

    The rate is divided by the live workers that serve the queue; until their number is known,
    nothing is available. At first the bucket has a random part of one event: so workers that are
    restarted often deliver neither more than the rate, on average, nor less. Any thread may call
    it.
    """

    def __init__(self, rate: float) -> None:
        """``rate``: events per second of all workers together."""
        self._rate = rate
        self._share = 0.0  # events per second; 0: the other workers are not known yet
        self._tokens, self._at = random.random(), monotonic()
        self._lock = Lock()  # guards these

    def set_workers(self, count: int) -> None:
        """Set the number of live workers that serve the queue, this one included."""
        with self._lock:
            self._refill()
            self._share = self._rate / count

    def available(self) -> int:
        """Return how many events may be claimed now."""
        with self._lock:
            self._refill()
            return int(self._tokens)

    def spend(self, count: int) -> None:
        """Count claimed events. More than were available delay later ones."""
        with self._lock:
            self._tokens -= count

    def give_back(self, count: int) -> None:
        """Take back the count of events that were released unstarted."""
        with self._lock:
            self._tokens = min(self._tokens + count, self._size)

    def wait(self) -> float:
        """Return the seconds until enough events for a claim may be claimed."""
        if not self._share:
            return WORTHWHILE
        wanted = min(max(self._share * WORTHWHILE, 1.0), self._size)
        return max((wanted - self._tokens) / self._share, 0.0)

    @property
    def _size(self) -> float:
        return max(self._share, 1.0)

    def _refill(self) -> None:
        now = monotonic()
        if self._share:
            self._tokens = min(self._tokens + (now - self._at) * self._share, self._size)
        self._at = now
