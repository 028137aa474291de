"""Deletes rows past their retention, batch by batch; one worker at a time does it for all."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from math import inf
from typing import Annotated, Any, Literal

import msgspec
from django.db import connections

from ..clocks import monotonic
from ..conf import DAY
from ..log import first_line
from ..models import OutboxInbox, OutboxStatistics
from ..models.purging import purge_events, scan_events, scan_streams
from ..models.retention import Batch
from ..signals import announce, events_purged
from ..sql import dialect_of
from ..sql.halving import answers
from .leader_lease import Leader
from .throttle import Throttle

logger = logging.getLogger("django_outbox")

# Seconds for one table in a run; after a pause of at most as long it continues. The housekeeper's
# other work waits meanwhile.
MAX_RUN = 2.0
SCAN_INTERVAL = DAY  # seconds from the start of a full scan to the start of the next
SCAN_RATE = 1000  # rows that a full scan reads per second
Instant = Annotated[datetime, msgspec.Meta(tz=True)]
SCANS: dict[str, Callable[..., Batch | None]] = {"events": scan_events, "streams": scan_streams}


class Progress(msgspec.Struct, omit_defaults=True):
    """The progress of the purge, stored in its lease; times are by the database's clock."""

    ran_at: Instant | None = None  # when the last finished run began
    rest_until: Instant | None = None  # no run starts before
    scanned_at: Instant | None = None  # when the last full scan began
    # Table and key where the scan continues; None: it is finished.
    scan: tuple[Literal["events", "streams"], str] | None = None

    @classmethod
    def of(cls, text: str | None) -> Progress:
        """Parse stored progress; if it cannot be parsed, start anew."""
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except (msgspec.MsgspecError, UnicodeError):
            return cls()

    def text(self) -> str:
        return msgspec.json.encode(self).decode()

    def run_in(self, now: datetime, interval: float) -> float:
        """Return the seconds until the next run."""
        if self.ran_at is None or self.ran_at > now:  # never, or the clock was wrong
            return 0.0
        rest = 0.0 if self.rest_until is None else (self.rest_until - now).total_seconds()
        return max(interval - (now - self.ran_at).total_seconds(), rest, 0.0)

    def scan_in(self, now: datetime, interval: float) -> float:
        """Return the seconds until the next full scan, or the next part of one."""
        if self.scan is not None or self.scanned_at is None or self.scanned_at > now:
            return 0.0
        return max(max(SCAN_INTERVAL, interval) - (now - self.scanned_at).total_seconds(), 0.0)


