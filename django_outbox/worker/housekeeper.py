"""The housekeeper: purges, ends pauses, works off operations, moves what no queue claims.

It has a thread and a database connection of its own, so no claim waits for it.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from math import inf
from typing import Annotated, Any, Literal

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..conf import DAY
from ..log import first_line
from ..models import OutboxInbox, OutboxOperation, OutboxStatistics
from ..models.bulk import Worked, work_off
from ..models.pause_queryset import bring_home
from ..models.queryset import Batch
from ..models.retention import purge_events, scan_events, scan_streams
from ..queue_settings import DEFAULT_QUEUE
from ..signals import announce, events_purged
from ..sql.halving import answers
from ..sql.values import EVENTS, STREAMS
from .effects import Steps, ask, in_turn
from .leases import Leader
from .pauses import READ_INTERVAL, KnownPauses, end_pauses
from .polling import Throttle, Wakeup

logger = logging.getLogger("django_outbox")

SEARCH_INTERVAL = 20.0  # seconds between searches for queues that are not configured
BATCH = 500  # rows that are moved together
STEP_INTERVAL = 1.0  # seconds; an idle step makes no statement: the claimer knows of operations
ASK_INTERVAL = 120.0  # seconds until a step asks all the same, for the claimer may be busy

# Seconds for one table in a step; after a pause of at most as long it continues. The housekeeper's
# other work waits meanwhile, and so does a stop.
MAX_RUN = 0.5
SCAN_INTERVAL = DAY  # seconds from the start of a full scan to the start of the next
SCAN_RATE = 1000  # rows that a full scan reads per second
Instant = Annotated[datetime, msgspec.Meta(tz=True)]
Batches = Iterator[int]  # of a purge, which executes their statements
SCANS: dict[str, Callable[..., Batch | None]] = {"events": scan_events, "streams": scan_streams}


class Housekeeper:
    """Does what is due of this work in each step. One thread only."""

    def __init__(
        self,
        *,
        chores: Sequence[Operations | Purger],
        known_pauses: KnownPauses,
        wakeup: Wakeup,
        configured: Collection[str],
        adopts: bool,
    ) -> None:
        """``adopts``: it moves what waits in queues that are not ``configured``."""
        self._due_at = dict.fromkeys(chores, 0.0)  # monotonic; the next step of each
        self._known_pauses, self._wakeup = known_pauses, wakeup
        self._configured = configured
        # Monotonic: the next search, the end of pauses that was handled.
        self._search_at = monotonic() + random.uniform(0.0, SEARCH_INTERVAL) if adopts else inf
        self._ended_at = 0.0

    def step(self) -> Steps[float]:
        """Do what is due; return the seconds until the next step."""
        yield from in_turn(self._end_pauses(), self._adopt(), *map(self._do, self._due_at))
        now = monotonic()
        # The claimer may know of another end.
        times = [*self._due_at.values(), self._search_at, now + READ_INTERVAL]
        if self._known_pauses.ends_at != self._ended_at:
            times.append(self._known_pauses.ends_at)
        return max(min(times) - now, 0.001)

    def close(self) -> Steps[None]:
        """Let another worker continue."""
        yield from in_turn(*(each.close() for each in self._due_at))

    def _do(self, chore: Operations | Purger) -> Steps[None]:
        if monotonic() >= self._due_at[chore]:
            pause = yield from chore.step()
            self._due_at[chore] = monotonic() + pause

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


class Operations:
    """Does the next batches of what is open, in turn. The housekeeper's thread only."""

    def __init__(self, *, me: str, lease: float, known_pauses: KnownPauses, wakeup: Wakeup) -> None:
        self._leader, self._wakeup = Leader(me=me, name="operations", lease=lease), wakeup
        self._known_pauses, self._asked_at = known_pauses, monotonic()

    def step(self) -> Steps[float]:
        """Work for a moment, unless another worker does; return the seconds to the next step."""
        is_time = monotonic() >= self._asked_at + ASK_INTERVAL
        if self._known_pauses.has_operations or self._leader.holds or is_time:
            self._asked_at = monotonic()
            turns = deque((yield open_operations))
            if not turns:
                yield from self.close()
            elif self._leader.holds or (yield self._leader.take):
                return (yield from self._work(turns))
        return STEP_INTERVAL

    def close(self) -> Steps[None]:
        """Let another worker continue."""
        yield from self._leader.release()

    def _work(self, turns: deque[int]) -> Steps[float]:
        until, wait = monotonic() + MAX_RUN, STEP_INTERVAL
        while turns and monotonic() < until:
            pk = turns.popleft()
            worked: Worked = yield partial(work_off, pk)
            if worked.changed:
                self._wakeup.poll()
                yield doorbell.ring
            if worked.wait is None:
                logger.info("operation ended id=%d", pk)
            elif worked.wait:
                wait = min(wait, worked.wait)
            else:
                turns.append(pk)
            yield from self._leader.renew("")
        return MAX_RUN if turns else wait


def open_operations(connection: BaseDatabaseWrapper) -> list[int]:
    """Return the ids of the operations that are to be worked off."""
    found = OutboxOperation.objects.using(connection.alias).open()
    return [*found.values_list("pk", flat=True)]


