"""Caches what is paused, and parks what is due and paused, so that others get through."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from math import inf
from typing import Final

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..models import OutboxPause
from ..models.pause_queryset import holding
from ..sql import dialect_of
from ..sql.values import CLOSING_KINDS, NO_PAUSES
from .effects import Steps

logger = logging.getLogger("django_outbox")

READ_INTERVAL: Final = 1.0  # seconds after which the table is read again before a claim
# Seconds; the same after a notification, while something is paused.
NOTIFIED_READ_INTERVAL: Final = 0.05
PARKED_AT_ONCE: Final = 500  # rows due first of a queue, among which paused ones are looked for


class KnownPauses:
    """What is paused. Only the thread that claims updates it; other threads read it."""

    def __init__(self) -> None:
        self.pauses = NO_PAUSES
        self.closed: frozenset[str] = frozenset()  # queues that are paused
        # When (monotonic) the pause of each open breaker is over, and its length in seconds.
        self.breakers: Mapping[str, tuple[float, float]] = {}
        self.ends_at = inf  # monotonic; when the first pause ends that has an end
        self._read_at = -inf  # monotonic

    def refresh(self, *, notified: bool = False) -> Steps[None]:
        """Read the pauses from the table, unless that was done just now."""
        # While nothing is paused, a notification is about events, which must not wait for this.
        interval = NOTIFIED_READ_INTERVAL if notified and self.pauses else READ_INTERVAL
        if monotonic() >= self._read_at + interval:
            yield self.read

    def expire(self) -> None:
        """Have the pauses read again before the next claim. Any thread may call it."""
        self._read_at = -inf

    def read(self, connection: BaseDatabaseWrapper) -> None:
        self._read_at = monotonic()
        found, now = dialect_of(connection).pauses(), monotonic()
        self.pauses = {name: times.id for name, times in found.items()}
        self.closed = frozenset(name for kind, name in found if kind in CLOSING_KINDS)
        ends = {each: now + times.left for each, times in found.items() if times.left is not None}
        self.breakers = {
            name: (at, found[kind, name].length)
            for (kind, name), at in ends.items()
            if kind == "breaker"
        }
        others = [at for (kind, _), at in ends.items() if kind != "breaker"]
        self.ends_at = min(others, default=inf)

    def holding(self, event_type: str, listener: str | None, key: str | None) -> int | None:
        """Return the id of a pause that holds back a delivery; None if none does."""
        return holding(self.pauses, event_type, listener, key)

    def park(
        self, connection: BaseDatabaseWrapper, rows: Mapping[str, int], queues: Collection[str]
    ) -> None:
        """Park rows, by id, for these pauses, and what else is paused of what is due first."""
        dialect, found = dialect_of(connection), {**rows}
        for row_id, *named in dialect.due_first(queues=queues, limit=PARKED_AT_ONCE):
            if (pause := self.holding(*named)) is not None:
                found[row_id] = pause
        if found and dialect.park(found):
            self.read(connection)


def end_pauses(alias: str) -> None:
    """End pauses whose ``until`` has passed, as a resume does.

    If several workers notice, one of them deletes the pause and does the rest.
    """
    pauses = OutboxPause.objects.using(alias)
    for pause in pauses.ended().order_by("until", "pk"):
        resumed = pauses.filter(pk=pause.pk).resume()
        if resumed.pauses:
            logger.info(
                "pause ended kind=%s name=%s events=%d streams=%d",
                pause.kind,
                pause.name,
                resumed.events,
                resumed.streams,
            )
            doorbell.ring(connections[alias])
