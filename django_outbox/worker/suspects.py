"""Decides when a suspect, an event that may kill its process, runs alone; others wait briefly."""

from __future__ import annotations

from ..clocks import monotonic
from .queues import Held

MAX_CLAIM_PAUSE = 5.0  # seconds for which other claims pause, at most
# Seconds before claims may pause again after a suspect could not run alone: at first, and at most.
# While listeners never end, claims pause for a twentieth of the time, and less and less.
RETRY_WAITS = (100.0, 3600.0)


class Trial:
    """Pauses all other claims until a suspect can run alone, and while it runs. One thread only."""

    def __init__(self, *, lease: float, held: Held) -> None:
        """``lease`` is in seconds."""
        self._max_pause = min(lease, MAX_CLAIM_PAUSE)
        self._held = held
        self._since: float | None = None  # monotonic; since when other claims pause
        self._not_before = 0.0  # monotonic; when claims may pause again
        self._pause = RETRY_WAITS[0]  # seconds after the next trial that is given up
        self.begun = False  # the suspect is in flight

    @property
    def is_on(self) -> bool:
        return self._since is not None

    def is_allowed(self, now: float) -> bool:
        """Return whether claims may pause now: nothing is in flight, or it is time again."""
        return not len(self._held) or now >= self._not_before

    def schedule(self, at: float) -> None:
        """Pause other claims from ``at`` (monotonic) on, unless they pause already."""
        if self._since is None:
            self._since, self.begun = at, False

    def begin(self) -> None:
        """Note that the suspect was claimed; nothing else is in flight."""
        self._since, self.begun = monotonic(), True

    def end(self) -> None:
        """Resume other claims: the suspect is settled, or there was none."""
        self._since, self.begun = None, False
        self._not_before, self._pause = 0.0, RETRY_WAITS[0]

    @property
    def is_due(self) -> bool:
        """Return whether the time has come from which other claims pause."""
        return self._since is not None and monotonic() >= self._since

    @property
    def lasts_too_long(self) -> bool:
        return self._since is not None and monotonic() - self._since > self._max_pause

    def give_up(self) -> None:
        """Resume other claims while events still run; pause again later, less and less often."""
        self._since, self.begun = None, False
        self._not_before = monotonic() + self._pause
        self._pause = min(2 * self._pause, RETRY_WAITS[1])
