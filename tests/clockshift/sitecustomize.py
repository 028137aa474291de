"""On PYTHONPATH it puts ``time.time()`` OUTBOX_TEST_SKEW seconds off, and with it the new ULIDs.

OUTBOX_TEST_JUMP, ``after:seconds``, has it jump once, so long after the start of the process.

OUTBOX_TEST_STILL names a file with a number of seconds, a C double, which ``time.monotonic()`` is
behind: somebody who stops the process writes there for how long it stood still, as the clock of a
suspended machine does. ``time.clock_gettime(time.CLOCK_BOOTTIME)`` goes on.

Else monotonic time, and so all waiting, goes on as it should; so does ``datetime.now()``, whose
class msgspec will not have replaced.
"""

from __future__ import annotations

import mmap
import os
import struct
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

if STILL := os.environ.get("OUTBOX_TEST_STILL"):
    with open(STILL, "rb") as file:  # noqa: PTH123 - what starts every process imports little
        lost = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    real_monotonic = time.monotonic
    time.monotonic = lambda: real_monotonic() - struct.unpack("d", lost[:8])[0]
