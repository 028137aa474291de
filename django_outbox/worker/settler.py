"""The settler: one thread writes all waiting decisions, one statement per kind (group commit)."""

from __future__ import annotations

import logging
from functools import partial

from django.db import OperationalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..conf import Settings
from ..delivery.lease import Lease
from ..listeners.outcomes import DONE, LOST, Decision, Status
from ..log import first_line
from ..models import OutboxEvent
from ..signals import announce, event_dead, event_settled, lease_lost
from ..sql import dialect_of
from ..sql.halving import answers, in_halves, without
from ..sql.statements import all_or_nothing
from ..sql.values import LeaseKind
from .connection_cleanup import BrokenSessions
from .effects import Steps, Wait, act, in_turn, perform
from .gate import Gates
from .heartbeat import Statistics
from .leases import Releases
from .runs import kept_count

logger = logging.getLogger("django_outbox")

MAX_BATCH = 1000  # decisions settled in one step, at most
GATHER_COUNT = 250  # decisions for which a batch waits while more events are to be delivered
GATHER_TIME = 0.02  # seconds that a batch waits for them, at most
IDLE_WAIT = 1.0  # seconds that a step waits for a decision
RETRY_REFUSED = (1.0, 60.0)  # seconds until what is set aside is tried again: at first, and at most

Settled = list[tuple[Lease, Decision]]

QUIET = 60.0  # seconds after a warning of a listener's retry without another
LEVELS = {
    "dead": logging.ERROR,
    "retry": logging.WARNING,
    "discarded": logging.WARNING,
    "deferred": logging.INFO,
    "lost": logging.INFO,
    "done": logging.DEBUG,
}


class Settles:
    """Writes decisions; what the database refuses while it accepts others is set aside."""

    def __init__(self, releases: Releases) -> None:
        self._settings, self._releases = releases.settings, releases
        self._alias, self._me = releases.alias, releases.me
        self._log = SettleLog(self._alias)
        self._held, self._runs = releases.held, releases.runs
        self._unsettled: Settled = []  # not written yet

    def _write(self, part: Settled, connection: BaseDatabaseWrapper) -> None:
        """Write decisions of one kind; what has been written is finished, whatever is raised."""
        refused, error = Settled(), None
        write_some = partial(write, connection=connection, me=self._me, settings=self._settings)
        for each in in_halves(connection, part, write_some, shorter=[_shortened]):
            if not each.is_written:
                refused, error = refused + each.rows, each.error
                continue
            if each.error is not None:
                logger.error(
                    "settle rejected by the database, error text stored as ASCII "
                    "event_id=%s listener=%r",
                    each.rows[0][0].event_id,
                    each.rows[0][0].listener,
                )
            if each.result:
                perform(connection, self._renew_streams(each.rows))
            self._finish(each.rows)
        if error is not None:
            self._set_aside(refused, error)

    def _renew_streams(self, part: Settled) -> Steps[None]:
        """Drop lost streams after a refused settle: none of their events may start any more."""
        runs = {lease.run.id: lease.run for lease, _ in part if lease.stream is not None}
        mine = [each for each in runs.values() if self._held.get(each.id) is each]
        return self._releases.renew(mine)

    def _finish(self, part: Settled) -> None:
        """Go on after decisions that are written."""
        self._unsettled = without(self._unsettled, part)
        if part[0][0].kind is LeaseKind.STREAM:
            self._runs.settled(part)
        else:
            self._held.settled(part)
        self._log.report(part)

    def _set_aside(self, rows: Settled, error: Exception) -> None:
        """Have decisions that were refused stay leased, or raise if all may be refused."""
        self._unsettled = without(self._unsettled, rows)
        logger.error(
            "settle refused by the database, event stays leased "
            "count=%d event_id=%s listener=%r error=%s",
            len(rows),
            rows[0][0].event_id,
            rows[0][0].listener,
            first_line(error),
        )


