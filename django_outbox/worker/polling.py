"""When the table is polled, and how far back: wakeups, throttles, watermarks, a queue's rate."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Collection, Sequence
from math import inf

from ..clocks import monotonic
from ..sql.values import Found

FULL_SCAN_FACTOR = 50.0  # a full scan is followed by a pause that many times as long
LONGEST_PAUSE = 300.0  # seconds after a full scan

CLAIM_INTERVAL = 0.005  # seconds for each small claim, on average
BURST = 0.1  # seconds by which small claims may be ahead of that average
GATHER_TIME = 0.02  # seconds in which a steady load gathers for its next claim
LONGEST_WAIT = 0.2  # seconds that one poll may delay the next, however many workers there are

# Seconds; what was due that long before a claim started may commit after it.
LATE_COMMIT_MARGIN = 1.0

WORTHWHILE = 0.25  # seconds' worth of events to wait for, rather than claim each by itself


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


class Throttle:
    """Limits one kind of work to a small share of the time."""

    def __init__(self, factor: float = FULL_SCAN_FACTOR) -> None:
        """``factor``: the pause is about that many times as long as the work; 0: no pause."""
        self._factor = factor
        self._last = 0.0  # seconds
        self.until = 0.0  # monotonic

    def after(self, started: float, *, least: float = 0.0) -> None:
        """Begin the pause after work that ``started`` (monotonic) and ends now.

        The pause lasts ``least`` seconds or longer.

        The work counts as long as the shorter of the last two: one may have waited for a
        connection. The pause varies a little, so that workers do not stay in step.
        """
        ended = monotonic()
        took, self._last = min(ended - started, self._last), ended - started
        pause = max(min(self._factor * took, LONGEST_PAUSE), least)
        self.until = ended + pause * random.uniform(0.8, 1.2)


class Watermark:
    """Lets each claim resume where the one before it ended. One thread only.

    Settled rows leave entries in an index until no open snapshot can see them. A full scan, from
    the beginning of the index, reads all of them: while a snapshot of some minutes was open, that
    alone kept workers busy. Rows below the watermark committed late, or were locked when the claim
    passed them. Only a full scan finds those.
    """

    def __init__(self, *, margin: float = 0.0) -> None:
        """``margin``: seconds for which a claim leaves due rows alone."""
        self._margin = LATE_COMMIT_MARGIN + margin
        self._low = self._started = 0.0  # monotonic; a claim scans rows that are due since

    def lower(self, waited: float) -> None:
        """Lower it to what has been due for ``waited`` seconds, though a claim has passed it."""
        self._low = min(self._low, monotonic() - waited - self._margin)

    def begin_claim(self, *, scan: bool) -> float | None:
        """Return for how many seconds the rows to scan have been due at most; None: a full scan."""
        self._started = monotonic()
        return None if scan else self._started - self._low

    def end_claim(self, found: Found) -> None:
        """Set it to when the claim began, or to when what that left was due."""
        self._low = self._started - (found.waited if found.more else 0.0) - self._margin


class ClaimThrottle:
    """Spaces out claims of few events, and staggers polls between workers.

    A small claim costs a writer on this machine as much as several events do, so what arrives
    steadily is claimed together, and what arrives at random moments at once. One notification wakes
    all workers, but only about one at a time should poll.
    """

    def __init__(self) -> None:
        self._claims_end = 0.0  # monotonic; the end of the claims so far, at CLAIM_INTERVAL each
        self._turn = 0.0  # monotonic; when each other worker has polled as often as this one

    def count(self) -> None:
        """Count a claim of few events."""
        self._claims_end = max(self._claims_end, monotonic()) + CLAIM_INTERVAL

    def count_poll(self, took: float, *, others: int) -> None:
        """Count a poll of ``took`` seconds that left nothing due; ``others``: live workers."""
        theirs = took * others * random.uniform(0, 2)  # or all would poll at the same time
        self._turn = max(self._turn, monotonic()) + min(theirs, LONGEST_WAIT)

    def next_poll(self) -> float:
        """Return when (monotonic) it is this worker's turn to poll."""
        return self._turn - BURST

    def pause(self) -> float:
        """Return the seconds to wait before the next claim, if small ones came without a pause."""
        now = monotonic()
        if self._claims_end - now <= BURST:
            return 0.0
        self._claims_end = max(self._claims_end, now + GATHER_TIME + BURST)  # the load goes on
        return GATHER_TIME


class TokenBucket:
    """This worker's share of the events per second that a queue may deliver.

    It holds one second's worth of events, or one event if that is more. The rate is divided by the
    live workers that serve the queue; until their number is known, nothing is available. At first
    the bucket has a random part of one event: so workers that are restarted often deliver neither
    more than the rate, on average, nor less. The claimer's thread only, but for ``set_workers``.
    """

    def __init__(self, rate: float) -> None:
        """``rate``: events per second of all workers together."""
        self._rate = rate
        self._workers = 0  # live workers that serve the queue; 0: not known yet
        self._share = 0.0  # events per second
        self._tokens, self._at = random.random(), monotonic()

    def set_workers(self, count: int) -> None:
        """Set the number of live workers that serve the queue, this one included."""
        self._workers = count

    def available(self) -> int:
        """Return how many events may be claimed now."""
        now, share = monotonic(), self._rate / self._workers if self._workers else 0.0
        gathered = (now - self._at) * share if self._share else 0.0
        self._tokens = min(self._tokens + gathered, max(share, 1.0))
        self._at, self._share = now, share
        return int(self._tokens)

    def spend(self, count: int) -> None:
        """Count claimed events; fewer than 0: some were released. Too many delay later ones."""
        self._tokens -= count

    def wait(self) -> float:
        """Return the seconds until enough events for a claim may be claimed."""
        if not self._share:
            return WORTHWHILE
        return max((max(self._share * WORTHWHILE, 1.0) - self._tokens) / self._share, 0.0)
