"""The harness's own clock, and the lines that processes log by it.

It is the machine's monotonic one even where a process takes ``time.monotonic()`` for another.
"""

from __future__ import annotations

import logging
import time


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Formatter(logging.Formatter):
    """Begins each line with the time and the process."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{now():.3f} {record.process} {record.levelname} {super().format(record)}"


class Evidence(logging.Filter):
    """Lets through what is of level INFO or above, and each retry after a timeout."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.DEBUG:
            return True
        return str(record.msg).startswith("retry ") and ".ListenerTimeout" in str(record.args)
