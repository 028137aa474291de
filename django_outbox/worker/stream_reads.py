"""Reads the next events of leased streams, and plans how to run them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from math import inf
from operator import itemgetter
from typing import Any

from .. import doorbell
from ..clocks import monotonic
from ..delivery.lease import Lease, Run, lease_from_row
from ..delivery.route import dead_after_rescues
from ..events import split_stream, stored_instant
from ..listeners.outcomes import Decision, Status
from ..listeners.queues import expected_queue
from ..models.pause_queryset import holding
from ..queue_settings import parked_queue
from ..sql.values import KEYED, Row, StreamQuery, StreamRows
from .effects import Steps, ask
from .held import ids_and_leases
from .intake import complete, is_whole, report_rescues
from .pauses import KnownPauses
from .runs import Runs, StreamRead, Threads

MAX_EVENTS = 32  # events of one stream that are read at a time
ROUTING_WAIT = 0.1  # seconds for which a stream waits until an earlier event of its key is routed
SEQ, STATUS = KEYED.index("seq"), KEYED.index("status")
DELIVER_AT = KEYED.index("deliver_at")
# What of a row decides whether it is paused, and whether it was given to all its listeners.
pause_of = itemgetter(*map(KEYED.index, ("event_type", "listener", "key")))
routes_of = itemgetter(*map(KEYED.index, ("aggregate_type", "event_type", "listener", "routes")))
LISTENER, ROW_QUEUE = KEYED.index("listener"), KEYED.index("queue")
ROUTED_UNTIL = len(KEYED)  # the column behind them
FIRST_DUE, CREATED = KEYED.index("first_due_at"), KEYED.index("created_at")


class StreamReads:
    """Reads leased streams and hands out their events. One thread only, as ``Claims``."""

    def __init__(
        self, runs: Runs, *, pools: Threads, known_pauses: KnownPauses, at: datetime | None
    ) -> None:
        """``at`` is used by ``drain()`` instead of now."""
        self._me, self._held, self._settings, self._runs = runs.me, runs.held, runs.settings, runs
        self._pools, self.known_pauses, self._at = pools, known_pauses, at
        self.routed = 0  # events so far that were given to listeners they lacked
        self.parked = 0  # streams so far whose first events are paused

    def read(self, runs: Sequence[Run], room: int) -> Steps[int]:
        """Read streams and hand out their events, about as many as there is room for.

        Return how many events they brought. Those that are not ours any more are given up.
        """
        settings = self._settings
        limit = max(min(room // len(runs), MAX_EVENTS), 1)
        if any(each.alone for each in runs):
            limit = 1
        read = StreamQuery(
            me=self._me,
            streams=ids_and_leases(runs),
            limit=limit,
            dead_too=settings.ON_DEAD == "block",
            only_due_retries=not settings.STOP_ON_FIRST_FAILURE,
        )
        streams = yield ask("read_streams", read)
        while (yield from self._complete(streams)):
            streams = yield ask("read_streams", read)
        retries: dict[str, datetime] = {}
        if read.only_due_retries and streams:
            retries = yield ask("next_retries", read)
        mine = {each.name for each in streams}
        self._held.lose(each for each in runs if each.id not in mine)
        pauses, heads = self.known_pauses.pauses, [row for each in streams for row in each.rows[:1]]
        if pauses and any(holding(pauses, *pause_of(row)) is not None for row in heads):
            yield self.known_pauses.read
        return (yield from self._take(streams, limit, retries))

    def _complete(self, streams: Sequence[StreamRows]) -> Steps[bool]:
        """Give the events that were read to the listeners that they lack; return if any did."""
        lacking = [
            self._lease(row, run, found.now, None, is_head=False)
            for found in streams
            if (run := self._held.get(found.name)) is not None
            for row in found.rows
            if row[STATUS] != Status.DEAD and not is_whole(*routes_of(row))
        ]
        queues = yield from complete(lacking)
        self.routed += len(lacking) if queues else 0
        if any(not self._pools.accepts(each) for each in queues):
            yield doorbell.ring
        return bool(queues)

    def _take(
        self, streams: Sequence[StreamRows], limit: int, retries: Mapping[str, datetime]
    ) -> Steps[int]:
        """Hand out what was read, or release it to the workers of its queue; return the events."""
        taken, ready = list[Lease](), list[StreamRead]()
        for found in streams:
            if (run := self._held.get(found.name)) is None:
                continue
            read = self._plan(run, found, limit, retries.get(found.name))
            if read.leases and not self._pools.accepts(read.leases[0].queue):
                self._runs.leave(run, read.leases[0].queue)
                continue
            taken += read.leases
            ready.append(read)
        if rescued := [each for each in taken if each.rescued]:
            yield partial(report_rescues, leases=rescued)
        dead = self.dead(taken)
        self._runs.add_events(ready)
        for each in dead:
            self._pools.settle(each)
        self._pools.claimed(taken)
        return len(taken)

    def dead(self, leases: Iterable[Lease]) -> list[tuple[Lease, Decision]]:
        """Decide that events are dead with which too many workers were lost."""
        found = [each for each in leases if each.rescues >= self._settings.MAX_RESCUES]
        for lease in found:
            lease.decided = True
        return [(each, dead_after_rescues(each.rescues)) for each in found]

    def _plan(self, run: Run, found: StreamRows, limit: int, retry: datetime | None) -> StreamRead:
        """Return the events to run now, and when the stream is due again."""
        now, started = self._at or stored_instant(found.now), monotonic()
        assert now is not None
        pauses, leases = self.known_pauses.pauses, list[Lease]()
        plan = partial(StreamRead, run, found.seq, leases)
        due = inf if retry is None else started + (retry - now).total_seconds()
        for row in found.rows:
            if row[STATUS] == Status.DEAD:
                return plan(due)  # it blocks the events behind it, not a retry before it
            if row[ROUTED_UNTIL] is not None and row[ROUTED_UNTIL] < row[SEQ]:
                return plan(started + ROUTING_WAIT)
            if (pause := holding(pauses, *pause_of(row))) is not None:
                self.parked += not leases
                return plan(started, None if leases else parked_queue(pause))
            next_try = stored_instant(row[DELIVER_AT])
            if next_try is not None and next_try > now:
                queue = None if leases else expected_queue(row[LISTENER], row[ROW_QUEUE])
                return plan(started + (next_try - now).total_seconds(), queue)
            leases.append(self._lease(row, run, found.now, next_try, is_head=not leases))
        if len(found.rows) == limit:
            lane, _ = split_stream(found.name)
            # Only in the key's own stream is the version the number of its newest event.
            if lane or found.rows[-1][SEQ] != found.seq:
                due = 0.0
        return plan(due)

    def _lease(
        self, row: Row, run: Run, now: Any, next_try: datetime | None, *, is_head: bool
    ) -> Lease:
        """Return the lease of an event; what was lost with a stream counts against its head."""
        due, was = next_try or row[FIRST_DUE] or row[CREATED], None
        if is_head:
            was, run.lost_worker = run.lost_worker, None
        lease = lease_from_row((*row[:ROUTED_UNTIL], due, was, now), KEYED, run=run, me=self._me)
        lease.rescues = run.rescues if is_head else 0
        lease.queue = expected_queue(row[LISTENER], row[ROW_QUEUE])
        return lease
