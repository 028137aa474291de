"""Deletes what is past its retention, batch by batch, where the worker has time."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator

from ..models import purge_batches, purge_inbox, purge_streams
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
        if events := self._purge(purge_batches(self._alias), until):
            logger.info("purged events=%d", events)
            announce(events_purged, sender=self._alias, count=events)
        if messages := self._purge(purge_inbox(self._alias), until):
            logger.info("purged received_messages=%d", messages)
        if streams := self._purge(purge_streams(self._alias), until):
            logger.info("purged streams=%d", streams)
        return self._interval * random.uniform(0.9, 1.1)

    def _purge(self, batches: Iterator[int], until: float) -> int:
        total = 0
        for count in batches:
            total += count
            if self.stopping or time.monotonic() > until:
                break
        return total
