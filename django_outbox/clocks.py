"""The monotonic clock that measures leases; on Linux it runs on while the host is suspended."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

# Returns seconds since the host booted. Linux's CLOCK_MONOTONIC stops while a host or virtual
# machine is suspended. The database's clock does not, so a lease that still looks valid after the
# resume could already be another worker's.
monotonic: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)
