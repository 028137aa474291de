"""The settler: one thread writes all waiting decisions, one statement per kind (group commit)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DataError, IntegrityError, OperationalError

from .. import doorbell
from ..clocks import monotonic
from ..conf import Settings
from ..delivery.lease import Lease
from ..listeners.outcomes import DONE, LOST, Decision, Status
from ..models import OutboxEvent
from ..signals import announce, event_dead, event_settled, lease_lost
from ..sql import dialect_of
from ..sql.base.transactions import all_or_nothing
from ..sql.values import Attempt, LeaseKind
from .pools import Pools
from .queues import Decisions, Held
from .statistics import Statistics
from .streams import Streams
from .wakeup import Wakeup

logger = logging.getLogger("django_outbox")

MAX_BATCH = 1000  # decisions settled in one step, at most
GATHER_COUNT = 250  # decisions for which a batch waits while more events are to be delivered
GATHER_TIME = 0.02  # seconds that a batch waits for them, at most
IDLE_WAIT = 1.0  # seconds that a step waits for a decision

Settled = list[tuple[Lease, Decision]]


class Settler:
    """Settles without a fixed interval: at once under light load, in batches under heavy load.

    After a database error it keeps the decisions and tries again; no listener runs again for it.
    """

    def __init__(
        self,
        *,
        alias: str,
        me: str,
        settings: Settings,
        held: Held,
        decisions: Decisions,
        wakeup: Wakeup,
        pools: Pools,
        streams: Streams,
        statistics: Statistics,
    ) -> None:
        self._alias, self._me, self._settings = alias, me, settings
        self._held, self._decisions, self._wakeup = held, decisions, wakeup
        self._pools = pools
        self._streams, self._statistics = streams, statistics
        self.settled = 0  # deliveries so far; only its thread changes it
        self._unsettled: Settled = []  # not written yet; only its thread changes it

    @property
    def is_idle(self) -> bool:
        return not self._unsettled and not len(self._decisions)

    def step(self) -> float:
        if not self._unsettled:
            first = self._decisions.take(IDLE_WAIT)
            if first is None:
                self._streams.release(connections[self._alias])
                return 0.0
            self._unsettled = [first]
            self._gather()
        self._unsettled += self._decisions.take_all(MAX_BATCH - len(self._unsettled))
        self._unsettled = [
            each if each[1] is DONE else self._if_ours(*each) for each in self._unsettled
        ]
        locked: OperationalError | None = None
        for part in split_by_kind(self._unsettled):
            locked = self._settle(part) or locked
        self._streams.release(connections[self._alias])
        if locked is not None:
            raise locked
        return 0.0

    def _gather(self) -> None:
        """Let the batch grow while events wait for a thread; otherwise settle at once.

        A commit for every few decisions costs the database more than the rest of the deliveries.
        """
        until = monotonic() + GATHER_TIME
        while self._pools.start_soon() and not self._held.settle_waiters and monotonic() < until:
            if len(self._decisions) >= GATHER_COUNT:
                break
            time.sleep(0.001)

    def _if_ours(self, lease: Lease, decision: Decision) -> tuple[Lease, Decision]:
        """Return a decision as it is to be written: one on a lost lease must not release the event.

        The row has this worker's name again once it has claimed the event anew, and may run it.
        """
        if (
            decision.status is Status.DONE
            or decision.written
            or not self._held.is_superseded(lease)
        ):
            return lease, decision
        return lease, LOST

    def _settle(self, part: Settled) -> OperationalError | None:
        """Write decisions of one kind; if only some rows are locked, skip those, return the error.

        Raises ``OperationalError`` if all are locked, or if the connection is unusable.
        """
        connection, locked = connections[self._alias], None
        try:
            refused = write(part, connection=connection, me=self._me, settings=self._settings)
        except OperationalError as error:
            free = self._unlocked(part) if connection.is_usable() else []
            if not 0 < len(free) < len(part):
                raise
            part, locked = free, error
            refused = write(part, connection=connection, me=self._me, settings=self._settings)
        if refused:
            self._drop_lost_streams(part)
        self._finish(part)
        return locked

    def _unlocked(self, part: Settled) -> Settled:
        """Return decisions whose rows are unlocked: an idle session must not hold up other rows."""
        ids = [lease.event_id for lease, _ in part]
        with transaction.atomic(using=self._alias):
            rows = OutboxEvent.objects.using(self._alias).filter(pk__in=ids)
            free = {*rows.lock_unlocked()}
        return [each for each in part if each[0].event_id in free]

    def _drop_lost_streams(self, part: Settled) -> None:
        """Drop lost streams after a refused settle: none of their events may start any more."""
        streams = [each for lease, _ in part if (each := self._streams.get(lease.key))]
        self._streams.renew(connections[self._alias], streams)

    def _finish(self, part: Settled) -> None:
        if len(part) == len(self._unsettled):
            self._unsettled = []
        else:
            written = {lease.event_id for lease, _ in part}
            self._unsettled = [each for each in self._unsettled if each[0].event_id not in written]
        if part[0][0].kind is LeaseKind.STREAM:
            self._streams.settled(part)
        self._held.drop(lease for lease, _ in part)
        self.settled += len(part)
        delays = [each.delay for lease, each in part if each.delay is not None and not lease.key]
        if delays:
            self._wakeup.expect(min(delays))
        self._pools.made_room()
        if part[0][1] is not DONE and any(
            each.queue and not self._pools.serves(each.queue) for _, each in part
        ):
            doorbell.ring(connections[self._alias])  # other workers serve the queue
        self._statistics.add(part)
        report_settled(part, alias=self._alias)


def split_by_kind(batch: Settled) -> list[Settled]:
    """Split a batch by kind of decision and kind of lease.

    First come decisions that an atomic listener has committed, then plain DONE, then the rest. This
    keeps the order of a stream, where no decision follows one that is not a plain DONE.
    """
    kinds: dict[tuple[int, bool], Settled] = {}
    for each in batch:
        lease, decision = each
        kind = 1 if decision is DONE else 0 if decision.written else 2
        kinds.setdefault((kind, lease.key is None), []).append(each)
    return [kinds[kind] for kind in sorted(kinds, key=lambda each: each[0])]


def write(batch: Settled, *, connection: BaseDatabaseWrapper, me: str, settings: Settings) -> int:
    """Write decisions; return how many were refused because their rows have another owner.

    If the database rejects a value, write them one by one, so that it affects no other decision.
    """
    try:
        return _write(batch, connection=connection, me=me, settings=settings)
    except (DataError, IntegrityError):
        if len(batch) == 1:
            batch = [_with_ascii_error(batch[0])]
            return _write(batch, connection=connection, me=me, settings=settings)
        return sum(write([each], connection=connection, me=me, settings=settings) for each in batch)


def _write(batch: Settled, *, connection: BaseDatabaseWrapper, me: str, settings: Settings) -> int:
    refused = _write_with_history(batch, connection=connection, me=me, settings=settings)
    if refused > 0:  # this worker was considered lost, and they run again
        logger.warning("lost leases, settles refused count=%d of=%d", refused, len(batch))
        announce(lease_lost, sender=connection.alias, count=refused)
    return refused


def _write_with_history(
    batch: Settled, *, connection: BaseDatabaseWrapper, me: str, settings: Settings
) -> int:
    """Write decisions and, in the same transaction, the failures; return how many were refused.

    If some are refused, nothing tells which, so they are written one by one: the history has no
    failures of executions that did not count.
    """
    dialect, first = dialect_of(connection), batch[0][1]
    attempts = [] if first is DONE else [one for each in batch for one in _failures(*each, me=me)]
    if first.written:
        dialect.note_attempts(connection, attempts)
        return sum(decision is LOST for _, decision in batch)
    try:
        with all_or_nothing(connection) if attempts else nullcontext():
            refused = len(batch) - dialect.settle_all(
                connection,
                me=me,
                decisions=[(lease.event_id, decision) for lease, decision in batch],
                kind=batch[0][0].kind,
                delete_done=settings.RETENTION_DONE == 0,
                attempts=attempts_read(batch),
            )
            if refused and attempts and len(batch) > 1:
                raise _Refused
            if not refused:
                dialect.note_attempts(connection, attempts)
    except _Refused:
        return sum(
            _write_with_history([each], connection=connection, me=me, settings=settings)
            for each in batch
        )
    return refused


def attempts_read(batch: Settled) -> dict[str, int]:
    """Return the attempts of events that stay leased, by their streams, after a settle."""
    if batch[0][1] is DONE or batch[0][0].kind is LeaseKind.ROW:
        return {}
    return {lease.event_id: lease.attempts for lease, _ in batch}


class _Refused(Exception):
    """Some decisions of a batch were refused: it is rolled back."""


def _failures(lease: Lease, decision: Decision, *, me: str) -> Sequence[Attempt]:
    """Return what the history is to tell: the calls that failed, or of what else the event died."""
    if decision is LOST:
        return ()
    if lease.failures or decision.status is not Status.DEAD:
        return lease.failures or ()
    number = lease.attempts + decision.spent
    return (Attempt(lease.event_id, "dead", number, me, error=decision.error or ""),)


def _with_ascii_error(each: tuple[Lease, Decision]) -> tuple[Lease, Decision]:
    """Return the decision with its error text in ASCII, which any database accepts."""
    lease, decision = each
    lease.failures = [
        one._replace(error=one.error.encode("ascii", "replace").decode())
        for one in lease.failures or ()
    ]
    logger.error(
        "settle rejected by the database, error text stored as ASCII event_id=%s", lease.event_id
    )
    error = decision.error and decision.error.encode("ascii", "replace").decode()
    return lease, Decision(
        status=decision.status, delay=decision.delay, spent=decision.spent, error=error,
        outcome=decision.outcome,
    )  # fmt: skip


def report_settled(settled: Settled, *, alias: str) -> None:
    """Log what was settled, and send the signals."""
    has_receivers = bool(event_settled.receivers)
    for lease, decision in settled:
        if decision.status is not Status.DONE:
            _log(lease, decision)
        if decision.status is Status.DEAD:
            announce(event_dead, sender=alias, event=lease.event, cause=decision.error)
        if has_receivers and decision.outcome != "moved":
            announce(
                event_settled, sender=alias, event=lease.event, outcome=decision.outcome,
                duration=lease.duration, lag=lease.lag + lease.waited,
            )  # fmt: skip


def _log(lease: Lease, decision: Decision) -> None:
    """Log the outcome of a delivery; the text of a listener's error only at level DEBUG."""
    levels = {"dead": logging.ERROR, "retry": logging.WARNING, "moved": logging.DEBUG}
    level = levels.get(decision.outcome, logging.INFO)
    if decision.unavailable:  # the circuit breaker's line tells it, for all events
        level = logging.DEBUG
    logger.log(
        level,
        "%s event_id=%s event_type=%s attempt=%d error=%s",
        decision.outcome, lease.event_id, lease.event_type,
        lease.event.attempts + decision.spent, decision.kind,
    )  # fmt: skip
    if decision.error:
        logger.debug("error text event_id=%s text=%s", lease.event_id, decision.error)
