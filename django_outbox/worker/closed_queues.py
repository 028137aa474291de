"""Queues that are paused: what a worker releases and probes while they are."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from django.db.backends.base.base import BaseDatabaseWrapper

from ..sql import dialect_of
from ..sql.values import Branch
from .breaker import close_breaker
from .claims import Claims
from .effects import perform
from .intake import Intake
from .pauses import READ_INTERVAL, KnownPauses

RETRY_PROBE = 1.0  # seconds until a queue that had nothing to probe with is probed again


class ClosedQueues:
    """Follows pauses and circuit breakers of queues. The claimer's thread only."""

    def __init__(
        self, *, intakes: Mapping[str, Intake], claims: Claims, known_pauses: KnownPauses
    ) -> None:
        self._intakes, self._claims, self._known_pauses = intakes, claims, known_pauses
        self._probe_at: dict[str, float] = {}  # monotonic; not to be probed before

    def follow(self, connection: BaseDatabaseWrapper, now: float) -> None:
        """Write what breakers have counted, probe one that is due, release what is paused."""
        for intake in self._intakes.values():
            breaker = intake.pool.breaker
            if breaker is not None and breaker.write(connection):
                self._known_pauses.read(connection)
                breaker.settle_trip()
        for queue, (at, pause) in self._known_pauses.breakers.items():
            if max(at, self._probe_at.get(queue, at)) <= now and queue in self._intakes:
                self._probe(connection, self._intakes[queue], now, pause)
        for intake in self._intakes.values():
            intake.follow_pauses(connection, now)

    def next_step(self, now: float) -> float:
        """Return when (monotonic) there is something to do; inf: as far as is known, never."""
        times = []
        for queue, (at, _) in self._known_pauses.breakers.items():
            if queue in self._intakes:
                times.append(max(at, self._probe_at.get(queue, at)))
        if self._known_pauses.closed:  # a pause may end
            times.append(now + READ_INTERVAL)
        return min(times, default=inf)

    def _probe(
        self, connection: BaseDatabaseWrapper, intake: Intake, now: float, pause: float
    ) -> None:
        """Deliver one event of a queue whose breaker is open, if no other worker does.

        If the queue has no ``BREAKER`` any more, close it without a probe.
        """
        self._probe_at[intake.name] = now + RETRY_PROBE
        breaker, name = intake.pool.breaker, intake.name
        if breaker is None:  # the queue has lost its BREAKER since this one opened
            close_breaker(connection, name)
            self._known_pauses.read(connection)
            return
        if ("queue", name) in self._known_pauses.pauses:
            return
        if breaker.begin_check(connection, pause):
            self._known_pauses.read(connection)
            return
        if breaker.is_probing or not intake.pool.ready.idle:
            return
        dialect = dialect_of(connection)
        if not dialect.has_due(queue=name):
            return
        if breaker.begin_probe(connection, pause):
            rows = self._claims.claim_rows(self._claims.of([Branch(name, 1)]))
            streams = self._claims.claim_streams({name: 1}, scan=True)
            if not (perform(connection, rows).rows or perform(connection, streams)[0]):
                breaker.cancel_probe()
        self._known_pauses.read(connection)
