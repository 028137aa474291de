"""The housekeeper: purges, ends pauses, and moves what waits in queues that are not configured.

It has a thread and a database connection of its own, so no claim waits for it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection
from functools import partial
from math import inf

from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..models.pause_queryset import bring_home
from ..queue_settings import DEFAULT_QUEUE
from ..sql.values import EVENTS, STREAMS
from .effects import Steps, ask, in_turn
from .pauses import READ_INTERVAL, KnownPauses, end_pauses
from .purger import Purger
from .wakeup import Wakeup

logger = logging.getLogger("django_outbox")

SEARCH_INTERVAL = 20.0  # seconds between searches for queues that are not configured
BATCH = 500  # rows that are moved together


class Housekeeper:
    """Does what is due of this work in each step. One thread only."""

    def __init__(
        self,
        *,
        purger: Purger | None,
        known_pauses: KnownPauses,
        wakeup: Wakeup,
        configured: Collection[str],
        adopts: bool,
    ) -> None:
        """``adopts``: it moves what waits in queues that are not ``configured``."""
        self._purger, self._known_pauses, self._wakeup = purger, known_pauses, wakeup
        self._configured = configured
        # Monotonic: the next search and step of the purge, the end of pauses that was handled.
        self._search_at = monotonic() + random.uniform(0.0, SEARCH_INTERVAL) if adopts else inf
        self._purge_at, self._ended_at = 0.0 if purger else inf, 0.0

    def step(self) -> Steps[float]:
        """Do what is due; return the seconds until the next step."""
        yield from in_turn(self._end_pauses(), self._adopt(), self._purge())
        now = monotonic()
        # The claimer may know of another end.
        times = [self._purge_at, self._search_at, now + READ_INTERVAL]
        if self._known_pauses.ends_at != self._ended_at:
            times.append(self._known_pauses.ends_at)
        return max(min(times) - now, 0.001)

    def close(self) -> Steps[None]:
        """Let another worker continue the purge."""
        if self._purger is not None:
            yield from self._purger.close()

    def _purge(self) -> Steps[None]:
        if self._purger is not None and monotonic() >= self._purge_at:
            pause = yield from self._purger.step()
            self._purge_at = monotonic() + pause

    def _end_pauses(self) -> Steps[None]:
        ends_at = self._known_pauses.ends_at
        if self._ended_at != ends_at <= monotonic():
            yield lambda connection: end_pauses(connection.alias)
            self._ended_at = ends_at
            self._known_pauses.expire()
            self._wakeup.poll()

    def _adopt(self) -> Steps[None]:
        """Move due events and streams of unknown queues to ``default``, if it is time.

        What is parked for a pause that has ended goes to the queues of its listeners.
        """
        if monotonic() < self._search_at:
            return
        self._search_at = monotonic() + SEARCH_INTERVAL * random.uniform(0.8, 1.2)
        more = False
        for queue in (yield ask("other_queues", known=self._configured)):
            count = 0
            for table in (EVENTS, STREAMS):
                count += yield ask("move", table, of=queue, queue=DEFAULT_QUEUE, limit=BATCH)
            if count:
                more = True
                logger.warning(
                    "queue not configured, its events are delivered by default queue=%s count=%d",
                    queue,
                    count,
                )
        for pause in (yield ask("stranded")):  # its resume was interrupted
            more = (yield partial(_bring_home, pause)) or more
        if more:
            self._search_at = 0.0
            self._wakeup.poll()


def _bring_home(pause: int, connection: BaseDatabaseWrapper) -> bool:
    """Move a batch of what is parked for a pause that is over; return whether there was one."""
    return next(bring_home(connection, pause), None) is not None
