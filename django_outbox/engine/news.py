"""When to claim: the news that call for it, and the pace that holds it back."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from math import inf
from threading import Lock

PACE = 0.005  # seconds for each claim of few, in the long run: a load comes some at a time
AT_ONCE = 0.1  # seconds of it that claims after a rest need not keep
LONGEST = 0.2  # seconds that a look may make this worker wait, however many others there are


class News:
    """What calls for a look at the table; told by any thread, taken by the claimer's."""

    def __init__(self, first: float) -> None:
        """``first``: seconds after which there is a look in any case."""
        self.sure = False  # rings surely arrive; set by the doorbell's thread
        self.rung = False  # set by any thread, cleared by the claimer's
        self._soonest = time.monotonic() + first  # the next due time that others told us of
        self._again: list[float] = []  # monotonic; when to look once more after the latest ring
        self._telling = Lock()  # guards the two lines above

    def ring(self) -> None:
        """Note that the table has news."""
        self.rung = True

    def expect(self, delay: float) -> None:
        """Note that something will be due in ``delay`` seconds."""
        with self._telling:
            self._soonest = min(self._soonest, time.monotonic() + delay)

    def look_again(self, delays: Sequence[float]) -> None:
        """Note after how many seconds each to look at what commits while who rang keeps quiet.

        Only the latest call counts: the rings themselves are looked at when they come.
        """
        now = time.monotonic()
        with self._telling:
            self._again = sorted(now + delay for delay in delays)

    def next(self) -> float:
        """Return, on the monotonic clock, when the next look falls due; rings come unforeseen."""
        return min([self._soonest, *self._again])

    def take(self, now: float) -> bool:
        """Say whether a look is due by ``now``, and count it as made."""
        is_due, self.rung = self.rung, False
        with self._telling:
            if self._soonest <= now:
                is_due, self._soonest = True, inf
            while self._again and self._again[0] <= now:
                is_due = True
                del self._again[0]
        return is_due


class Pace:
    """Claims of few events come no faster than one in ``PACE`` seconds, in the long run.

    Each costs a writer in this process, or on this machine, as much as several events do. And of
    all workers, whom one ring wakes together, about one at a time looks at the table.
    """

    def __init__(self) -> None:
        self.others = 0  # workers that are alive beside this one; set by the heartbeat's thread
        self._over = 0.0  # monotonic; when the claims so far would be over, each taking PACE
        self._turn = 0.0  # monotonic; when each other worker has looked as often as this one

    def count(self) -> None:
        """Count a claim of few events."""
        self._over = max(self._over, time.monotonic()) + PACE

    def count_look(self, took: float) -> None:
        """Count a look of so many seconds, after which nothing more was due."""
        theirs = took * self.others * random.uniform(0, 2)  # else all would look at the same time
        self._turn = max(self._turn, time.monotonic()) + min(theirs, LONGEST)

    def next_look(self) -> float:
        """Return, on the monotonic clock, when it is this worker's turn to look."""
        return self._turn - AT_ONCE

    def keep(self) -> None:
        """Rest before the next claim, if many of few events came before it."""
        ahead = self._over - time.monotonic() - AT_ONCE
        if ahead > 0:
            time.sleep(ahead)
