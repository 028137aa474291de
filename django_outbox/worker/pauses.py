"""Caches what is paused, and postpones paused events that are due, so that others get through."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from math import inf
from typing import Final

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..delivery.paused import closed_queues, is_paused
from ..models import OutboxPause
from ..sql import dialect_of
from ..sql.values import CLOSING_KINDS, DueRow, Pauses

logger = logging.getLogger("django_outbox")

READ_INTERVAL: Final = 1.0  # seconds after which the table is read again before a claim
# Seconds; the same after a notification, while something is paused.
NOTIFIED_READ_INTERVAL: Final = 0.05
CHECK_BATCH: Final = 500  # due rows that are checked together
LATE_COMMIT_MARGIN: Final = timedelta(seconds=1)  # for rows that commit late, as in a claim


class KnownPauses:
    """What is paused. Only the thread that claims updates it; other threads read it."""

    def __init__(self) -> None:
        self.pauses: Pauses = frozenset()
        self.closed: frozenset[str] = frozenset()  # queues that are paused
        # When (monotonic) the pause of each open breaker is over, and its length in seconds.
        self.breakers: Mapping[str, tuple[float, float]] = {}
        self.ends_at = inf  # monotonic; when the first pause ends that has an end
        self._pauses_rows = False  # a pause holds for some rows, not for a queue
        self._read_at = -inf  # monotonic
        self._checked: dict[str, DueRow | None] = {}  # rows due before these are checked already

    def refresh(self, connection: BaseDatabaseWrapper, *, notified: bool = False) -> None:
        """Read the pauses from the table, unless that was done just now."""
        # While nothing is paused, a notification is about events, which must not wait for this.
        interval = NOTIFIED_READ_INTERVAL if notified and self.pauses else READ_INTERVAL
        if monotonic() >= self._read_at + interval:
            self.read(connection)

    def expire(self) -> None:
        """Have the pauses read again before the next claim. Any thread may call it."""
        self._read_at = -inf

    def read(self, connection: BaseDatabaseWrapper) -> None:
        self._read_at = monotonic()
        found, now = dialect_of(connection).pauses(), monotonic()
        self._set(frozenset(found))
        ends = {each: now + times.left for each, times in found.items() if times.left is not None}
        self.breakers = {
            name: (at, found[kind, name].length)
            for (kind, name), at in ends.items()
            if kind == "breaker"
        }
        others = [at for (kind, _), at in ends.items() if kind != "breaker"]
        self.ends_at = min(others, default=inf)

    def _set(self, pauses: Pauses) -> None:
        if pauses != self.pauses:
            self.pauses, self.closed = pauses, closed_queues(pauses)
            self._pauses_rows = any(kind not in CLOSING_KINDS for kind, _ in pauses)

    def is_paused_row(self, row: DueRow) -> bool:
        """Return whether a row is paused that has no key."""
        return is_paused(self.pauses, row.event_type, row.listener, None)

    def postpone_due(
        self, connection: BaseDatabaseWrapper, limits: Mapping[str, int]
    ) -> dict[str, int]:
        """Postpone paused rows among those due first; return how many rows a claim may ask for.

        ``limits`` has the same by queue, without regard to pauses. So the claim needs no other
        statement, and never scans paused rows. A result is 0 while there may be more paused rows
        in front.
        """
        left = {queue: limit for queue, limit in limits.items() if limit > 0}
        if not self._pauses_rows or not left:
            return {**limits}
        dialect, since = dialect_of(connection), {each: self._checked.get(each) for each in left}
        rows = dialect.due_first(limit=CHECK_BATCH, since=since)
        held = {each.id for each in rows if self.is_paused_row(each)}
        by_queue: dict[str, list[DueRow]] = {queue: [] for queue in left}
        for row in rows:
            by_queue[row.queue].append(row)
        for queue, some in by_queue.items():
            full = len(some) == CHECK_BATCH
            self._checked[queue] = (
                some[0]._replace(due_at=some[0].due_at - LATE_COMMIT_MARGIN, id="")
                if full
                else None
            )
            if full:
                left[queue] = min(left[queue], sum(each.id not in held for each in some))
        if held:
            newest = max(each.due_at for each in rows)
            count, found = dialect.postpone(ids=[*held], newest=newest, pauses=self.pauses)
            if found != self.pauses:
                self._read_at = -inf
                self._set(found)
                return dict.fromkeys(limits, 0)
            if not count:  # others have them locked; if a claim gets some, they are deferred
                return {**limits}
        return {**limits, **left}


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