class Settler(Settles):
    """Settles without a fixed interval: at once under light load, in batches under heavy load.

    After a database error it keeps the decisions and tries again; no listener runs again for it.
    A decision that the database refuses while it accepts others is set aside; its event stays
    leased.
    """

    def __init__(
        self, *, gates: Gates, releases: Releases, statistics: Statistics, sessions: BrokenSessions
    ) -> None:
        super().__init__(releases)
        self._decisions, self._wakeup, self._gates = gates.decisions, gates.wakeup, gates
        self._statistics, self._sessions = statistics, sessions
        # Only its thread changes these.
        self.settled = 0  # deliveries so far
        self._refused: Settled = []  # set aside
        self._retry_at, self._retry_pause = 0.0, 0.0  # when they are tried again (monotonic)
        # Steps so far, and the number of the last in which a decision was written.
        self._steps = self._accepted_step = 0

    @property
    def is_idle(self) -> bool:
        return not self._unsettled and not len(self._decisions)

    def step(self) -> Steps[float]:
        """Settle what waits, or wait for a decision."""
        self._steps += 1
        if not self._refused:
            self._retry_pause = RETRY_REFUSED[0]
        elif monotonic() >= self._retry_at:
            self._unsettled, self._refused = self._unsettled + self._refused, []
            self._retry_pause = min(2 * self._retry_pause, RETRY_REFUSED[1])
            self._accepted_step = self._steps  # as far as is known; they are set aside again
        if not self._unsettled:
            first = yield from act(partial(self._decisions.get, IDLE_WAIT))
            if first is not None:
                self._unsettled = [first]
                yield from self._gather()
        self._unsettled += self._decisions.get_all(MAX_BATCH - len(self._unsettled))
        parts = [self._settle(part) for part in split_by_kind(self._unsettled)]
        yield from in_turn(*parts, self._runs.release_ended())
        return 0.0

    def _gather(self) -> Steps[None]:
        """Let the batch grow while events wait for a thread; otherwise settle at once.

        A commit for every few decisions costs the database more than the rest of the deliveries.
        """
        until = monotonic() + GATHER_TIME
        while self._gates.start_soon() and not self._held.settle_waiters and monotonic() < until:
            if len(self._decisions) >= GATHER_COUNT:
                break
            yield Wait(0.001)

    def _settle(self, part: Settled) -> Steps[None]:
        """Write decisions of one kind; if only some rows are locked, the others."""
        try:
            yield partial(self._write, part)
        except OperationalError:
            free = (yield partial(self._unlocked, part)) if (yield answers) else []
            if 0 < len(free) < len(part):
                yield partial(self._write, free)
            raise

    def _write(self, part: Settled, connection: BaseDatabaseWrapper) -> None:
        session = connection.connection
        try:
            super()._write(part, connection)
        finally:
            if session is not None and connection.connection is not session:
                self._sessions.report_broken()

    def _set_aside(self, rows: Settled, error: Exception) -> None:
        if self._accepted_step < self._steps - 1:  # the database has lately accepted no others
            self._unsettled = without(self._unsettled, rows) + rows  # others are tried first
            raise error
        super()._set_aside(rows, error)
        self._refused += rows
        self._retry_at = monotonic() + self._retry_pause

    def _unlocked(self, part: Settled, connection: BaseDatabaseWrapper) -> Settled:
        """Return decisions whose rows are unlocked: an idle session must not hold up other rows."""
        ids = [lease.id for lease, _ in part]
        with transaction.atomic(using=connection.alias):
            rows = OutboxEvent.objects.using(connection.alias).filter(pk__in=ids)
            free = {*rows.lock_unlocked()}
        return [each for each in part if each[0].id in free]

    def _finish(self, part: Settled) -> None:
        self._accepted_step = self._steps
        self.settled += len(part)
        super()._finish(part)
        delays = [each.delay for lease, each in part if each.delay is not None and not lease.stream]
        if delays:
            self._wakeup.expect(min(delays))
        self._gates.made_room()
        self._statistics.add(part)


def split_by_kind(batch: Settled) -> list[Settled]:
    """Split a batch by kind of decision and kind of lease.

    First come decisions that an atomic listener has committed, then plain DONE, then the rest. This
    keeps the order of a stream, where no decision follows one that is not a plain DONE.
    """
    kinds: dict[tuple[int, bool], Settled] = {}
    for each in batch:
        lease, decision = each
        kind = 1 if decision is DONE else 0 if decision.written else 2
        kinds.setdefault((kind, lease.stream is None), []).append(each)
    return [kinds[kind] for kind in sorted(kinds, key=lambda each: each[0])]


