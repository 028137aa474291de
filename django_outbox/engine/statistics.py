"""Counts what a worker settles, in memory, and writes the counts beside its work, not within."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from datetime import datetime, timezone

from django.db import connections
from django.db.utils import Error as DatabaseError

from .. import dialects
from ..delivery import Lease
from ..models import OutboxEvent, OutboxStatistics, OutboxStream, write_statistics
from ..models.statistics import COUNTS, OUTCOMES, RUNS, SPANS, WAITS, bucket
from ..outcomes import LOST, Decision
from .reach import Rest

logger = logging.getLogger("django_outbox")

INTERVAL = 10.0  # seconds between two writes, at least; what a killed worker loses, at most
TYPES = 20  # event types that get rows of their own in one span; all others share one
LATE = 120.0  # seconds after its end that a span may still be counted into
MINUTE = 60

RESCUED, WAIT, RUN = (COUNTS.index(name) for name in ("rescued", WAITS[0], RUNS[0]))
PLACES = {name: place for place, name in enumerate(OUTCOMES)}

Key = tuple[int, int, str]  # span, its beginning in seconds since 1970, event type


class Statistics:
    """Adding is the settler's, writing the heartbeat's; between them lies one small dict."""

    def __init__(self, *, alias: str, me: str) -> None:
        self._alias, self._me = alias, me
        self._fresh: dict[tuple[int, str], list[int]] = {}  # by minute and type; guarded by _turn
        self._turn = threading.Lock()
        self._rows: dict[Key, OutboxStatistics] = {}  # as they are written; owner: the heartbeat
        self._changed: set[Key] = set()
        self._write_at = 0.0  # monotonic
        self._lag: float | None = None  # seconds; by the last look, which the purger's thread makes
        self._rest = Rest()  # from such looks
        self._failures = 0  # in a row

    def add(self, settled: Iterable[tuple[Lease, Decision]]) -> None:
        """Count what was just settled, all of it into the minute that is now."""
        now = time.monotonic()
        with self._turn:
            minute = None
            for lease, decision in settled:
                if decision is LOST:  # its new owner counts it
                    continue
                minute = minute or _minute(lease.now.timestamp() + now - lease.taken_at)
                counts = self._fresh.get((minute, lease.event_type))
                if counts is None:
                    counts = self._fresh[minute, lease.event_type] = [0] * len(COUNTS)
                _count(counts, lease, decision)

    def look(self) -> float:
        """See how long the oldest due event has waited; return the seconds until the next look.

        Beside an open snapshot it takes a while, and whoever renews leases has no time for that.
        """
        if (started := time.monotonic()) >= self._rest.until:
            try:
                events = OutboxEvent.objects.using(self._alias).oldest_pending_age()
                streams = OutboxStream.objects.using(self._alias).oldest_due_age()
                self._lag = round(max(events or 0.0, streams or 0.0), 3)
            except DatabaseError as error:  # the purge is not to wait for it
                self._report(error)
            self._rest.after(started)
        return max(INTERVAL, self._rest.until - time.monotonic())

    def step(self) -> None:
        """Write, if it is time; what cannot be written now is written next time, or given up."""
        if time.monotonic() >= self._write_at:
            self.write()

    def write(self) -> None:
        """Bring the table up to date; an error is reported, and harms nothing."""
        self._write_at = time.monotonic() + INTERVAL
        try:
            connection = connections[self._alias]
            now = dialects.of(connection).clock(connection)
            self._take_in(now)
            if self._changed:
                write_statistics(self._alias, [self._rows[key] for key in sorted(self._changed)])
            self._changed.clear()
        except DatabaseError as error:
            self._report(error)
        else:
            self._failures = 0
            self._forget(now)

    def _take_in(self, now: datetime) -> None:
        """Add what is fresh to the rows; those of the frequent types come first to their places."""
        with self._turn:
            fresh, self._fresh = self._fresh, {}
        self._note_lag(_minute(now.timestamp()))
        for (minute, event_type), counts in sorted(fresh.items(), key=_frequency):
            for span in SPANS:
                key = self._place(span, minute, event_type)
                row = self._row(key)
                for name, count in zip(COUNTS, counts, strict=True):
                    if count:
                        setattr(row, name, getattr(row, name) + count)
                self._changed.add(key)

    def _note_lag(self, minute: int) -> None:
        """Note how long the oldest due event has waited, whoever is to deliver it."""
        lag, self._lag = self._lag, None
        if lag is None:
            return
        for span in SPANS:
            row = self._row(key := (span, minute // span * span, ""))
            if row.lag is None or lag > row.lag:
                row.lag = lag
                self._changed.add(key)

    def _place(self, span: int, minute: int, event_type: str) -> Key:
        """Name the row to count into: the type's own, or the shared one where TYPES have theirs."""
        start = minute // span * span
        if (key := (span, start, event_type)) in self._rows:
            return key
        named = sum(each[:2] == (span, start) and each[2] != "" for each in self._rows)
        return key if named < TYPES else (span, start, "")

    def _row(self, key: Key) -> OutboxStatistics:
        if key not in self._rows:
            span, start, event_type = key
            self._rows[key] = OutboxStatistics(
                span=span, started_at=datetime.fromtimestamp(start, timezone.utc), owner=self._me,
                event_type=event_type,
            )  # fmt: skip
        return self._rows[key]

    def _forget(self, now: datetime) -> None:
        """Let go of rows whose time is over."""
        over = now.timestamp() - LATE
        self._rows = {key: row for key, row in self._rows.items() if key[0] + key[1] > over}

    def _report(self, error: Exception) -> None:
        """Say so at a bounded rate, and start with a new connection next time."""
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:  # 1, 2, 4, 8 …
            logger.warning(
                "statistics could not be written; events are not affected error=%s times=%d",
                str(error).partition("\n")[0], self._failures,
            )  # fmt: skip
        connections[self._alias].close()


def _count(counts: list[int], lease: Lease, decision: Decision) -> None:
    counts[PLACES[decision.outcome]] += 1
    if lease.rescued:
        counts[RESCUED] += 1
    if lease.started_at:  # what ends dead for its lost workers is not started
        counts[WAIT + bucket(lease.lag + lease.waited)] += 1
        counts[RUN + bucket(lease.duration)] += 1


def _minute(instant: float) -> int:
    """Return the beginning of the minute of an instant, both in seconds since 1970."""
    return int(instant) // MINUTE * MINUTE


def _frequency(item: tuple[tuple[int, str], list[int]]) -> tuple[int, int, str]:
    (minute, event_type), counts = item
    return minute, -sum(counts[: len(OUTCOMES)]), event_type
