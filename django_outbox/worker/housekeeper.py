"""The housekeeper: purges, ends pauses, and moves what waits in queues that are not configured.

It has a thread and a database connection of its own, so no claim waits for it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..models.pause_queryset import bring_home
from ..queue_settings import DEFAULT_QUEUE
from ..sql import dialect_of
from ..sql.halving import in_turn
from ..sql.values import EVENTS, STREAMS
from .pauses import READ_INTERVAL, KnownPauses, end_pauses
from .purger import Purger
from .wakeup import Wakeup

logger = logging.getLogger("django_outbox")

SEARCH_INTERVAL = 20.0  # seconds between searches for queues that are not configured
BATCH = 500  # rows that are moved together


class Housekeeper:
    """Does what is due of this work in each step. One thread only, except for ``stop``."""

    def __init__(
        self,
        *,
        alias: str,
        purger: Purger,
        known_pauses: KnownPauses,
        wakeup: Wakeup,
        queues: Collection[str],
        configured: Collection[str],
    ) -> None:
        """``queues`` are served by this worker."""
        self._alias, self._purger = alias, purger
        self._known_pauses, self._wakeup = known_pauses, wakeup
        self._serves_default, self._configured = DEFAULT_QUEUE in queues, configured
        self._search_at = monotonic() + random.uniform(0.0, SEARCH_INTERVAL)
        self._next_purge = 0.0  # monotonic
        self._ended_at = 0.0  # monotonic; the end of pauses that was seen to last

    def step(self) -> float:
        """Do what is due; return the seconds until the next step."""
        connection = connections[self._alias]
        in_turn(connection, self._end_pauses, lambda: self._adopt(connection), self._purge)
        now = monotonic()
        times = [self._next_purge, now + READ_INTERVAL]  # the claimer may know of another end
        if self._serves_default:
            times.append(self._search_at)
        if self._known_pauses.ends_at != self._ended_at:
            times.append(self._known_pauses.ends_at)
        return max(min(times) - now, 0.001)

    def stop(self) -> None:
        """Have a step end soon. Any thread may call it."""
        self._purger.stopping = True

    def close(self) -> None:
        """Let another worker continue the purge. Call it in the thread of ``step``."""
        self._purger.close()

    def _purge(self) -> None:
        if monotonic() >= self._next_purge:
            self._next_purge = monotonic() + self._purger.step()

    def _end_pauses(self) -> None:
        ends_at = self._known_pauses.ends_at
        if self._ended_at != ends_at <= monotonic():
            end_pauses(self._alias)
            self._ended_at = ends_at
            self._known_pauses.expire()
            self._wakeup.poll()

    def _adopt(self, connection: BaseDatabaseWrapper) -> None:
        """Move due events and streams of unknown queues to ``default``, if it is time.

        What is parked for a pause that has ended goes to the queues of its listeners.
        """
        if not self._serves_default or monotonic() < self._search_at:
            return
        self._search_at = monotonic() + SEARCH_INTERVAL * random.uniform(0.8, 1.2)
        dialect, more = dialect_of(connection), False
        for queue in dialect.other_queues(known=self._configured):
            count = sum(
                dialect.move(table, of=queue, queue=DEFAULT_QUEUE, limit=BATCH)
                for table in (EVENTS, STREAMS)
            )
            if count:
                more = True
                logger.warning(
                    "queue not configured, its events are delivered by default queue=%s count=%d",
                    queue,
                    count,
                )
        for pause in dialect.stranded():  # its resume was interrupted
            more = next(bring_home(connection, pause), None) is not None or more
        if more:
            self._search_at = 0.0
            self._wakeup.poll()
