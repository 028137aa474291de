"""``Wakeup``: how the parts of a worker tell its claimer that there is work, room or a due time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from threading import Lock

from ..clocks import monotonic


def _no_thread() -> None:
    """Stand in for a claimer's thread until there is one."""


class Wakeup:
    """One per worker. Any thread may call its methods; only the claimer calls ``take_due``."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = _no_thread  # ends the wait of the claimer's thread
        self.poll_wanted = False  # set by any thread, cleared by the claimer's
        self.doorbell_is_reliable = False  # every commit is announced; set by the listener's thread
        self.suspect_waits = False  # an event is to be run alone; set by the claimer's thread
        self._soonest = inf  # monotonic; the next due time that others reported
        self._poll_again_at: list[float] = []  # monotonic; further polls after a notification
        self._lock = Lock()  # guards the two lines above

    def poll(self) -> None:
        """Have the claimer poll the table now."""
        self.poll_wanted = True
        self.wake()

    def poll_again(self, delays: Sequence[float]) -> None:
        """Have the claimer poll after each of ``delays`` (seconds), unless called again before.

        A writer that has notified stays quiet for an interval; these polls find what it commits
        meanwhile.
        """
        now = monotonic()
        with self._lock:
            self._poll_again_at = sorted(now + delay for delay in delays)

    def expect(self, delay: float) -> None:
        """Report that something becomes due in ``delay`` seconds."""
        with self._lock:
            self._soonest = min(self._soonest, monotonic() + delay)
        self.wake()

    def next_poll(self) -> float:
        """Return when (monotonic) the next poll is due that can be foreseen."""
        return min([self._soonest, *self._poll_again_at])

    def take_due(self, now: float) -> bool:
        """Return whether a poll is due by ``now`` (monotonic), and count it as done."""
        is_due, self.poll_wanted = self.poll_wanted, False
        with self._lock:
            if self._soonest <= now:
                is_due, self._soonest = True, inf
            while self._poll_again_at and self._poll_again_at[0] <= now:
                is_due = True
                del self._poll_again_at[0]
        return is_due
