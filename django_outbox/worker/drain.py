"""``drain()``: delivers everything that is due, in the calling thread."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from datetime import datetime
from functools import partial
from math import inf

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..conf import current
from ..delivery.call import Call, drain_ending_errors
from ..delivery.delivery import Delivery
from ..delivery.drivers import drive
from ..delivery.lease import Lease
from ..delivery.route import PAUSED
from ..events import as_utc
from ..listeners.outcomes import Decision
from ..listeners.queues import batch_room
from ..models import OutboxEvent
from ..models.pause_queryset import bring_home
from ..sql import dialect_of, engine_connection, is_in_memory
from ..sql.halving import answers
from ..sql.values import EVENTS, STREAMS, Branch, RescueState
from .claims import Claims
from .connection_cleanup import Savepoint, tidy
from .deliveries import Deliveries
from .effects import perform
from .engine import new_owner, served
from .heartbeat import renew
from .held import SAFE_PART, Held
from .housekeeper import work_off_all
from .leases import Releases
from .pauses import KnownPauses, end_pauses
from .polling import Wakeup
from .ready import Lane, Ready
from .runs import Runs
from .settler import Settled, Settles, split_by_kind
from .threads import Loop

logger = logging.getLogger("django_outbox")

GATHER_COUNT, GATHER_TIME = 20, 0.1  # decisions, or seconds, after which they are settled
RETRY_DELAYS = (0.1, 0.5, 2.0)  # seconds before each further try of a settle
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
    return Drain(alias, at=at and as_utc(at), queues=only, inline=inline).run(limit)


class Drain(Settles):
    """Claims, delivers and settles in one thread, with the parts of a worker.

    ``inline``: on the caller's connection, where a transaction keeps the leases; else on its own.
    """

    probing = closed = False  # as a queue
    report = None

    def __init__(
        self, alias: str, *, at: datetime | None, queues: frozenset[str] | None, inline: bool
    ) -> None:
        settings = current()
        held = Held(settings.LEASE, safe_part=inf if inline else SAFE_PART)
        runs = Runs(me=new_owner(), settings=settings, held=held, pools=self, wakeup=Wakeup())
        releases = Releases(alias=alias, runs=runs)
        super().__init__(releases)
        self._at, self._only, self._inline = at, queues, inline
        self._connection: BaseDatabaseWrapper = connections[alias]  # of claims and settles
        self._in_use = [  # with open transactions of the caller, which must not be closed
            each for each in connections.all(initialized_only=True) if each.in_atomic_block
        ]
        self.ready, self.known_pauses = Ready(), KnownPauses()
        self._claims = Claims(releases=releases, known_pauses=self.known_pauses, gates={}, at=at)
        self._deliveries = Deliveries(alias=alias, queue=self, runs=runs)
        self._queues: list[str] = []  # of the claims, in their order
        self._delivery: Delivery  # the last one
        self._savepoint: Savepoint  # around it, in the caller's transaction
        self._followers: list[Lease] = []  # events behind those delivered, which may run at once
        # Deliveries so far, and decisions, those of paused events among them.
        self._count = self._progress = 0
        # What is not claimed again: ids of events, and queues whose broker is away.
        self._left, self._away = list[str](), set[str]()
        self._horizon = inf  # seconds from the database's now to ``at``
        self._delays = defaultdict[str, float](float)  # seconds, of each event so far
        self._accepts = False  # the database has accepted a decision
        self._refused = 0  # decisions that were refused while none had been accepted
        self._error: Exception | None = None  # by which

    def run(self, limit: int | None) -> int:
        """Deliver until nothing is due; return how many deliveries there were."""
        most = inf if limit is None else limit
        if self._inline:
            self._deliver_all(most, chunk=max(map(batch_room, self._settings.queues)))
        else:
            name, step = f"outbox-{self._alias}-drain-heartbeat", partial(renew, self._releases)
            heartbeat = Loop(name, step, alias=self._alias)
            own = engine_connection(self._alias, lock_wait=self._settings.LOCK_WAIT)
            with heartbeat, closing(own) as self._connection:
                self._deliver_all(most, chunk=self._settings.POLL_BATCH_SIZE)
        return self._count

    def _deliver_all(self, limit: float, *, chunk: int) -> None:
        connection, known = self._connection, self._settings.queues
        if self._at is not None:
            self._horizon = (self._at - dialect_of(connection).clock()).total_seconds()
        work_off_all(connection)
        others = dialect_of(connection).other_queues(known=[*known])
        for pause in dialect_of(connection).stranded():
            deque(bring_home(connection, pause), maxlen=0)
        self._queues = [*known, *others] if self._only is None else [*self._only]
        before = -1
        while (progress := self._progress + self._claims.routed) > before and self._count < limit:
            before = progress
            for state, most in (RescueState.ORDINARY, chunk), (RescueState.SUSPECT, 1):
                for claim in self._claim_rows, self._claim_streams:
                    if room := int(min(most, limit - self._count)):
                        claim(room, state)
                        self._work(self._count + room)
                if self._progress + self._claims.routed > before:  # a suspect comes last, alone
                    break
        if self._error is not None and not self._accepts:
            raise self._error

    def accepts(self, queue: str) -> bool:
        """Return whether events of this queue may be started here."""
        left = self.known_pauses.closed | self._away
        return queue not in left and (self._only is None or queue in self._only)

    def claimed(self, leases: Sequence[Lease]) -> None:
        """Note events that were claimed: as many as there are."""

    def _claim_rows(self, room: int, state: RescueState) -> None:
        """Claim due events of one state from the first queue that has some."""
        perform(self._connection, self.known_pauses.refresh())
        if monotonic() >= self.known_pauses.ends_at:
            end_pauses(self._alias)
            self.known_pauses.read(self._connection)
        most_bytes = self._settings.PREFETCH_BYTES // 2
        for queue in filter(self.accepts, self._queues):
            branch = Branch(queue, room, most_bytes=most_bytes)
            claim = self._claims.of([branch], exclude=self._left, state=state)
            # What was found may all have been passed on, parked or coalesced.
            while perform(self._connection, self._claims.claim_rows(claim)).rows:
                if len(self.ready) or self._unsettled:
                    return

    def _claim_streams(self, room: int, state: RescueState) -> None:
        """Claim until there is something to deliver: of some streams that are due, there is not."""
        claims, before = self._claims, -1
        if state is RescueState.SUSPECT:
            queues = filter(self.accepts, self._queues)
            any(perform(self._connection, claims.claim_suspect(STREAMS, each)) for each in queues)
            return
        while self._claims.empty > before:
            before = self._claims.empty
            if not (rooms := dict.fromkeys(filter(self.accepts, self._queues), room)):
                break
            brought, more = perform(self._connection, claims.claim_streams(rooms, scan=True))
            if brought or not more:
                break

    def _work(self, most: int) -> None:
        """Deliver what was claimed, until there were ``most`` deliveries; release the rest."""
        since, followers = monotonic(), self._followers
        try:
            while True:
                found = self._next() if self._count < most else None
                if found is not None:
                    self._deliver(found, most - self._count)
                    self._deliveries.put_all_but_one(followers)
                elif not self._unsettled:
                    break
                is_time = monotonic() - since > GATHER_TIME
                if found is None or is_time or len(self._unsettled) >= GATHER_COUNT:
                    self._settle()
                    since = monotonic()
        finally:
            followers.clear()
            self._settle()
            self._release()

    def _next(self) -> Lease | Lane | None:
        if self._followers:
            return self._followers.pop()
        if not len(self.ready) and (runs := self._runs.to_read(monotonic(), GATHER_COUNT)):
            perform(self._connection, self._claims.read(runs, GATHER_COUNT))
        return next(iter(self.ready.get_all(1)), None)  # type: ignore[return-value]

    def _deliver(self, found: Lease | Lane, room: int) -> None:
        leases = [found] if isinstance(found, Lease) else self._deliveries.take(found, room)
        leases = self._deliveries.start(leases, lambda: False)
        if not leases:
            return
        self._delivery = delivery = self._deliveries.of(leases)
        delivery.context.run(drain_ending_errors.set, ESCAPING)
        try:
            if self._inline:
                with Savepoint(connections[self._alias]) as self._savepoint:
                    delivery.context.run(drive, delivery.steps(), self)
            else:
                delivery.context.run(drive, delivery.steps(), self)
                self.tidy()
        except BaseException:
            delivery.leave()
            self.pass_on()
            raise

    def make(self, call: Call) -> object:
        """Make a call."""
        return call.make()

    def tidy(self) -> bool:
        """Close the connections that a listener broke; return whether the lease is current."""
        lease = self._delivery.lead
        if self._inline:
            self._savepoint.renew()
        else:
            for connection in connections.all(initialized_only=True):
                if connection not in self._in_use:
                    tidy(connection, lease)
        return self._held.is_current(lease)

    def pass_on(self) -> None:
        """Have what was decided settled."""
        self._followers += self._deliveries.pass_on(self._delivery)

    def turn_away(self, lease: Lease) -> None:
        """Do nothing: it claims what may start."""

    def put(self, leases: Sequence[Lease]) -> None:
        """Queue events, which this thread delivers."""
        self.ready.put(*leases)

    def settle(self, decided: tuple[Lease, Decision], /) -> None:
        """Have a decision settled, with others; leave alone what is not to run again.

        That is an event which is due at once, paused, or due beyond the horizon. After an outage it
        is the whole queue: its events are due again before the run has ended.
        """
        self._unsettled.append(decided)
        lease, decision = decided
        self._progress += 1
        self._count += decision is not PAUSED
        if decision.unavailable and lease.queue not in self._away:
            logger.warning(
                "not available, its events wait queue=%s reason=%s",
                lease.queue,
                decision.unavailable,
            )
            self._away.add(lease.queue)
        if decision.delay is not None:
            self._delays[lease.id] += decision.delay
            is_late = self._delays[lease.id] > self._horizon
            if decision.delay == 0 or is_late or decision is PAUSED:
                self._leave([lease])

    def _leave(self, leases: Iterable[Lease]) -> None:
        for each in leases:
            if each.stream is None:
                self._left.append(each.id)
            else:
                self._runs.exclude(each.stream)

    def _settle(self) -> None:
        """Write decisions; retry after errors, so that the events need not run again."""
        pauses = iter(RETRY_DELAYS)
        while self._unsettled:
            part = split_by_kind(self._unsettled)[0]
            try:
                self._write(part, self._connection)
            except Exception as error:
                pause = next(pauses, None)
                if pause is not None and not self._connection.in_atomic_block:
                    time.sleep(pause)
                    continue
                # A few are left, in the hope that others are accepted.
                part, pauses = split_by_kind(self._unsettled)[0], iter(RETRY_DELAYS)
                self._error, self._refused = error, self._refused + len(part)
                waits = dialect_of(self._connection).is_lock_wait(error)
                if self._refused > GATHER_COUNT or waits or not answers(self._connection):
                    self._unsettled = []  # they stay leased
                    raise
                self._leave_refused(part, error)
        perform(self._connection, self._runs.release_ended())

    def _finish(self, part: Settled) -> None:
        self._accepts = True
        super()._finish(part)

    def _set_aside(self, rows: Settled, error: Exception) -> None:
        if not self._accepts:
            raise error
        self._leave_refused(rows, error)

    def _leave_refused(self, rows: Settled, error: Exception) -> None:
        super()._set_aside(rows, error)
        self._leave(lease for lease, _ in rows)

    def _release(self) -> None:
        """Release what was not started; leave leased what the database refuses to settle."""
        connection, held = self._connection, self._held
        perform(connection, self._releases.give_back(held.of(EVENTS)))
        held.drop(each for run in held.of(EVENTS) for each in [*run.out])
        perform(connection, self._releases.release_streams())
