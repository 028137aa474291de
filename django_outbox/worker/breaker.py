"""The circuit breaker of a queue: after failures in a row, nothing is claimed for a while.

It is a row in the table of pauses, so that it holds for all workers and people see it. When its
pause is over, one worker probes: it delivers one event. A success closes the breaker; a failure
doubles the pause.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from math import inf

from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..delivery.lease import Lease
from ..listeners.outcomes import LOST, Decision
from ..listeners.registry import Listener
from ..queue_settings import BreakerSettings
from ..signals import announce, breaker_closed, breaker_opened
from ..sql import dialect_of
from .held import Held
from .pauses import KnownPauses
from .wakeup import Wakeup

logger = logging.getLogger("django_outbox")

LONGEST_PAUSE = 600.0  # seconds; probes that fail double the pause up to this
START_TIME = 5.0  # seconds in which a thread starts the event of a probe
REPEAT_PROBE = 1.0  # seconds until the next probe, after one that called no listener or won none


@dataclass(slots=True)
class Probe:
    """One event that is delivered while a breaker is open; its outcome closes it or prolongs it."""

    pause: float  # seconds; of the breaker's row
    began_at: float  # monotonic; when the probe was won
    lease: Lease | None = None  # of the event, once it starts
    succeeded: bool | None = None  # once it is known


class Breaker:
    """Counts the failures of one queue in this process; opens, probes and closes its breaker.

    Threads that deliver call ``record``; all else belongs to the claimer's thread.
    """

    def __init__(
        self,
        queue: str,
        settings: BreakerSettings,
        *,
        alias: str,
        held: Held,
        known_pauses: KnownPauses,
        wakeup: Wakeup,
    ) -> None:
        self._queue, self._settings, self._alias = queue, settings, alias
        self._held, self._known_pauses, self._wakeup = held, known_pauses, wakeup
        self._lock = held.lock  # guards what threads and the claimer set
        self._failures: deque[tuple[float, str]] = deque()  # when (monotonic), and what
        self._trip_reason = ""  # it has tripped, and its row is to be written
        self._trip_pause = settings.pause  # seconds; of the row that is to be written
        self._probe: Probe | None = None  # this worker has won it, and it has not ended

    @property
    def is_tripped(self) -> bool:
        """Return whether it has tripped in this process, even if its row is not written yet."""
        return bool(self._trip_reason)

    @property
    def is_probing(self) -> bool:
        """Return whether this worker has won the probe, and it has not ended."""
        return self._probe is not None

    def is_probe(self, lease: Lease) -> bool:
        """Return whether this lease may start although the breaker is open: the first that asks."""
        if (probe := self._probe) is None:
            return False
        with self._lock:
            if probe.lease is None and probe.succeeded is None:
                probe.lease = lease
            return probe.lease is lease

    @property
    def away_pause(self) -> float:
        """Seconds of the pause after a call that could not reach what it sends to."""
        return self._settings.pause

    @staticmethod
    def is_failure(decision: Decision) -> bool:
        """Return whether a call has failed: it costs an attempt, or could not reach anything."""
        return bool(decision.spent or decision.unavailable)

    def record(self, listener: Listener, decision: Decision) -> None:
        """Count what a call decided."""
        if decision is LOST:
            return
        with self._lock:
            if self._probe is not None:
                if self._probe.succeeded is None:
                    self._probe.succeeded = not self.is_failure(decision)
                    self._wakeup.poll()
            elif decision.unavailable:
                self._trip(self.away_pause, f"{listener.title}: {decision.unavailable}")
            elif not self.is_failure(decision):
                self._failures.clear()
            else:
                self._count_failure(listener, decision)

    def _count_failure(self, listener: Listener, decision: Decision) -> None:
        now, settings = monotonic(), self._settings
        self._failures.append((now, f"{listener.title}: {decision.kind}"))
        while self._failures[0][0] < now - settings.within:
            self._failures.popleft()
        if len(self._failures) >= settings.failures and not self._trip_reason:
            seconds = now - self._failures[0][0]
            self._trip(
                settings.pause,
                f"{len(self._failures)} consecutive failures in {seconds:.1f} s; "
                f"the last: {self._failures[-1][1]}",
            )

    def _trip(self, pause: float, reason: str) -> None:
        if not self._trip_reason:
            self._trip_reason, self._trip_pause = reason, pause
            self._wakeup.poll()

    # -- for the claimer -------------------------------------------------------------------------

    def follow(self, connection: BaseDatabaseWrapper) -> None:
        """Write what has changed: the breaker has tripped, or a probe or check has ended."""
        if self._probe is not None:
            if self._end_probe(connection, self._probe):
                self._known_pauses.read(connection)
        elif reason := self._trip_reason:
            if dialect_of(connection).open_breaker(
                queue=self._queue, pause=self._trip_pause, reason=reason
            ):
                self._report_opened(self._trip_pause, reason)
            self._known_pauses.read(connection)
            # From now on these keep the queue closed, unless a user has removed the row already.
            with self._lock:
                self._trip_reason = ""
                self._failures.clear()

    def begin_check(self, connection: BaseDatabaseWrapper, pause: float) -> bool:
        """Begin to check a connection, if that ends this pause; return whether it does."""
        return False

    def begin_probe(self, connection: BaseDatabaseWrapper, pause: float) -> bool:
        """Try to win the probe of the open breaker, whose last pause was ``pause`` seconds."""
        if not dialect_of(connection).probe_breaker(queue=self._queue, lease=self._held.lease):
            return False
        self._probe = Probe(pause, monotonic())
        return True

    def cancel_probe(self) -> None:
        """Note that there was nothing to be claimed for the probe."""
        if self._probe is not None:
            self._probe.began_at = -inf

    def _end_probe(self, connection: BaseDatabaseWrapper, probe: Probe) -> bool:
        succeeded, lease = probe.succeeded, probe.lease
        if succeeded is None and lease is not None and self._held.has(lease):
            return False  # it still runs
        if succeeded is None and lease is None and monotonic() < probe.began_at + START_TIME:
            return False  # it has not been started yet
        if succeeded:
            close_breaker(connection, self._queue)
        elif succeeded is None:
            dialect_of(connection).extend_breaker(
                queue=self._queue, pause=REPEAT_PROBE, kept=probe.pause
            )
        else:
            self._prolong(connection, probe.pause)
        with self._lock:
            self._probe = None
            self._failures.clear()
        return True

    def _prolong(self, connection: BaseDatabaseWrapper, pause: float) -> None:
        """Double the pause, after a probe that failed."""
        pause = min(2 * pause, max(LONGEST_PAUSE, self._settings.pause))
        dialect_of(connection).extend_breaker(queue=self._queue, pause=pause, kept=pause)
        self._report_opened(pause, "the probe failed")

    def _report_opened(self, pause: float, reason: str) -> None:
        report_opened(self._alias, self._queue, pause, reason)


def report_opened(
    alias: str, queue: str, pause: float, reason: str, *, is_logged: bool = True
) -> None:
    if is_logged:
        logger.warning("breaker opened queue=%s pause=%.0fs reason=%s", queue, pause, reason)
    announce(breaker_opened, sender=alias, queue=queue, pause=pause, reason=reason)


def report_closed(alias: str, queue: str, *, is_logged: bool = True) -> None:
    if is_logged:
        logger.warning("breaker closed queue=%s", queue)
    announce(breaker_closed, sender=alias, queue=queue)


def close_breaker(connection: BaseDatabaseWrapper, queue: str) -> None:
    """Close a queue's open breaker, for all workers."""
    if dialect_of(connection).close_breaker(queue=queue):
        report_closed(connection.alias, queue)
