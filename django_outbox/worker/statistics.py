"""Counts in memory what a worker settles, and writes the counts from another thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from datetime import datetime, timezone
from functools import partial

from django.db import connections

from ..clocks import monotonic
from ..delivery.lease import Lease
from ..listeners.outcomes import Decision
from ..log import first_line
from ..models import OutboxStatistics, write_statistics
from ..models.statistics import COUNTS, OUTCOMES, RUN_COLUMNS, WAIT_COLUMNS, bucket
from ..sql import dialect_of
from ..sql.halving import in_halves

logger = logging.getLogger("django_outbox")

WRITE_INTERVAL = 10.0  # seconds between two writes, at least; a killed worker loses no more
MAX_TYPES = 20  # event types that get rows of their own in one minute; all others share one
LATE_LIMIT = 120.0  # seconds after its end in which a minute may still be counted into
MINUTE = 60  # seconds

RESCUED, WAIT, RUN = (COUNTS.index(name) for name in ("rescued", WAIT_COLUMNS[0], RUN_COLUMNS[0]))
PLACES = {name: place for place, name in enumerate(OUTCOMES)}

Key = tuple[int, str]  # the minute (its start, seconds since 1970), event type


class Statistics:
    """The settler's thread adds counts to a small dict; the heartbeat's thread writes them."""

    def __init__(self, *, alias: str, me: str) -> None:
        self._alias, self._me = alias, me
        # Of each settle, by minute and event type.
        self._new_counts = deque[dict[Key, list[int]]]()
        self._rows: dict[Key, OutboxStatistics] = {}  # as written; only for the heartbeat
        self._changed: set[Key] = set()
        self._write_at = 0.0  # monotonic
        self._failures = 0  # consecutive

    def add(self, settled: Iterable[tuple[Lease, Decision]]) -> None:
        """Count what was just settled, all of it into the current minute."""
        now, found = monotonic(), dict[Key, list[int]]()
        minute, event_type = None, ""
        counts: list[int] = []  # of the type
        for lease, decision in settled:
            if decision.outcome not in PLACES:  # it was not delivered, or not for good
                continue
            if minute is None:
                minute = _minute(lease.now.timestamp() + now - lease.claimed_at)
            if lease.event_type != event_type:
                event_type = lease.event_type
                counts = found.setdefault((minute, event_type), [0] * len(COUNTS))
            _count(counts, lease, decision)
        if found:
            self._new_counts.append(found)

    def write_if_due(self) -> None:
        """Write, if it is time; what cannot be written now is written next time."""
        if monotonic() >= self._write_at:
            self.write()

    def write(self) -> None:
        """Write the counts to the table; an error is logged and has no other effect."""
        self._write_at = monotonic() + WRITE_INTERVAL
        try:
            connection = connections[self._alias]
            now = dialect_of(connection).clock()
            self._add_to_rows(now)
            rows = [self._rows[key] for key in sorted(self._changed)]
            parts = [*in_halves(connection, rows, partial(write_statistics, self._alias))]
            refused = [each.error for each in parts if each.error is not None]
            if not refused or any(each.is_written for each in parts):
                self._changed.clear()
            self._remove_old_rows(now)
            if refused:
                raise refused[-1]
        except Exception as error:  # noqa: BLE001 - counts are not worth more
            self._log_error(error)
        else:
            self._failures = 0

    def _add_to_rows(self, now: datetime) -> None:
        """Add new counts to the rows; frequent types first, so that they get rows of their own."""
        fresh: dict[Key, list[int]] = {}
        while self._new_counts:
            for key, counts in self._new_counts.popleft().items():
                before = fresh.get(key, [0] * len(COUNTS))
                fresh[key] = [old + new for old, new in zip(before, counts, strict=True)]
        for (minute, event_type), counts in sorted(fresh.items(), key=_frequency):
            key = self._key(minute, event_type)
            row = self._row(key)
            for name, count in zip(COUNTS, counts, strict=True):
                if count:
                    setattr(row, name, getattr(row, name) + count)
            self._changed.add(key)

    def _key(self, minute: int, event_type: str) -> Key:
        """Return the row to count in: the type's own, or the shared one after MAX_TYPES types."""
        if (key := (minute, event_type)) in self._rows:
            return key
        named = sum(start == minute and name != "" for start, name in self._rows)
        return key if named < MAX_TYPES else (minute, "")

    def _row(self, key: Key) -> OutboxStatistics:
        if key not in self._rows:
            start, event_type = key
            self._rows[key] = OutboxStatistics(
                started_at=datetime.fromtimestamp(start, timezone.utc),
                owner=self._me,
                event_type=event_type,
            )
        return self._rows[key]

    def _remove_old_rows(self, now: datetime) -> None:
        """Remove rows whose minutes are over."""
        over = now.timestamp() - MINUTE - LATE_LIMIT
        self._rows = {key: row for key, row in self._rows.items() if key[0] > over}
        self._changed &= self._rows.keys()

    def _log_error(self, error: Exception) -> None:
        """Log the error at a limited rate; close the connection, as the next query opens one."""
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:  # 1, 2, 4, 8 …
            logger.warning(
                "statistics could not be updated; events are not affected error=%s times=%d",
                first_line(error),
                self._failures,
            )
        connections[self._alias].close()


def _count(counts: list[int], lease: Lease, decision: Decision) -> None:
    counts[PLACES[decision.outcome]] += 1
    if lease.rescued:
        counts[RESCUED] += 1
    if lease.started_at:  # an event that is dead for its lost workers was not started
        counts[WAIT + bucket(lease.lag + lease.waited)] += 1
        counts[RUN + bucket(lease.duration)] += 1


def _minute(instant: float) -> int:
    """Return the beginning of the minute of an instant, both in seconds since 1970."""
    return int(instant) // MINUTE * MINUTE


def _frequency(item: tuple[tuple[int, str], list[int]]) -> tuple[int, int, str]:
    (minute, event_type), counts = item
    return minute, -sum(counts[: len(OUTCOMES)]), event_type
