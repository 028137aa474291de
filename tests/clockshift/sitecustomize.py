"""On PYTHONPATH it puts ``time.time()`` OUTBOX_TEST_SKEW seconds off, and with it the new ULIDs.

OUTBOX_TEST_JUMP, ``after:seconds``, has it jump once, so long after the start of the process.

Monotonic time, and so all waiting, goes on as it should; so does ``datetime.now()``, whose class
msgspec will not have replaced.
"""

from __future__ import annotations

import os
import time

SKEW = float(os.environ.get("OUTBOX_TEST_SKEW", "0"))

AFTER, _, BY = os.environ.get("OUTBOX_TEST_JUMP", "").partition(":")
STARTED = time.monotonic()


def shift() -> float:
    jumped = bool(BY) and time.monotonic() - STARTED > float(AFTER)
    return SKEW + float(BY) if jumped else SKEW


if SKEW or BY:
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + shift()
    time.time_ns = lambda: real_ns() + int(shift() * 1e9)
