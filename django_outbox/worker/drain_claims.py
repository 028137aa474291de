"""What ``drain()`` claims, and which events it delivers together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..conf import Settings, current
from ..delivery.deliver import batch_listener, batch_size
from ..delivery.lease import Lease
from ..listeners.registry import Listener
from ..sql.values import STREAMS, Branch, RescueState
from .batch_delivery import with_followers
from .claims import Claims
from .effects import perform
from .held import Held
from .pauses import KnownPauses, end_pauses
from .queues import BlockingQueue, Decisions
from .releases import Releases
from .runs import Runs
from .stream_reads import StreamReads
from .wakeup import Wakeup
from .worker import new_owner


class DrainClaims:
    """What one ``drain()`` has claimed: events, and the streams whose heads it delivers."""

    def __init__(self, alias: str, *, at: datetime | None, queues: frozenset[str] | None) -> None:
        self.alias, self.at, self.only = alias, at, queues  # None: all
        self.settings: Settings = current()
        self.me = new_owner()
        self.held = Held(self.settings.LEASE)
        self.queues: list[str] = []  # of the claims, in their order
        self.total_delays: dict[str, float] = {}  # seconds, of each event so far
        self.excluded: list[str] = []  # events that this drain does not claim again
        self.away: set[str] = set()  # queues that this drain leaves alone: their broker is away
        self.in_use = [  # with open transactions of the caller, which must not be closed
            each for each in connections.all(initialized_only=True) if each.in_atomic_block
        ]
        self.ready: BlockingQueue[Lease] = BlockingQueue()
        self.unrun = Decisions()
        self.known_pauses = KnownPauses()
        wakeup = Wakeup()
        self.runs = Runs(settings=self.settings, held=self.held, pools=self, wakeup=wakeup)
        self.releases = Releases(
            alias=alias, me=self.me, held=self.held, runs=self.runs, wakeup=wakeup
        )
        parts: dict[str, Any] = {
            "settings": self.settings,
            "releases": self.releases,
            "pools": self,
            "decisions": self.unrun,
            "at": at,
        }
        self.reads = StreamReads(known_pauses=self.known_pauses, **parts)
        self.claims = Claims(reads=self.reads, gates={}, **parts)
        self.decided = 0  # events so far, including paused ones that were claimed
        self.horizon = 0.0  # seconds between the database's now and ``at``

    # -- the heads of streams, which this thread delivers ----------------------------------------

    def put(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.ready.put(lease)

    def accepts(self, queue: str) -> bool:
        """Return whether events of this queue may be started here."""
        served_here = self.only is None or queue in self.only
        return served_here and queue not in self.known_pauses.closed and queue not in self.away

    # -- claims ----------------------------------------------------------------------------------

    def _claim(
        self, connection: BaseDatabaseWrapper, limit: int, state: RescueState
    ) -> list[Lease]:
        """Lease due events of one state from the first queue that has some."""
        self.known_pauses.refresh(connection)
        if monotonic() >= self.known_pauses.ends_at:
            end_pauses(self.alias)
            self.known_pauses.read(connection)
        for queue in self._open_queues():
            if leases := self._claim_from(connection, queue, limit, state):
                return leases
        return []

    def _open_queues(self) -> list[str]:
        return [each for each in self.queues if self.accepts(each)]

    def _claim_from(
        self, connection: BaseDatabaseWrapper, queue: str, room: int, state: RescueState
    ) -> list[Lease]:
        branch = Branch(queue, room, most_bytes=self.settings.PREFETCH_BYTES // 2)
        claim = self.claims.of([branch], exclude=self.excluded, state=state)
        while perform(connection, self.claims.claim_rows(claim)).rows:
            if len(self.ready) or len(self.unrun):  # else all were passed on, parked or coalesced
                break
        return self.ready.take_all(len(self.ready))

    def _claim_streams(
        self, connection: BaseDatabaseWrapper, room: int, state: RescueState
    ) -> None:
        """Claim until there is something to deliver, or until only paused streams are left."""
        if state is RescueState.SUSPECT:
            any(
                perform(connection, self.claims.claim_suspect(STREAMS, queue))
                for queue in self._open_queues()
            )
            return
        brought, before = 0, -1
        more: Collection[str] | bool = True
        while more and not brought and self.reads.parked > before:
            before = self.reads.parked
            rooms = dict.fromkeys(self._open_queues(), room)
            if not rooms:
                break
            brought, more = perform(connection, self.claims.claim_streams(rooms, scan=True))

    def _next_head(self, connection: BaseDatabaseWrapper, room: int) -> Lease | None:
        if runs := self.runs.to_read(monotonic(), room):
            perform(connection, self.reads.read(runs, room))
        return next(iter(self.ready.take_all(1)), None)

    def _same_lane(self, listener: Listener, head: Lease, room: int) -> list[Lease]:
        """Return the events of streams that are delivered in one batch with a stream's head."""
        size = batch_size(listener, head)
        most, most_bytes = min(size, room), self.settings.BATCH_BYTES
        heads: list[Lease] = [head]
        others: list[Lease] = []
        length = head.payload_bytes
        for each in self.ready.take_all(len(self.ready)):
            if (
                len(heads) < most
                and length < most_bytes
                and batch_listener(each) is listener
                and batch_size(listener, each) == size
            ):
                heads.append(each)
                length += each.payload_bytes
            else:
                others.append(each)
        for each in others:
            self.ready.put(each)
        return with_followers(listener, heads, self.runs, most=most, most_bytes=most_bytes)

    def _batches(self, leases: list[Lease]) -> Iterator[tuple[Listener | None, list[Lease]]]:
        """Yield events for ordinary listeners one by one, then the batches of the others."""
        lanes: dict[tuple[str, int], tuple[Listener, list[Lease]]] = {}
        for lease in leases:
            listener = batch_listener(lease)
            if listener is None:
                yield None, [lease]
                continue
            size = batch_size(listener, lease)
            _, lane = lanes.setdefault((listener.title, size), (listener, []))
            lane.append(lease)
            if (
                len(lane) == size
                or sum(each.payload_bytes for each in lane) >= self.settings.BATCH_BYTES
            ):
                yield lanes.pop((listener.title, size))
        yield from lanes.values()
