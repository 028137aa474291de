"""On PYTHONPATH it puts ``time.time()`` OUTBOX_TEST_SKEW seconds off, and with it the new ULIDs.

Monotonic time, and so all waiting, goes on as it should; so does ``datetime.now()``, whose class
msgspec will not have replaced.
"""

from __future__ import annotations

import os
import time

SKEW = float(os.environ.get("OUTBOX_TEST_SKEW", "0"))

if SKEW:
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + SKEW
    time.time_ns = lambda: real_ns() + int(SKEW * 1e9)
