"""When a database session of a worker broke: where one is gone, the others often are, too."""

from __future__ import annotations

import math
import time


class Sessions:
    """Told by whoever meets a broken session; read by each thread before it delivers."""

    def __init__(self) -> None:
        self.broke_at = -math.inf  # monotonic; set by any thread

    def broke(self) -> None:
        self.broke_at = time.monotonic()
