"""Pauses: those of people, which park what is due, and the circuit breaker of a queue.

Both are rows in one table, so that they hold for all workers and people see them. After failures in
a row, nothing is claimed of a queue for a while. Then one worker makes a trial: it delivers one
event, as a *probe*. A success closes the breaker; a failure doubles the pause.

The breaker of a relay opens as soon as a call raises ``BrokerUnavailable``, which costs no event an
attempt. A message that the broker refuses says that the broker is there, so it is never counted.
Its trial is a *check* of the connection, and its row has a pause of 0 seconds. A check asks for
more than a message needs: if it fails on an open connection, the next trial is a probe.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..delivery.lease import Lease
from ..listeners import registry
from ..listeners.outcomes import LOST, Decision
from ..listeners.queues import queue_of
from ..listeners.registry import Listener
from ..log import first_line
from ..models import OutboxPause
from ..models.pause_queryset import holding
from ..queue_settings import BreakerSettings, QueueSettings
from ..relays.relay import CheckFailed
from ..signals import announce, breaker_closed, breaker_opened
from ..sql import dialect_of
from ..sql.values import CLOSING_KINDS, NO_PAUSES
from .effects import Kind, Steps, ask, noted
from .held import Held
from .polling import Wakeup

logger = logging.getLogger("django_outbox")

READ_INTERVAL: Final = 1.0  # seconds after which the table is read again before a claim
NOTIFIED_READ_INTERVAL: Final = 0.05  # seconds; after a notification, while something is paused
PARKED_AT_ONCE: Final = 500  # rows due first of a queue, among which paused ones are looked for

LONGEST_PAUSE = 600.0  # seconds; probes that fail double the pause up to this
START_TIME = 5.0  # seconds in which a thread starts the event of a probe
REPEAT_PROBE = 1.0  # seconds until the next trial, after one that came to nothing or was not won
CHECK_INTERVAL = 3.0  # seconds between two checks of a broker that is away
CHECK_LEASE = 4.0  # seconds; after it another worker checks, for this one may have been lost
PROBE_PAUSE = 30.0  # seconds between probes of one broker; each doubles it up to LONGEST_PAUSE
# Seconds between two lines: a broker that takes no messages opens and closes its breaker often.
LOG_INTERVAL = 120.0


class KnownPauses:
    """What is paused. Only the thread that claims updates it; other threads read it."""

    def __init__(self) -> None:
        self.pauses, self.has_operations = NO_PAUSES, False  # the latter: some are open
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
        self.has_operations = found.pop(("operation", ""), None) is not None
        self.pauses = {name: times.id for name, times in found.items()}
        self.closed = frozenset(name for kind, name in found if kind in CLOSING_KINDS)
        ends = {each: now + times.left for each, times in found.items() if times.left is not None}
        self.breakers = {
            name: (at, found[kind, name].length)
            for (kind, name), at in ends.items()
            if kind == "breaker"
        }
        self.ends_at = min((at for (kind, _), at in ends.items() if kind != "breaker"), default=inf)

    def park(
        self, connection: BaseDatabaseWrapper, rows: Mapping[str, int], queues: Collection[str]
    ) -> None:
        """Park rows, by id, for these pauses, and what else is paused of what is due first."""
        dialect, found = dialect_of(connection), {**rows}
        for row_id, *named in dialect.due_first(queues=queues, limit=PARKED_AT_ONCE):
            if (pause := holding(self.pauses, *named)) is not None:
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


@dataclass(slots=True)
class Trial:
    """What this worker tries while a breaker is open; its outcome closes it or prolongs it."""

    until: float  # monotonic; when it has come to nothing if no event has started
    is_check: bool  # else it is a probe
    lease: Lease | None = None  # of the event, once it starts
    succeeded: bool | None = None  # once it is known
    is_doubtful: bool = False  # the check failed, although there was a connection


class Breaker:
    """Counts the failures of one queue in this process; opens, tries and closes its breaker.

    Threads that deliver call ``record``; the claimer's thread makes the steps of ``follow``.
    """

    def __init__(
        self,
        queue: QueueSettings,
        *,
        alias: str,
        held: Held,
        known_pauses: KnownPauses,
        wakeup: Wakeup,
    ) -> None:
        """If the queue has no breaker, one that is open is closed."""
        self._queue, self._alias, self._check = queue.name, alias, check_of(queue.name)
        self._counts, self._settings = queue.BREAKER is not None, queue.BREAKER or BreakerSettings()
        self._held, self._known_pauses, self._wakeup = held, known_pauses, wakeup
        self._lock = held.lock  # guards what threads and the claimer set
        self._failures: deque[float] = deque()  # when (monotonic)
        self.trip_reason = ""  # it has tripped, and its row is to be written
        self._trial: Trial | None = None  # this worker has won it, and it has not ended
        self._try_at = 0.0  # monotonic; not before
        # Of a relay: the next trial is a probe; no further probe before (monotonic); seconds.
        self._probe_next, self._probe_at, self._probe_pause = False, 0.0, 0.0
        # When (monotonic) each line was logged last: another process may have logged the other one.
        self._logged_at = dict[str, float]()

    @property
    def is_probing(self) -> bool:
        """Return whether this worker has won a probe, and it has not ended."""
        return self._trial is not None and not self._trial.is_check

    def is_probe(self, lease: Lease) -> bool:
        """Return whether this lease may start although the breaker is open: the first that asks."""
        if (trial := self._trial) is None or trial.is_check:
            return False
        with self._lock:
            if trial.lease is None and trial.succeeded is None:
                trial.lease = lease
            return trial.lease is lease

    def record(self, listener: Listener, decision: Decision) -> None:
        """Count what a call decided: it fails if it costs an attempt, or could not reach anything.

        Of a relay only the latter counts: a refusal is the message's own.
        """
        if decision is LOST:
            return
        has_failed = bool(decision.unavailable or (decision.spent and self._check is None))
        with self._lock:
            if (trial := self._trial) is not None and not trial.is_check:
                if trial.succeeded is None:
                    trial.succeeded = not has_failed
                    self._wakeup.poll()
            elif not has_failed:
                self._failures.clear()
            elif decision.unavailable:
                self._trip(f"{listener.title}: {decision.unavailable}")
            else:
                self._count_failure(f"{listener.title}: {decision.kind}")

    def _count_failure(self, what: str) -> None:
        now, settings, failures = monotonic(), self._settings, self._failures
        failures.append(now)
        while failures[0] < now - settings.within:
            failures.popleft()
        if len(failures) >= settings.failures:
            count = f"{len(failures)} consecutive failures in {now - failures[0]:.1f} s"
            self._trip(f"{count}; the last: {what}")

    def _trip(self, reason: str) -> None:
        if not self.trip_reason:
            self.trip_reason = reason
            self._wakeup.poll()

    # -- for the claimer -------------------------------------------------------------------------

    @property
    def due_at(self) -> float:
        """When (monotonic) something is to be tried; inf: it is closed."""
        return max(self._try_at, self._known_pauses.breakers.get(self._queue, (inf, 0.0))[0])

    def follow(self, *, is_idle: bool) -> Steps[bool]:
        """Write what has changed, and make the trial that is due, if no other worker does.

        Return whether this worker has won a probe, for which one event is to be claimed; that takes
        a thread that ``is_idle``.
        """
        if self._trial is not None:
            yield from self._end(self._trial)
        elif self.trip_reason:
            yield from self._open(self.trip_reason)
        if self.due_at > monotonic():
            return False
        self._try_at = monotonic() + REPEAT_PROBE
        if ("queue", self._queue) in self._known_pauses.pauses:
            return False
        is_won = yield from self._try(is_idle=is_idle)
        yield self._known_pauses.read
        return is_won

    def cancel_probe(self) -> None:
        """Note that there was nothing to be claimed for the probe."""
        if self._trial is not None:
            self._trial.until = -inf

    def _open(self, reason: str) -> Steps[None]:
        pause = self._settings.pause if self._check is None else 0.0
        change = ask("open_breaker", queue=self._queue, pause=pause, reason=reason)
        if self._is_rare("opened"):
            change = noted(change, Kind.BREAKER_OPENED, f"queue {self._queue}: {reason}")
        if (yield change):
            self._report_opened(pause, reason)
        yield self._known_pauses.read
        # From now on these keep the queue closed, unless a user has removed the row already.
        with self._lock:
            self.trip_reason = ""
            self._failures.clear()

    def _try(self, *, is_idle: bool) -> Steps[bool]:
        """Check the connection, or win the probe; return whether it is won."""
        queue = self._queue
        is_check, self._probe_next = self._check is not None and not self._probe_next, False
        if not self._counts:  # the queue has lost its BREAKER since this one opened
            yield from self._close()
        elif self._trial is None and (is_check or is_idle):
            if not is_check and not (yield ask("has_due", queue=queue)):
                return False
            lease = CHECK_LEASE if is_check else self._held.lease
            if not (yield ask("probe_breaker", queue=queue, lease=lease)):
                return False
            trial = Trial(monotonic() + START_TIME, is_check)
            if not is_check:
                self._trial = trial
                self._probe_pause = min(max(2 * self._probe_pause, PROBE_PAUSE), LONGEST_PAUSE)
                self._probe_at = monotonic() + self._probe_pause
                return True
            name, given = f"outbox-check-{queue}", (trial,)
            threading.Thread(target=self._run_check, name=name, args=given, daemon=True).start()
            self._trial = trial  # not if no thread could be started
        return False

    def _run_check(self, trial: Trial) -> None:
        assert self._check is not None
        try:
            self._check()
        except BaseException as error:  # noqa: BLE001 - a backend may raise anything
            logger.debug("broker not available queue=%s error=%s", self._queue, first_line(error))
            trial.is_doubtful = isinstance(error, CheckFailed)
            trial.succeeded = False
        else:
            trial.succeeded = True
        self._wakeup.poll()

    def _end(self, trial: Trial) -> Steps[None]:
        """Write what a trial has shown, if it has ended."""
        succeeded, lease = trial.succeeded, trial.lease
        _, pause = self._known_pauses.breakers.get(self._queue, (0.0, self._settings.pause))
        if succeeded is None:
            if trial.is_check or (lease is not None and self._held.has(lease)):
                return  # it still runs
            if lease is None and monotonic() < trial.until:
                return  # it has not been started yet
        if succeeded:
            self._probe_at = self._probe_pause = 0.0
            yield from self._close()
        elif succeeded is None:
            yield ask("extend_breaker", queue=self._queue, pause=REPEAT_PROBE, kept=pause)
        elif self._check is not None:
            self._probe_next = trial.is_doubtful and monotonic() >= self._probe_at
            yield ask("extend_breaker", queue=self._queue, pause=CHECK_INTERVAL, kept=0.0)
        else:
            pause = min(2 * pause, max(LONGEST_PAUSE, self._settings.pause))
            yield ask("extend_breaker", queue=self._queue, pause=pause, kept=pause)
            self._report_opened(pause, "the probe failed")
        with self._lock:
            self._trial = None
            self._failures.clear()
        yield self._known_pauses.read

    def _close(self) -> Steps[None]:
        """Close it for all workers."""
        change = ask("close_breaker", queue=self._queue)
        if self._is_rare("closed"):
            change = noted(change, Kind.BREAKER_CLOSED, f"queue {self._queue}")
        if (yield change):
            logger.log(self._level("closed"), "breaker closed queue=%s", self._queue)
            announce(breaker_closed, sender=self._alias, queue=self._queue)

    def _report_opened(self, pause: float, reason: str) -> None:
        level, queue = self._level("opened"), self._queue
        logger.log(level, "breaker opened queue=%s pause=%.0fs reason=%s", queue, pause, reason)
        announce(breaker_opened, sender=self._alias, queue=self._queue, pause=pause, reason=reason)

    def _level(self, line: str) -> int:
        if not self._is_rare(line):
            return logging.DEBUG
        self._logged_at[line] = monotonic()
        return logging.WARNING

    def _is_rare(self, line: str) -> bool:
        """Return whether the logs are to say it: a broker that takes nothing opens and closes."""
        last = self._logged_at.get(line, -inf)
        return self._check is None or monotonic() >= last + LOG_INTERVAL


def check_of(queue: str) -> Callable[[], None] | None:
    """Return what raises while the broker of a relay's queue does not take messages."""
    found = (each.check for each in registry.listeners() if queue_of(each) == queue)
    return next((each for each in found if each is not None), None)
