"""The monotonic clock that measures leases; on Linux it runs on while the host is suspended."""

from __future__ import annotations

import time

# Linux's CLOCK_MONOTONIC stops while a host or virtual machine is suspended. The database's clock
# does not, so a lease that still looks valid after the resume could already be another worker's.
if hasattr(time, "CLOCK_BOOTTIME"):

    def monotonic() -> float:
        """Return seconds since the host booted, including time in which it was suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def monotonic() -> float:
        """Return seconds on the monotonic clock; some systems stop it while suspended."""
        return time.monotonic()
