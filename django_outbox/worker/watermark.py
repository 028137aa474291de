"""The watermark: where a claim resumes, so that it does not scan the whole index each time.

Settled rows leave entries in an index until no open snapshot can see them. A full scan, from the
beginning of the index, reads all of them: while a snapshot of some minutes was open, that alone
kept workers busy.
"""

from __future__ import annotations

from ..clocks import monotonic
from ..sql.values import Found

# Seconds; what was due that long before a claim started may commit after it.
LATE_COMMIT_MARGIN = 1.0


class Watermark:
    """Lets each claim resume where the one before it ended. One thread only.

    Rows below the watermark committed late, or were locked when the claim passed them. Only a full
    scan finds those.
    """

    def __init__(self, *, margin: float = 0.0) -> None:
        """``margin``: seconds for which a claim leaves due rows alone."""
        self._margin = LATE_COMMIT_MARGIN + margin
        self._low = self._started = 0.0  # monotonic; a claim scans rows that are due since

    def set(self, started: float, waited: float) -> None:
        """Set it to what had been due for ``waited`` seconds when a claim ``started``."""
        self._low = started - waited - self._margin

    def lower(self, waited: float) -> None:
        """Lower it to what has been due for ``waited`` seconds, though a claim has passed it."""
        self._low = min(self._low, monotonic() - waited - self._margin)

    def begin_claim(self, *, scan: bool) -> float | None:
        """Return for how many seconds the rows to scan have been due at most; None: a full scan."""
        self._started = monotonic()
        return None if scan else self._started - self._low

    def end_claim(self, found: Found, *, skipped: bool = False) -> None:
        """Set the watermark after a claim, unless it ``skipped`` due rows."""
        if not skipped:
            self.set(self._started, found.waited if found.more else 0.0)