def write(batch: Settled, *, connection: BaseDatabaseWrapper, me: str, settings: Settings) -> int:
    """Write decisions, with the causes and the histories; return how many were refused.

    Refused are those whose leases have ended, and were taken by another worker or anew.
    """
    dialect, kind = dialect_of(connection), batch[0][0].kind
    delete, kept = settings.RETENTION_DONE == 0, kept_count(settings)
    suspected = [each for each, _ in batch if each.stream is not None and each.rescues > kept]
    if suspected:
        leases = {str(each.stream): each.locked_at for each in suspected}
        dialect.keep_suspected(me=me, leases=leases, rescues=kept)
    if batch[0][1].written:  # by atomic listeners, with their changes
        refused = sum(decision is LOST for _, decision in batch)
    elif batch[0][1] is DONE:
        ids = [each.id for each, _ in batch]
        refused = len(batch) - dialect.end_done(me=me, ids=ids, kind=kind, delete=delete)
    else:
        endings = [lease.ending(decision) for lease, decision in batch]
        with all_or_nothing(connection):
            refused = len(batch) - dialect.settle_all(
                me=me, endings=endings, kind=kind, delete_done=delete
            )
    if refused > 0:  # this worker was considered lost, and they run again
        logger.warning("lost leases, settles refused count=%d of=%d", refused, len(batch))
        announce(lease_lost, sender=connection.alias, count=refused)
    return refused


def _shortened(each: tuple[Lease, Decision]) -> tuple[Lease, Decision]:
    """Return a decision as any database can store it; the thread that waits for it goes on."""
    lease, decision = each
    lease.refused = True
    return each if decision is DONE else (lease, lease.recorded(decision).shortened())


def log_failed(lease: Lease, error: BaseException | None = None) -> None:
    """Log an error of the worker itself; without ``error``, the one that is being handled."""
    logger.error(
        "delivery failed event_id=%s listener=%r",
        lease.event_id,
        lease.listener,
        exc_info=error or True,
    )


class SettleLog:
    """Logs what was settled, and sends the signals. One thread only.

    Of a listener's retries, one a minute is a warning; an outage fails thousands of them.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        # By listener: when its next retry is a warning (monotonic), and how many were not since.
        self._retries: dict[str | None, tuple[float, int]] = {}

    def report(self, settled: Settled) -> None:
        logs_done = logger.isEnabledFor(logging.DEBUG)
        if settled[0][1] is DONE and not (logs_done or event_settled.receivers):
            return  # so are the others: nothing to log or to announce
        for lease, decision in settled:
            if logs_done or decision.status is not Status.DONE or decision.outcome == "discarded":
                self._log(lease, decision)
            if decision.status is Status.DEAD:
                announce(event_dead, sender=self._alias, event=lease.event, cause=decision.error)
            if event_settled.receivers:
                announce(
                    event_settled,
                    sender=self._alias,
                    event=lease.event,
                    outcome=decision.outcome,
                    duration=lease.duration,
                    lag=lease.lag + lease.waited,
                )

    def _log(self, lease: Lease, decision: Decision) -> None:
        """Log the outcome of a delivery; the text of a listener's error only at level DEBUG."""
        attempt, error = lease.event.attempts + decision.spent, decision.kind or "none"
        # What is not available is in the circuit breaker's line, for all events.
        level = logging.DEBUG if decision.unavailable else LEVELS[decision.outcome]
        facts = (*lease.named, attempt, error)
        if decision.outcome == "retry":
            next_at, unlogged = self._retries.get(lease.listener, (0.0, 0))
            is_next = (now := monotonic()) >= next_at
            self._retries[lease.listener] = (now + QUIET, 0) if is_next else (next_at, unlogged + 1)
            logger.log(
                level if is_next else logging.DEBUG,
                "retry event_id=%s event_type=%s listener=%r attempt=%d error=%s unlogged=%d",
                *facts,
                unlogged,
            )
        else:
            logger.log(
                level,
                "%s event_id=%s event_type=%s listener=%r attempt=%d error=%s",
                decision.outcome,
                *facts,
            )
        if decision.error:
            logger.debug(
                "error text event_id=%s listener=%r text=%s",
                lease.event_id,
                lease.listener,
                decision.error,
            )
