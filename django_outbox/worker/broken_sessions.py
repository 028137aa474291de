"""Notes when a database session of a worker broke: if one is gone, others often are, too."""

from __future__ import annotations

import math

from ..clocks import monotonic


class BrokenSessions:
    """Any thread that finds a broken session calls ``broke``; each checks before it delivers."""

    def __init__(self) -> None:
        self.broke_at = -math.inf  # monotonic; set by any thread

    def broke(self) -> None:
        self.broke_at = monotonic()