class Purger:
    """Makes one run every ``PURGE_INTERVAL`` and one slow full scan a day, in one of all workers.

    A run that exceeds its time continues soon where it stopped, because the iterator over each
    table is kept. A scan continues where any worker stopped.
    """

    def __init__(self, *, alias: str, me: str, lease: float, interval: float | None) -> None:
        """``interval``: seconds between two runs; None: no runs."""
        self._alias, self._interval = alias, interval or inf
        self._leader = Leader(alias=alias, me=me, name="purge", lease=lease)
        self._continue_after = min(MAX_RUN, self._interval, lease / 3)  # seconds; the lease is kept
        self._progress = Progress()
        self._next_at = 0.0 if interval else inf  # monotonic
        self._began_at: datetime | None = None  # when the unfinished run began
        self._unfinished: dict[str, Iterator[int]] = {}  # unfinished iterators, by what they purge
        # While a snapshot is open, a run reads all rows that were deleted since it was taken.
        self._throttle = Throttle()
        self._found: Counter[str] = Counter()  # rows deleted by the scan and not reported yet
        self._error: Exception | None = None  # of one table, while the others are purged
        self.stopping = False

    def step(self) -> float:
        if monotonic() >= self._next_at:
            rest = self.run()
            self._next_at = monotonic() + rest
        if (error := self._error) is not None:
            self._error = None
            raise error
        return max(min(self._next_at - monotonic(), DAY), 0.001)

    def run(self) -> float:
        """Purge what is due, unless another worker does; return the seconds to the next call."""
        if not self._leader.holds:
            self._unfinished, self._began_at = {}, None
            row = self._leader.read()
            self._progress = Progress.of(row.state)
            if (wait := max(row.locked_for, self._due_in(row.now))) > 0:
                return min(wait, self._interval) * random.uniform(1.0, 1.1)
            if not self._leader.take():
                return random.uniform(1.0, 2.0)
            self._progress = Progress.of(self._leader.read().state)  # now only we change it
        now, pause = self._clock(), 0.0
        if self._unfinished or self._progress.run_in(now, self._interval) <= 0:
            pause = self._run(now)
        elif self._progress.scan_in(now, self._interval) <= 0:
            pause = self._scan(now)
        if self._unfinished or (wait := self._due_in(self._clock())) <= 0:
            self._renew_lease()
            return pause
        self._report_scan()
        self._leader.release(self._progress.text())
        return wait

    def close(self) -> None:
        """Let another worker continue. Call it in the thread of ``step``."""
        self._report_scan()
        self._leader.close(self._progress.text())

    def _due_in(self, now: datetime) -> float:
        run_in = self._progress.run_in(now, self._interval)
        return min(run_in, self._progress.scan_in(now, self._interval))

    def _run(self, now: datetime) -> float:
        """Purge what has become old enough since the last run; return the pause in seconds."""
        started, self._began_at = monotonic(), self._began_at or now
        alias = self._alias
        events = partial(purge_events, alias, since=self._progress.ran_at)
        if count := self._purge("events", events):
            _report_events(alias, count)
        if count := self._purge("messages", OutboxInbox.objects.using(alias).purge_batches):
            logger.info("purged received_messages=%d", count)
        self._purge("statistics", OutboxStatistics.objects.using(alias).purge_batches)
        if self._unfinished:
            return self._continue_after
        if self._error is not None:  # the next run begins where this one began
            return 0.0
        self._throttle.after(started)
        rest = timedelta(seconds=max(self._throttle.until - monotonic(), 0.0))
        self._progress.rest_until = self._clock() + rest
        self._progress.ran_at, self._began_at = self._began_at, None
        return 0.0

    def _purge(self, kind: str, purge: Callable[[], Iterator[int]]) -> int:
        batches, total = self._unfinished.pop(kind, None) or purge(), 0
        until = monotonic() + MAX_RUN
        try:
            for count in batches:
                total += count
                if self.stopping or monotonic() > until:
                    self._unfinished[kind] = batches
                    break
                self._renew_lease()
        except Exception as error:  # noqa: BLE001 - raised below, or by the step
            self._note(error, kind)
        return total

    def _note(self, error: Exception, kind: str) -> None:
        """Have the step raise an error once the other tables are purged, if that is possible."""
        if not answers(connections[self._alias]):
            raise error
        if kind == "statistics":  # they are not worth more
            logger.warning("old statistics could not be purged error=%s", first_line(error))
        else:
            self._error = error

    def _scan(self, now: datetime) -> float:
        """Read the next batch of the full scan; return the pause in seconds."""
        progress = self._progress
        if progress.scan is None:
            progress.scanned_at = now
        table, after = progress.scan or ("events", "")
        try:
            batch = SCANS[table](self._alias, after=after, most=SCAN_RATE)
        except Exception as error:  # noqa: BLE001 - raised below, or by the step
            self._note(error, table)
            batch = None
        if batch is not None:
            self._found[table] += batch.deleted
            progress.scan = table, batch.last
            return batch.rows / SCAN_RATE
        progress.scan = ("streams", "") if table == "events" else None
        return 0.0

    def _renew_lease(self) -> None:
        if self._leader.renew(self._progress.text()):
            self._report_scan()

    def _report_scan(self) -> None:
        found, self._found = self._found, Counter()
        if events := found["events"]:
            _report_events(self._alias, events)
        if streams := found["streams"]:
            logger.info("purged streams=%d", streams)

    def _clock(self) -> datetime:
        connection: Any = connections[self._alias]
        return dialect_of(connection).clock()


def _report_events(alias: str, count: int) -> None:
    logger.info("purged events=%d", count)
    announce(events_purged, sender=alias, count=count)
