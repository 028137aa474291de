"""What a claimer leases with: an intake for each queue, and claims of events and of streams."""

from __future__ import annotations

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import Settings
from ..delivery.lease import Lease
from .closed_queues import ClosedQueues
from .event_claims import EventClaims
from .held import Held
from .intake import Intake
from .pauses import KnownPauses
from .pools import Pools
from .queues import Decisions
from .releases import Releases
from .runs import Runs
from .stream_claims import StreamClaims


class ClaimParts:
    """The parts of a claimer. Its thread only."""

    def __init__(
        self,
        *,
        alias: str,
        me: str,
        settings: Settings,
        pools: Pools,
        held: Held,
        decisions: Decisions,
        runs: Runs,
        releases: Releases,
        known_pauses: KnownPauses,
    ) -> None:
        self.alias, self.me, self.settings = alias, me, settings
        self.held, self._runs, self._known_pauses = held, runs, known_pauses
        most_bytes = max(settings.PREFETCH_BYTES // len(pools), 1)
        self._intakes = {
            pool.name: Intake(
                pool, settings=settings, held=held, releases=releases, most_bytes=most_bytes
            )
            for pool in pools
        }
        self._make_claims(pools, decisions, releases)

    def _make_claims(self, pools: Pools, decisions: Decisions, releases: Releases) -> None:
        alias, me, settings, held = self.alias, self.me, self.settings, self.held
        known_pauses = self._known_pauses
        self._events = EventClaims(
            alias=alias,
            me=me,
            settings=settings,
            held=held,
            decisions=decisions,
            pools=pools,
            intakes=self._intakes,
            connect=lambda: self._connection,
        )
        self._streams = StreamClaims(
            alias=alias,
            me=me,
            settings=settings,
            held=held,
            pools=pools,
            decisions=decisions,
            runs=self._runs,
            releases=releases,
            known_pauses=known_pauses,
            connect=lambda: self._connection,
            count=self._count,
        )
        self._closed = ClosedQueues(
            alias=alias,
            me=me,
            lease=held.lease,
            intakes=self._intakes,
            events=self._events,
            streams=self._streams,
            configured={*settings.queues},
            known_pauses=known_pauses,
            connect=lambda: self._connection,
        )

    def _count(self, lease: Lease) -> None:
        """Count an event of a stream that is to be run here."""
        if (intake := self._intakes.get(lease.queue)) is not None:
            intake.count(1)

    def _poll_all(self) -> None:
        for intake in self._intakes.values():
            intake.poll_at = 0.0

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        return connections[self.alias]
