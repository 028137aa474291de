"""Moves events that wait in a queue where they would not be found: unknown or paused ones."""

from __future__ import annotations

import logging
import random

from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..listeners import registry
from ..listeners.progress import entries
from ..listeners.queues import next_due, queue_of
from ..queue_settings import DEFAULT_QUEUE
from ..sql import dialect_of
from ..sql.values import DueRow
from .pauses import KnownPauses
from .throttle import Throttle

logger = logging.getLogger("django_outbox")

SEARCH_INTERVAL = 20.0  # seconds between searches for queues that are not configured
BATCH = 500  # rows that are checked or moved together
PASS_INTERVAL = 1.0  # seconds between passes over a paused queue, at least


class Strays:
    """Moves rows to the queue of the listener that is due next. The claimer's thread only."""

    def __init__(self, *, queues: set[str], configured: set[str], known_pauses: KnownPauses):
        """``queues`` are served by this worker."""
        self._queues, self._configured, self._known_pauses = queues, configured, known_pauses
        self._search_at = monotonic() + random.uniform(0.0, SEARCH_INTERVAL)
        self._passes: dict[str, Throttle] = {}  # over paused queues
        self._last: dict[str, DueRow] = {}  # the row where a pass over a paused queue goes on
        self._pass_began: dict[str, float] = {}  # monotonic

    def step(self, connection: BaseDatabaseWrapper, now: float) -> bool:
        """Search or move, if it is time; return whether events were moved to a queue served here.

        One batch a call, because claims wait meanwhile.
        """
        moved = False
        if DEFAULT_QUEUE in self._queues and now >= self._search_at:
            self._search_at = now + SEARCH_INTERVAL * random.uniform(0.8, 1.2)
            moved = self._adopt(connection)
        for queue in self._paused_queues():
            if now >= self._throttle(queue).until:
                moved |= self._check_paused(connection, queue)
        for queue in self._last.keys() - self._known_pauses.closed:
            del self._last[queue]
        return moved

    def next_step(self) -> float:
        """Return when (monotonic) there is something to do, as far as is known now."""
        return min(
            [self._search_at, *(self._throttle(each).until for each in self._paused_queues())]
        )

    # -- queues that are not configured ----------------------------------------------------------

    def _adopt(self, connection: BaseDatabaseWrapper) -> bool:
        """Move due events and streams of unknown queues to ``default``; return whether any were."""
        dialect, moved = dialect_of(connection), False
        for queue in dialect.other_queues(connection, known=self._configured):
            rows = dialect.due_first(connection, limit=BATCH, since={queue: None})
            count = dialect.move_streams(connection, of=queue, queue=DEFAULT_QUEUE, limit=BATCH)
            if rows:
                count += dialect.move(
                    connection,
                    ids=[each.id for each in rows],
                    queue=DEFAULT_QUEUE,
                    newest=rows[-1].due_at,
                )
            if count:
                logger.warning(
                    "queue not configured, its events are delivered by default queue=%s count=%d",
                    queue,
                    count,
                )
                moved, self._search_at = True, 0.0  # there may be more
        return moved

    # -- paused queues ---------------------------------------------------------------------------

    def _paused_queues(self) -> list[str]:
        """Return the paused queues whose listeners may share events with those of another."""
        closed = self._known_pauses.closed
        if not closed:
            return []
        used = {queue_of(each) for each in registry.listeners()}
        return [each for each in closed & self._configured if used - {each}]

    def _check_paused(self, connection: BaseDatabaseWrapper, queue: str) -> bool:
        """Move events of a paused queue that a listener of another queue is due for."""
        dialect, last = dialect_of(connection), self._last.get(queue)
        if last is None:
            self._pass_began[queue] = monotonic()
        rows = dialect.due_first(connection, limit=BATCH, since={queue: last})
        closed, moved = self._known_pauses.closed, False
        targets: dict[str, list[str]] = {}
        for row in rows:
            listeners = registry.route(row.aggregate_type, row.event_type)
            found = next_due(listeners, entries(row.progress) or {}, row.now, closed)
            if found is not None and found[1] is None:  # it is due now
                targets.setdefault(queue_of(found[0]), []).append(row.id)
        for target in targets.keys() - closed:
            ids = targets[target]
            count = dialect.move(connection, ids=ids, queue=target, newest=rows[-1].due_at)
            moved |= count > 0 and target in self._queues
        if len(rows) == BATCH:
            self._last[queue] = rows[-1]
        else:
            self._last.pop(queue, None)
            self._throttle(queue).after(self._pass_began[queue], least=PASS_INTERVAL)
        return moved

    def _throttle(self, queue: str) -> Throttle:
        return self._passes.setdefault(queue, Throttle())
