"""Deletes what is past its retention, batch by batch, where the worker has time.

Its thread has the time for another look that may take a while: for the oldest due event.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from math import inf

from django.db import DatabaseError

from ..models import purge_batches, purge_inbox, purge_statistics, purge_streams
from ..signals import announce, events_purged
from .reach import Rest
from .statistics import Statistics

logger = logging.getLogger("django_outbox")

LONGEST = 15.0  # seconds for one table in a run; as long a rest follows before it goes on


class Purger:
    """One run every ``PURGE_INTERVAL``, jittered; the first soon after the start.

    A run that is cut by its time goes on soon, where it stopped: the walk of each table is kept.
    """

    def __init__(self, *, alias: str, interval: float | None, statistics: Statistics) -> None:
        """``interval``: seconds between two runs; None: there are none."""
        self._alias, self._interval, self._statistics = alias, interval or inf, statistics
        self._run_at = 0.0 if interval else inf  # monotonic
        self._cut: dict[str, Iterator[int]] = {}  # walks whose time was over, by what they purge
        self._rest = Rest()  # beside an open snapshot a run walks over all that was deleted since
        self.stopping = False

    def step(self) -> float:
        pause = self._statistics.look()
        if time.monotonic() >= self._run_at:
            rest = self.run()
            self._run_at = time.monotonic() + rest
        return max(min(pause, self._run_at - time.monotonic()), 0.001)

    def run(self) -> float:
        """Purge; return the seconds until the next run."""
        started = time.monotonic()
        if events := self._purge("events", purge_batches):
            logger.info("purged events=%d", events)
            announce(events_purged, sender=self._alias, count=events)
        if messages := self._purge("messages", purge_inbox):
            logger.info("purged received_messages=%d", messages)
        if streams := self._purge("streams", purge_streams):
            logger.info("purged streams=%d", streams)
        self._trim_statistics()
        if self._cut:
            return min(LONGEST, self._interval)
        self._rest.after(started)
        pause = max(self._interval, self._rest.until - time.monotonic())
        return pause * random.uniform(0.9, 1.1)

    def _trim_statistics(self) -> None:
        try:
            self._purge("statistics", purge_statistics)
        except DatabaseError as error:  # all of the purge would be repeated for it
            logger.warning("statistics could not be trimmed error=%s", error)

    def _purge(self, what: str, begin: Callable[[str], Iterator[int]]) -> int:
        walk, total = self._cut.pop(what, None) or begin(self._alias), 0
        until = time.monotonic() + LONGEST
        for count in walk:
            total += count
            if self.stopping or time.monotonic() > until:
                self._cut[what] = walk
                break
        return total
