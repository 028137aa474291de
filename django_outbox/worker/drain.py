"""``drain()``: delivers everything that is due, in the calling thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from functools import partial
from math import inf
from typing import Any

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..conf import Settings, current
from ..delivery.call import Call
from ..delivery.delivery import Delivery
from ..delivery.drivers import drive
from ..delivery.interceptors import drain_ending_errors
from ..delivery.lease import Lease
from ..delivery.route import PAUSED
from ..events import as_utc
from ..listeners.outcomes import Decision
from ..listeners.queues import batch_room
from ..models import OutboxEvent
from ..models.pause_queryset import bring_home
from ..sql import dialect_of, engine_connection, is_in_memory
from ..sql.values import EVENTS, STREAMS, Branch, RescueState
from .claims import Claims
from .connection_cleanup import tidy
from .deliveries import Deliveries
from .drain_settles import GATHER_COUNT, DrainSettles
from .effects import perform
from .heartbeat import renew
from .held import SAFE_PART, Held
from .pauses import KnownPauses, end_pauses
from .queues import Decisions
from .ready import Lane, Ready
from .releases import Releases
from .runs import Runs
from .savepoint import Savepoint
from .settle_log import Settled
from .stream_reads import StreamReads
from .threads import Loop
from .wakeup import Wakeup
from .worker import new_owner, served

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
    return Drain(alias, at=at and as_utc(at), queues=only, inline=inline).run(limit)


class Drain:
    """Claims, delivers and settles in one thread, with the parts of a worker.

    ``inline``: on the caller's connection, whose transaction keeps the leases; else on one of its
    own, with a heartbeat.
    """

    probing = closed = False  # as a queue
    report = None

    def __init__(
        self, alias: str, *, at: datetime | None, queues: frozenset[str] | None, inline: bool
    ) -> None:
        self._alias, self._at, self._only, self._inline = alias, at, queues, inline
        self._settings: Settings = current()
        self._me = new_owner()
        self._held = Held(self._settings.LEASE, safe_part=inf if inline else SAFE_PART)
        self._connection: BaseDatabaseWrapper = connections[alias]  # of claims and settles
        self._in_use = [  # with open transactions of the caller, which must not be closed
            each for each in connections.all(initialized_only=True) if each.in_atomic_block
        ]
        self.known_pauses, self._unrun = KnownPauses(), Decisions()
        self.ready = Ready()
        wakeup = Wakeup()
        self._runs = Runs(settings=self._settings, held=self._held, pools=self, wakeup=wakeup)
        self._releases = Releases(
            alias=alias, me=self._me, held=self._held, runs=self._runs, wakeup=wakeup
        )
        parts: dict[str, Any] = {
            "settings": self._settings,
            "releases": self._releases,
            "pools": self,
            "decisions": self._unrun,
            "at": at,
        }
        self._reads = StreamReads(known_pauses=self.known_pauses, **parts)
        self._claims = Claims(reads=self._reads, gates={}, **parts)
        self._deliveries = Deliveries(
            alias=alias, queue=self, settles=self, held=self._held, runs=self._runs
        )
        self._queues: list[str] = []  # of the claims, in their order
        self._delivery: Delivery  # the last one
        self._savepoint: Savepoint  # around it, in the caller's transaction
        self._followers: list[Lease] = []  # events behind those delivered, which may run at once
        self._decided: Settled = []  # to be settled
        self._count = 0  # deliveries so far
        self._progress = 0  # decisions so far, those of paused events among them
        self._settles = DrainSettles(
            alias=alias, me=self._me, settings=self._settings, streams=self._reads.exclude
        )

    def run(self, limit: int | None) -> int:
        """Deliver until nothing is due; return how many deliveries there were."""
        most = inf if limit is None else limit
        if self._inline:
            self._deliver_all(most, chunk=max(map(batch_room, self._settings.queues)))
        else:
            own = engine_connection(self._alias, lock_wait=self._settings.LOCK_WAIT)
            with self._heartbeat(), closing(own) as self._connection:
                self._deliver_all(most, chunk=self._settings.POLL_BATCH_SIZE)
        return self._count

    @contextmanager
    def _heartbeat(self) -> Iterator[None]:
        loop = Loop(
            f"outbox-{self._alias}-drain-heartbeat",
            partial(renew, self._releases),
            alias=self._alias,
            lock_wait=self._settings.LOCK_WAIT,
        )
        loop.start()
        try:
            yield
        finally:
            loop.stop()
            loop.join()

    def _deliver_all(self, limit: float, *, chunk: int) -> None:
        connection, known = self._connection, self._settings.queues
        if self._at is not None:
            self._settles.horizon = (self._at - dialect_of(connection).clock()).total_seconds()
        others = dialect_of(connection).other_queues(known=[*known])
        for pause in dialect_of(connection).stranded():
            deque(bring_home(connection, pause), maxlen=0)
        self._queues = [*known, *others] if self._only is None else [*self._only]
        before = -1
        while (progress := self._progress + self._reads.routed) > before and self._count < limit:
            before = progress
            for state, most in (RescueState.ORDINARY, chunk), (RescueState.SUSPECT, 1):
                for claim in self._claim_rows, self._claim_streams:
                    if room := int(min(most, limit - self._count)):
                        claim(room, state)
                        self._work(self._count + room)
                if self._progress + self._reads.routed > before:  # a suspect comes last, alone
                    break
        self._settles.check()

    # -- claims ----------------------------------------------------------------------------------

    def accepts(self, queue: str) -> bool:
        """Return whether events of this queue may be started here."""
        served_here = self._only is None or queue in self._only
        return (
            served_here
            and queue not in self.known_pauses.closed
            and queue not in self._settles.away
        )

    def _open_queues(self) -> list[str]:
        return [each for each in self._queues if self.accepts(each)]

    def _claim_rows(self, room: int, state: RescueState) -> None:
        """Claim due events of one state from the first queue that has some."""
        perform(self._connection, self.known_pauses.refresh())
        if monotonic() >= self.known_pauses.ends_at:
            end_pauses(self._alias)
            self.known_pauses.read(self._connection)
        most_bytes = self._settings.PREFETCH_BYTES // 2
        for queue in self._open_queues():
            branch = Branch(queue, room, most_bytes=most_bytes)
            claim = self._claims.of([branch], exclude=self._settles.events, state=state)
            # What was found may all have been passed on, parked or coalesced.
            while perform(self._connection, self._claims.claim_rows(claim)).rows:
                if len(self.ready) or len(self._unrun):
                    return

    def _claim_streams(self, room: int, state: RescueState) -> None:
        """Claim until there is something to deliver, or until only paused streams are left."""
        queues, claims = self._open_queues(), self._claims
        if state is RescueState.SUSPECT:
            any(perform(self._connection, claims.claim_suspect(STREAMS, each)) for each in queues)
            return
        brought, before, more = 0, -1, bool(queues)
        while more and not brought and self._reads.parked > before:
            before, rooms = self._reads.parked, dict.fromkeys(self._open_queues(), room)
            steps = claims.claim_streams(rooms, scan=True)
            brought, left = perform(self._connection, steps)
            more = bool(left)

    # -- deliveries ------------------------------------------------------------------------------

    def _work(self, most: int) -> None:
        """Deliver what was claimed, until there were ``most`` deliveries; release the rest."""
        since, followers = monotonic(), self._followers
        for each in self._unrun.take_all(len(self._unrun)):
            self.settle(each)
        try:
            while True:
                found: Lease | Lane | None = None
                if self._count < most:
                    found = followers.pop() if followers else self._next()
                if found is not None:
                    self._deliver(found, most - self._count)
                    self._deliveries.put_all_but_one(followers)
                elif not self._decided:
                    break
                is_time = monotonic() - since > GATHER_TIME
                if found is None or is_time or len(self._decided) >= GATHER_COUNT:
                    self._settle()
                    since = monotonic()
        finally:
            followers.clear()
            self._settle()
            self._release()

    def _next(self) -> Lease | Lane | None:
        if not len(self.ready) and (runs := self._runs.to_read(monotonic(), GATHER_COUNT)):
            perform(self._connection, self._reads.read(runs, GATHER_COUNT))
        found = self.ready.take_now()
        assert not isinstance(found, Delivery)
        return found

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

    # -- settles ---------------------------------------------------------------------------------

    def settle(self, decided: tuple[Lease, Decision]) -> None:
        """Have a decision settled, with others."""
        self._decided.append(decided)
        lease, decision = decided
        self._progress += 1
        self._count += decision is not PAUSED
        self._settles.leave_delayed(lease, decision)

    def _settle(self) -> None:
        decided, self._decided = self._decided, []
        self._settles.settle(self._connection, decided)
        self._runs.settled(decided)
        perform(self._connection, self._releases.release_ended())

    def _release(self) -> None:
        """Release what was not started; leave leased what the database refuses to settle."""
        connection, held = self._connection, self._held
        perform(connection, self._releases.give_back(held.of(EVENTS)))
        held.drop(each for run in held.of(EVENTS) for each in [*run.out])
        perform(connection, self._releases.release_streams())
