"""``drain()``: delivers everything that is due, in the calling thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from contextvars import copy_context
from datetime import datetime

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..conf import current
from ..delivery.batch import Batch
from ..delivery.call import call_fallback
from ..delivery.deliver import PAUSED, batch_listener, deliver
from ..delivery.interceptors import drain_ending_errors
from ..delivery.lease import Lease
from ..events import as_utc
from ..listeners.outcomes import Decision
from ..listeners.queues import batch_room, queue_of
from ..listeners.registry import Listener
from ..models import OutboxEvent
from ..models.pause_queryset import bring_home
from ..sql import dialect_of, engine_connection, is_in_memory
from ..sql.values import EVENTS, RescueState
from .connection_cleanup import tidy
from .drain_settles import GATHER_COUNT, DrainSettles
from .effects import perform
from .leases import Heartbeat
from .releases import release_streams
from .savepoint import Savepoint
from .settle_log import Settled
from .threads import Loop
from .worker import served

logger = logging.getLogger("django_outbox")

GATHER_TIME = 0.1  # seconds after which decisions are settled
ESCAPING = (KeyboardInterrupt,)  # ends the run; anything else that a listener raises is a failure


def drain(
    using: str | None = None,
    limit: int | None = None,
    at: datetime | None = None,
    *,
    queues: Collection[str] | None = None,
) -> int:
    """Deliver what is due, and what becomes due meanwhile; return the number of deliveries.

    ``using`` is the alias (default: the router's), ``limit`` the most deliveries, ``at`` an instant
    to use as the database's now, ``queues`` the only queues to deliver from (default: all). A
    queue's ``RATE`` does not hold here.
    Outside a transaction, a heartbeat thread renews the leases.
    Inside one (a ``TestCase``), everything runs on that connection, each delivery in a savepoint.
    On in-memory SQLite everything runs on that connection, too, without a savepoint if there is no
    transaction.
    If ``OUTBOX["ENABLED"]`` is False, this is logged and nothing is delivered.

    Raises ``ValueError`` for a queue that ``OUTBOX["QUEUES"]`` does not have.

    ``SystemExit`` from a listener is a failure like any other. ``KeyboardInterrupt`` ends the run:
    the event is released, due at once and with no attempt counted; then the exception propagates.
    """
    alias = using or router.db_for_write(OutboxEvent)
    if not current().ENABLED:
        logger.warning('OUTBOX["ENABLED"] is False: nothing is delivered alias=%s', alias)
        return 0
    connection = connections[alias]
    inline = connection.in_atomic_block or is_in_memory(connection)
    only = None if queues is None else served(queues, current())
    return _Drain(alias, at=at and as_utc(at), queues=only).run(limit, inline=inline)


class _Drain(DrainSettles):
    def run(self, limit: int | None, *, inline: bool) -> int:
        if inline:
            chunk = max(map(batch_room, self.settings.queues))
            return self._deliver_all(connections[self.alias], limit, chunk=chunk, inline=True)
        own = engine_connection(self.alias, lock_wait=self.settings.LOCK_WAIT)
        beat = Heartbeat(
            alias=self.alias,
            me=self.me,
            held=self.held,
            worker_row=None,
            runs=self.runs,
            releases=self.releases,
        )
        loop = Loop(
            f"outbox-{self.alias}-drain-heartbeat",
            beat.step,
            alias=self.alias,
            lock_wait=self.settings.LOCK_WAIT,
        )
        loop.start()
        try:
            return self._deliver_all(own, limit, chunk=self.settings.POLL_BATCH_SIZE, inline=False)
        finally:
            loop.stop()
            loop.join()
            own.close()

    def _deliver_all(
        self, connection: BaseDatabaseWrapper, limit: int | None, *, chunk: int, inline: bool
    ) -> int:
        if self.at is not None:
            self.horizon = (self.at - dialect_of(connection).clock()).total_seconds()
        known = self.settings.queues
        others = dialect_of(connection).other_queues(known=[*known])
        for pause in dialect_of(connection).stranded():
            deque(bring_home(connection, pause), maxlen=0)
        self.queues = [*known, *others] if self.only is None else [*self.only]
        count, before = 0, -1
        while self._progress > before and (limit is None or count < limit):
            before = self._progress
            for state, most in (RescueState.ORDINARY, chunk), (RescueState.SUSPECT, 1):
                room = most if limit is None else min(most, limit - count)
                leases = self._claim(connection, room, state)
                if leases or len(self.unrun):
                    count += self._deliver(connection, leases, inline=inline)
                if room := most if limit is None else min(most, limit - count):
                    count += self._deliver_streams(connection, room, state, inline=inline)
                if self._progress > before:  # a suspect comes last, alone
                    break
        if self._error is not None and not self._accepts:
            raise self._error
        return count

    @property
    def _progress(self) -> int:
        return self.decided + self.reads.routed

    def _deliver_streams(
        self, connection: BaseDatabaseWrapper, room: int, state: RescueState, *, inline: bool
    ) -> int:
        """Deliver at most ``room`` events of due streams, those of each stream in order."""
        count, follower = 0, None
        waiting: Settled = []
        self._claim_streams(connection, room, state)
        try:
            while count < room or waiting:
                lease = follower if count < room else None
                if lease is None and not waiting and count < room:
                    lease = self._next_head(connection, room)
                    if lease is None:
                        break
                if lease is not None and (listener := batch_listener(lease)) is not None:
                    follower = None
                    heads = self._same_lane(listener, lease, room - count)
                    count += self._decide_batch(listener, heads, waiting, inline=inline)
                elif lease is not None and (self.held.start(lease) or inline):
                    decision = self._decide(lease, inline=inline)
                    follower = self.runs.next(lease, decision)
                    waiting.append((lease, decision))
                    count += _is_delivery(decision)
                    if follower is not None and len(waiting) < GATHER_COUNT:
                        continue
                part, waiting = waiting, []
                self._settle_keyed(connection, part)
        finally:
            self._settle_keyed(connection, waiting)
            release_streams(connection, self.releases, self.held)
        return count

    def _settle_keyed(self, connection: BaseDatabaseWrapper, part: Settled) -> None:
        part = part + self._unrun()
        self._settle(connection, part)
        self.runs.settled(part)
        perform(connection, self.releases.release_ended())

    def _deliver(
        self, connection: BaseDatabaseWrapper, leases: list[Lease], *, inline: bool
    ) -> int:
        since, waiting = monotonic(), self._unrun()
        count = len(waiting)
        try:
            for listener, some in self._batches(leases):
                if listener is not None:
                    count += self._decide_batch(listener, some, waiting, inline=inline)
                elif inline or self.held.wait_current(some[0], lambda: False):
                    decision = self._decide(some[0], inline=inline)
                    waiting.append((some[0], decision))
                    count += _is_delivery(decision)
                if len(waiting) >= GATHER_COUNT or monotonic() - since > GATHER_TIME:
                    part, waiting, since = waiting, [], monotonic()
                    self._settle(connection, part)
        finally:
            self._settle(connection, waiting)
            perform(connection, self.releases.give_back(self.held.of(EVENTS)))
            self.held.drop(each for run in self.held.of(EVENTS) for each in [*run.out])
        return count

    def _unrun(self) -> Settled:
        """Return what was decided without being run."""
        found = self.unrun.take_all(len(self.unrun))
        self.decided += len(found)
        return found

    def _decide_batch(
        self, listener: Listener, leases: list[Lease], into: Settled, *, inline: bool
    ) -> int:
        """Deliver a batch; add what was decided to ``into``, and return the count of deliveries."""
        current_ones = [
            each for each in leases if inline or self.held.wait_current(each, lambda: False)
        ]
        if not current_ones:
            return 0
        decided: Settled = []
        try:
            self._run_batch(listener, current_ones, decided, inline=inline)
        finally:
            for lease, decision in decided:
                lease.started_at = monotonic()
                self._exclude_delayed(lease, decision, queue_of(listener))
            self.decided += len(decided)
            into += decided
        return sum(_is_delivery(decision) for _, decision in decided)

    def _run_batch(
        self, listener: Listener, leases: list[Lease], into: Settled, *, inline: bool
    ) -> None:
        if inline:
            with Savepoint(connections[self.alias]) as savepoint:
                self._run_in_context(listener, leases, into, savepoint.renew, self.held.has)
        else:
            self._run_in_context(listener, leases, into, self._tidy, self.held.is_current)
            self._tidy(leases[0])

    def _run_in_context(
        self,
        listener: Listener,
        leases: list[Lease],
        into: Settled,
        between: Callable[[Lease], bool],
        is_current: Callable[[Lease], bool],
    ) -> None:
        context = copy_context()
        context.run(drain_ending_errors.set, ESCAPING)
        batch = Batch(
            listener,
            leases,
            alias=self.alias,
            between=between,
            is_current=is_current,
            pauses=self.known_pauses.pauses,
        )
        try:
            context.run(batch.run)
            for each in batch.fallbacks:
                between(batch.lead)
                batch.decided.append((each.lease, call_fallback(each)))
        finally:
            self.runs.wait_again(batch.to_repeat)
            into += batch.decided

    def _decide(self, lease: Lease, *, inline: bool) -> Decision:
        try:
            decision = self._decision(lease, inline=inline)
        except BaseException:
            lease.started_at = 0.0  # it is released as if it had not started
            raise
        lease.started_at = monotonic()
        self.decided += 1
        self._exclude_delayed(lease, decision, lease.queue)
        return decision

    def _decision(self, lease: Lease, *, inline: bool) -> Decision:
        if inline:
            with Savepoint(connections[self.alias]) as savepoint:
                return self._run(lease, savepoint.renew)
        decision = self._run(lease, self._tidy)
        self._tidy(lease)
        return decision

    def _run(self, lease: Lease, between: Callable[[Lease], bool]) -> Decision:
        """Deliver in a separate context: a language or time zone that a listener sets is gone."""
        context = copy_context()
        context.run(drain_ending_errors.set, ESCAPING)
        return context.run(
            deliver, lease, alias=self.alias, between=between, pauses=self.known_pauses.pauses
        )

    def _tidy(self, lease: Lease) -> bool:
        """Close the connections that a listener broke; return whether the lease is current."""
        for connection in connections.all(initialized_only=True):
            if connection not in self.in_use:
                tidy(connection, lease)
        return self.held.is_current(lease)

    def _exclude_delayed(self, lease: Lease, decision: Decision, queue: str) -> None:
        """Exclude an event from further claims if it is due at once, paused or due after ``at``.

        After an outage, exclude its whole queue: its events are due again before the run has ended.
        """
        if decision.unavailable:
            self.away.add(queue)
        if decision.delay is None:
            return
        row_id = lease.id
        self.total_delays[row_id] = self.total_delays.get(row_id, 0.0) + decision.delay
        beyond = self.at is not None and self.total_delays[row_id] > self.horizon
        if decision.delay == 0 or beyond or decision is PAUSED:
            self._exclude(lease)


def _is_delivery(decision: Decision) -> bool:
    """Return whether an event was delivered, or something else was decided than to wait."""
    return decision is not PAUSED
