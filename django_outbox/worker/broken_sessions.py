"""Notes when a database session of a worker broke: if one is gone, others often are, too."""

from __future__ import annotations

import math

from ..clocks import monotonic


class BrokenSessions:
    """A thread that finds a broken session reports it; all check ``broke_at`` before a delivery."""

    def __init__(self) -> None:
        self.broke_at = -math.inf  # monotonic; set by any thread

    def report_broken(self) -> None:
        self.broke_at = monotonic()
