"""Counts in memory what a worker settles, and writes the counts from another thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial

from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..delivery.lease import Lease
from ..listeners.outcomes import Decision
from ..log import first_line
from ..models import OutboxStatistics, write_statistics
from ..models.statistics import COUNTS, OUTCOMES, RUN_COLUMNS, WAIT_COLUMNS, bucket
from .effects import Steps, ask

logger = logging.getLogger("django_outbox")

WRITE_INTERVAL = 10.0  # seconds between two writes, at least; a killed worker loses no more
MAX_TYPES = 20  # event types that get rows of their own in one minute; all others share one

RESCUED, WAIT, RUN = (COUNTS.index(name) for name in ("rescued", WAIT_COLUMNS[0], RUN_COLUMNS[0]))
PLACES = {name: place for place, name in enumerate(OUTCOMES)}

Counts = dict[str, list[int]]  # by event type, in the order of ``COUNTS``


class Statistics:
    """The settler's thread adds counts to a small dict; the heartbeat's thread writes them."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._settled = deque[Counts]()  # of each settle
        # All that follow are the heartbeat's.
        self._new: Counts = {}  # not written yet
        self._minute: datetime | None = None  # of the last write
        self._rows: Counts = {}  # of that minute, as stored
        self._write_at = 0.0  # monotonic
        self.failures = 0  # consecutive

    def add(self, settled: Iterable[tuple[Lease, Decision]]) -> None:
        """Count what was just settled."""
        found: Counts = {}
        for lease, decision in settled:
            if decision.outcome not in PLACES:  # it was not delivered, or not for good
                continue
            counts = found.get(lease.event_type)
            if counts is None:
                counts = found[lease.event_type] = [0] * len(COUNTS)
            counts[PLACES[decision.outcome]] += 1
            if lease.rescued:
                counts[RESCUED] += 1
            if lease.started_at:  # an event that is dead for its lost workers was not started
                counts[WAIT + bucket(lease.lag + lease.waited)] += 1
                counts[RUN + bucket(lease.duration)] += 1
        if found:
            self._settled.append(found)

    def write_if_due(self) -> Steps[None]:
        """Write, if it is time; what cannot be written now is written next time."""
        if monotonic() >= self._write_at:
            yield from self.write()

    def write(self) -> Steps[None]:
        """Write the counts into the present minute; an error is logged and has no other effect."""
        self._write_at = monotonic() + WRITE_INTERVAL
        while self._settled:
            _add(self._new, self._settled.popleft())
        if not self._new:
            return
        try:
            minute: datetime = (yield ask("clock")).replace(second=0, microsecond=0)
            rows = _limited(self._rows if minute == self._minute else {}, self._new)
            yield partial(_store, minute=minute, owner=self._me, rows=rows)
            self._minute, self._rows, self._new, self.failures = minute, rows, {}, 0
        except Exception as error:  # noqa: BLE001 - counts are not worth more
            self.failures += 1
            if self.failures & (self.failures - 1) == 0:  # 1, 2, 4, 8 …
                logger.warning(
                    "statistics could not be updated; events are not affected error=%s times=%d",
                    first_line(error),
                    self.failures,
                )
            yield lambda connection: connection.close()  # the next query opens a new session


def _add(counts: Counts, more: Mapping[str, list[int]]) -> None:
    for event_type, new in more.items():
        old = counts.get(event_type, [0] * len(new))
        counts[event_type] = [one + other for one, other in zip(old, new, strict=True)]


def _limited(rows: Counts, new: Counts) -> Counts:
    """Return rows with new counts added; frequent types get rows of their own first."""
    rows = {**rows}
    for event_type in sorted(new, key=lambda each: (-sum(new[each][: len(OUTCOMES)]), each)):
        named = event_type in rows or len(rows.keys() - {""}) < MAX_TYPES
        _add(rows, {event_type if named else "": new[event_type]})
    return rows


def _store(connection: BaseDatabaseWrapper, *, minute: datetime, owner: str, rows: Counts) -> None:
    made = [
        OutboxStatistics(
            started_at=minute,
            owner=owner,
            event_type=event_type,
            **dict(zip(COUNTS, rows[event_type], strict=True)),
        )
        for event_type in sorted(rows)
    ]
    write_statistics(connection.alias, made)
