"""``Wakeup``: how the parts of a worker tell its claimer that there is work, room or a due time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from math import inf

from ..clocks import monotonic


class Wakeup:
    """One per worker. Any thread may call its methods; only the claimer calls the last two."""

    def __init__(self) -> None:
        self.woken = threading.Event()  # ends the wait of the claimer's thread
        self.poll_wanted = False  # cleared by the claimer
        self.doorbell_is_reliable = self.suspect_waits = False
        self._reported = deque[float]()  # due times (monotonic), for the claimer to take
        self._soonest = inf  # the first of those that it took; like the next, only the claimer's
        self._polled_at = -inf  # monotonic
        self._poll_again_at: list[float] = []  # monotonic; replaced by the listener's thread

    def wake(self) -> None:
        """Have the claimer look what has changed."""
        self.woken.set()

    def poll(self) -> None:
        """Have the claimer poll the table now."""
        self.want_poll()
        self.wake()

    def want_poll(self) -> None:
        """Have the claimer's next step poll the table."""
        self.poll_wanted = True

    def trust_doorbell(self, is_reliable: bool) -> None:
        """Note whether every commit is announced; if not, polls take the place of that."""
        self.doorbell_is_reliable = is_reliable

    def note_suspects(self, found: Collection[object]) -> None:
        """Note which events are to be run alone, for people to see."""
        self.suspect_waits = bool(found)

    def poll_again(self, delays: Sequence[float]) -> None:
        """Have the claimer poll after each of ``delays`` (seconds), unless called again before.

        A writer that has notified stays quiet for an interval; these polls find what it commits
        meanwhile.
        """
        now = monotonic()
        self._poll_again_at = [now + delay for delay in delays]

    def expect(self, delay: float) -> None:
        """Report that something becomes due in ``delay`` seconds."""
        self._reported.append(monotonic() + delay)
        self.wake()

    def next_poll(self) -> float:
        """Return when (monotonic) the next poll is due that can be foreseen."""
        while self._reported:
            self._soonest = min(self._soonest, self._reported.popleft())
        return min([self._soonest, *(at for at in self._poll_again_at if at > self._polled_at)])

    def take_due(self, now: float) -> bool:
        """Return whether a poll is due by ``now`` (monotonic), and count it as done."""
        # If it is set again from here on, this poll serves, or the next step.
        is_wanted, self.poll_wanted = self.poll_wanted, False
        if self.next_poll() > now:
            return is_wanted
        self._polled_at = now
        if self._soonest <= now:
            self._soonest = inf
        return True