def work_off_all(connection: BaseDatabaseWrapper) -> None:
    """Work off what is open, as far as rates allow now."""
    for pk in open_operations(connection):
        while work_off(pk, connection).wait == 0:
            continue


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

    def __init__(self, *, me: str, lease: float, interval: float) -> None:
        """``interval``: seconds between two runs."""
        self._interval, self._leader = interval, Leader(me=me, name="purge", lease=lease)
        self._continue_after = min(MAX_RUN, interval, lease / 3)  # seconds; the lease is kept
        self._progress = Progress()
        self._began_at: datetime | None = None  # when the unfinished run began
        self._unfinished: dict[str, Batches] = {}  # iterators that have begun, by what they purge
        # While a snapshot is open, a run reads all rows that were deleted since it was taken.
        self._throttle = Throttle()
        self._deleted: Counter[str] = Counter()  # rows that are not reported yet

    def step(self) -> Steps[float]:
        """Purge what is due, unless another worker does; return the seconds to the next step."""
        if not self._leader.holds:
            self._unfinished, self._began_at = {}, None
            if not (yield self._leader.take):
                wait = min(self._leader.lease, self._interval)
                return wait * random.uniform(1.0, 1.1)
            self._progress = Progress.of((yield self._leader.state))
        now, pause = (yield ask("clock")), 0.0
        if self._unfinished or self._progress.run_in(now, self._interval) <= 0:
            pause = yield from self._run(now)
        elif self._progress.scan_in(now, self._interval) <= 0:
            pause = yield from self._scan(now)
        now = yield ask("clock")
        wait = min(
            self._progress.run_in(now, self._interval), self._progress.scan_in(now, self._interval)
        )
        if self._unfinished or wait <= 0:
            yield from self._renew()
            return pause
        yield from self.close()
        return wait

    def close(self) -> Steps[None]:
        """Let another worker continue."""
        yield self._report
        yield from self._leader.release(self._progress.text())

    def _run(self, now: datetime) -> Steps[float]:
        """Purge what has become old enough since the last run; return the pause in seconds."""
        started, self._began_at = monotonic(), self._began_at or now
        yield from in_turn(
            self._purge("events", lambda c: purge_events(c.alias, since=self._progress.ran_at)),
            self._purge("received_messages", partial(_expired, OutboxInbox)),
            self._purge_reports("statistics", OutboxStatistics),
            self._purge_reports("operations", OutboxOperation),
        )  # after an error, the next run begins where this one began
        if self._unfinished:
            return self._continue_after
        self._throttle.after(started)
        rest = timedelta(seconds=max(self._throttle.until - monotonic(), 0.0))
        self._progress.rest_until = (yield ask("clock")) + rest
        self._progress.ran_at, self._began_at = self._began_at, None
        return 0.0

    def _purge(self, kind: str, begin: Callable[[BaseDatabaseWrapper], Batches]) -> Steps[None]:
        batches = self._unfinished.pop(kind, None) or (yield begin)
        until = monotonic() + MAX_RUN
        while (count := (yield lambda connection: next(batches, None))) is not None:
            self._deleted[kind] += count
            if monotonic() > until:
                self._unfinished[kind] = batches
                break
            yield from self._renew()

    def _purge_reports(self, kind: str, model: Any) -> Steps[None]:
        """Purge what people alone read; if that fails, the purge of events counts all the same."""
        try:
            yield from self._purge(kind, partial(_expired, model))
        except Exception as error:
            if not (yield answers):
                raise
            logger.warning("old rows could not be purged kind=%s error=%s", kind, first_line(error))

    def _scan(self, now: datetime) -> Steps[float]:
        """Read the next batch of the full scan; return the pause in seconds."""
        progress = self._progress
        if progress.scan is None:
            progress.scanned_at = now
        table, after = progress.scan or ("events", "")
        try:
            batch: Batch | None = yield lambda connection: SCANS[table](
                connection.alias, after=after, most=SCAN_RATE
            )
        except Exception:
            if (yield answers):
                self._end_scan(table)
            raise
        if batch is None:
            self._end_scan(table)
            return 0.0
        self._deleted[table] += batch.deleted
        progress.scan = table, batch.last
        return batch.rows / SCAN_RATE

    def _end_scan(self, table: str) -> None:
        self._progress.scan = ("streams", "") if table == "events" else None

    def _renew(self) -> Steps[None]:
        if (yield from self._leader.renew(self._progress.text())):
            yield self._report

    def _report(self, connection: BaseDatabaseWrapper) -> None:
        deleted, self._deleted = self._deleted, Counter()
        if count := deleted["events"]:
            logger.info("purged events=%d", count)
            announce(events_purged, sender=connection.alias, count=count)
        if count := deleted["received_messages"]:
            logger.info("purged received_messages=%d", count)
        if count := deleted["streams"]:
            logger.info("purged streams=%d", count)


def _expired(model: Any, connection: BaseDatabaseWrapper) -> Batches:
    batches: Batches = model.objects.using(connection.alias).purge_batches()
    return batches
