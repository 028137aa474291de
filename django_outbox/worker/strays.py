"""Moves events that wait in a queue that is not configured, where no worker would find them."""

from __future__ import annotations

import logging
import random

from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..queue_settings import DEFAULT_QUEUE
from ..sql import dialect_of
from ..sql.values import EVENTS, STREAMS

logger = logging.getLogger("django_outbox")

SEARCH_INTERVAL = 20.0  # seconds between searches for queues that are not configured
BATCH = 500  # rows that are checked or moved together


class Strays:
    """Moves rows of unknown queues to ``default``. The claimer's thread only."""

    def __init__(self, *, queues: set[str], configured: set[str]) -> None:
        """``queues`` are served by this worker."""
        self._queues, self._configured = queues, configured
        self._search_at = monotonic() + random.uniform(0.0, SEARCH_INTERVAL)

    def step(self, connection: BaseDatabaseWrapper, now: float) -> bool:
        """Search or move, if it is time; return whether events were moved to a queue served here.

        One batch a call, because claims wait meanwhile.
        """
        moved = False
        if DEFAULT_QUEUE in self._queues and now >= self._search_at:
            self._search_at = now + SEARCH_INTERVAL * random.uniform(0.8, 1.2)
            moved = self._adopt(connection)
        return moved

    def next_step(self) -> float:
        """Return when (monotonic) there is something to do, as far as is known now."""
        return self._search_at

    def _adopt(self, connection: BaseDatabaseWrapper) -> bool:
        """Move due events and streams of unknown queues to ``default``; return whether any were."""
        dialect, moved = dialect_of(connection), False
        for queue in dialect.other_queues(known=self._configured):
            count = sum(
                dialect.move(table, of=queue, queue=DEFAULT_QUEUE, limit=BATCH)
                for table in (EVENTS, STREAMS)
            )
            if count:
                logger.warning(
                    "queue not configured, its events are delivered by default queue=%s count=%d",
                    queue,
                    count,
                )
                moved, self._search_at = True, 0.0  # there may be more
        return moved
