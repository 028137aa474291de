"""The watermark: where a claim resumes, so that it does not scan the whole index each time.

Settled rows leave entries in an index until no open snapshot can see them. A full scan, from the
beginning of the index, reads all of them: while a snapshot of some minutes was open, that alone
kept workers busy.
"""

from __future__ import annotations

from math import inf

from ..clocks import monotonic
from ..sql.values import Claimed
from .throttle import FULL_SCAN_FACTOR, Throttle

MARGIN = 1.0  # seconds; what was due that long before a claim started may commit after it


class Watermark:
    """Lets each claim resume where the one before it ended. One thread only.

    Rows below the watermark committed late, or were locked when the claim passed them. Only a full
    scan finds those.
    """

    def __init__(self, *, margin: float = 0.0) -> None:
        """``margin``: seconds for which a claim leaves due rows alone."""
        self._margin = MARGIN + margin
        self._low = self._started = 0.0  # monotonic; from when on due rows are looked for

    def begin(self, started: float, waited: float) -> None:
        """Set it to what had been due for ``waited`` seconds when a scan ``started``."""
        self._low = started - waited - self._margin

    def include(self, waited: float) -> None:
        """Lower it to what has been due for ``waited`` seconds, though a claim has passed it."""
        self._low = min(self._low, monotonic() - waited - self._margin)

    def age(self) -> float | None:
        """Start a claim: return how many seconds back it has to look; None: a full scan."""
        self._started = monotonic()
        return self._started - self._low

    def note(self, found: Claimed, *, skipped: bool = False) -> None:
        """End the claim that found this: all that was due, or the first of it; or skipped some."""
        if not skipped:
            self.begin(self._started, found.waited if found.more else 0.0)


class ScanningWatermark(Watermark):
    """A watermark that makes some of the claims full scans, as often as their cost allows."""

    def __init__(self, *, factor: float = FULL_SCAN_FACTOR) -> None:
        """``factor`` as of ``Throttle``; 0: every claim is a full scan."""
        super().__init__()
        self._throttle = Throttle(factor)
        self._scanned = True  # by the last claim

    def age(self) -> float | None:
        age = super().age()
        self._scanned = self._started >= self._throttle.until
        return None if self._scanned else age

    def note(self, found: Claimed, *, skipped: bool = False) -> None:
        super().note(found, skipped=skipped)
        if self._scanned:
            self._throttle.after(self._started)

    def next_scan(self) -> float:
        """Return when (monotonic) the rows below the watermark are looked for; inf: they were."""
        return inf if self._scanned else self._throttle.until
