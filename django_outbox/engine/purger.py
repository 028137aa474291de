"""Deletes finished events past their retention, batch by batch, where the worker has time."""

from __future__ import annotations

import logging
import random
import time

from ..models import purge_batches
from ..signals import announce, events_purged

logger = logging.getLogger("django_outbox")

LONGEST = 60.0  # seconds of one run; the next one goes on at its interval


class Purger:
    """One run every ``PURGE_INTERVAL``, jittered; the first soon after the start."""

    def __init__(self, *, alias: str, interval: float) -> None:
        self._alias, self._interval = alias, interval
        self.stopping = False

    def step(self) -> float:
        until = time.monotonic() + LONGEST
        total = 0
        for count in purge_batches(self._alias):
            total += count
            if self.stopping or time.monotonic() > until:
                break
        if total:
            logger.info("purged count=%d", total)
            announce(events_purged, sender=self._alias, count=total)
        return self._interval * random.uniform(0.9, 1.1)
