"""Claims the streams that are due, reads their events and plans how to run them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from math import ceil, inf
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..conf import Settings
from ..delivery.deliver import dead_after_rescues
from ..delivery.lease import Lease, Run, lease_from_row
from ..delivery.paused import is_paused
from ..events import split_stream, stored_instant
from ..listeners.outcomes import Status
from ..listeners.queues import expected_queue
from ..signals import announce, events_claimed
from ..sql import dialect_of
from ..sql.values import (
    KEYED,
    POSTPONED_FOR,
    STREAMS,
    Branch,
    Claim,
    RescueState,
    Row,
    StreamQuery,
    StreamRows,
)
from .effects import perform
from .held import Held, ids_and_leases
from .pauses import KnownPauses
from .queues import Decisions
from .releases import Releases
from .rescues import report_rescues
from .routing import complete, is_whole
from .runs import Runs, StreamHeads
from .watermark import Watermark

logger = logging.getLogger("django_outbox")

MAX_EVENTS = 32  # events of one stream that are read at a time
ROUTING_WAIT = 0.1  # seconds for which a stream waits until an earlier event of its key is routed
SEQ, STATUS = KEYED.index("seq"), KEYED.index("status")
DELIVER_AT = KEYED.index("deliver_at")
PAUSE_COLUMNS = [KEYED.index(name) for name in ("event_type", "listener", "key")]
LISTENER, ROW_QUEUE = KEYED.index("listener"), KEYED.index("queue")
ROUTED_UNTIL = len(KEYED)  # the column behind them
FIRST_DUE, CREATED = KEYED.index("first_due_at"), KEYED.index("created_at")


class StreamClaims:
    """Leases streams and reads their events. One thread only: the claimer's or ``drain()``'s."""

    def __init__(
        self,
        *,
        alias: str,
        me: str,
        settings: Settings,
        held: Held,
        pools: StreamHeads,
        decisions: Decisions,
        runs: Runs,
        releases: Releases,
        known_pauses: KnownPauses,
        connect: Callable[[], BaseDatabaseWrapper],
        at: datetime | None = None,
        count: Callable[[Lease], None] = lambda lease: None,
    ) -> None:
        self._alias, self._me, self._settings, self._connect = alias, me, settings, connect
        self._held, self._pools, self._decisions = held, pools, decisions
        self._runs, self._releases, self._known_pauses = runs, releases, known_pauses
        self._watermarks: dict[str, Watermark] = {}  # by queue
        self._count = count  # called for each event
        self._at = at  # instead of the database's now, for drain()
        self.exclude: list[str] = []  # keys that are not claimed again
        self.routed = 0  # events so far that were given to listeners they lacked
        self.postponed = 0  # streams so far whose first events are paused
        self._events_per_stream = 2  # events that a stream is expected to bring

    def claim(self, rooms: Mapping[str, int], *, scan: bool) -> tuple[int, set[str]]:
        """Claim due streams, for as many events of each queue as it has room for.

        With ``scan``, claim those below the watermarks too. Return how many events they brought,
        and of which queues more streams are due.
        """
        now, threads = monotonic(), self._settings.WORKERS
        deadline = self._held.deadline(now)
        excluded = [*self.exclude, *self._runs.excluded(now)]
        marks = {queue: self._watermark(queue) for queue, room in rooms.items() if room > 0}
        branches = [
            Branch(
                queue,
                max(rooms[queue] // self._events_per_stream, min(rooms[queue], threads)),
                since=watermark.begin_claim(scan=scan),
            )
            for queue, watermark in marks.items()
        ]
        found = self._dialect.claim(self._claim_of(branches, exclude=excluded))
        for queue, watermark in marks.items():  # what was skipped, the next claim must find
            watermark.end_claim(found.found(queue), skipped=bool(excluded))
        new = self._held.add(self._run(row, deadline) for row in found.rows)
        room = max((rooms[each.queue] for each in branches), default=0)
        count = self._read(new, room)
        if new:
            self._events_per_stream = min(2 * ceil(count / len(new)) or 1, MAX_EVENTS)
        return count, {queue for queue, each in found.queues.items() if each.more}

    def claim_suspect(self, queue: str) -> int:
        """Claim one suspect of a queue, whose events run one by one; return how many it brought."""
        deadline = self._held.deadline(monotonic())
        excluded = [*self.exclude, *self._runs.excluded(monotonic())]
        claim = self._claim_of([Branch(queue, 1)], exclude=excluded, state=RescueState.SUSPECT)
        found = self._dialect.claim(claim).rows
        new = self._held.add(self._run(row, deadline, alone=MAX_EVENTS) for row in found)
        return self._read(new, 1)

    def _claim_of(self, branches: Sequence[Branch], **more: Any) -> Claim:
        return Claim(
            me=self._me,
            lease=self._held.lease,
            table=STREAMS,
            branches=branches,
            at=self._at,
            **more,
        )

    def _run(self, row: Row, deadline: float, *, alone: int = 0) -> Run:
        name, queue, rescues, _due, was, locked_at = row
        return Run(
            table=STREAMS,
            id=name,
            queue=queue,
            locked_at=locked_at,
            deadline=deadline,
            rescues=rescues,
            lost_worker=was if was != self._me else None,
            alone=alone,
            read_at=0.0,  # also if the read fails that follows
        )

    def _watermark(self, queue: str) -> Watermark:
        return self._watermarks.setdefault(queue, Watermark())

    def read_again(self, now: float, room: int) -> None:
        """Read streams again that could not be released, or that run event by event."""
        self._read(self._runs.to_read(now, room), room)

    def read_suspect(self, suspect: Run) -> None:
        """Read the next event of a suspect, whose last one is settled."""
        self._read([suspect], 1)

    def _read(self, runs: Sequence[Run], room: int) -> int:
        if not runs:
            return 0
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
        streams = self._dialect.read_streams(read)
        while self._complete(streams):
            streams = self._dialect.read_streams(read)
        retries: dict[str, datetime] = {}
        if read.only_due_retries and streams:
            retries = self._dialect.next_retries(read)
        mine = {each.name for each in streams}
        self._held.lose(each for each in runs if each.id not in mine)
        if any(self._is_paused(row) for each in streams for row in each.rows[:1]):
            # A resume after our read makes a new version of the stream, so its release is refused.
            self._known_pauses.read(self._connection)
        count = self._take(streams, limit, retries)
        perform(self._connection, self._releases.release_ended())
        announce(events_claimed, sender=self._alias, count=count, source="cold")
        return count

    def _complete(self, streams: Sequence[StreamRows]) -> bool:
        """Give the events that were read to the listeners that they lack; return if any did."""
        leases = [
            self._lease(row, run, found.now, None, is_head=False)
            for found in streams
            if (run := self._held.get(found.name)) is not None
            for row in found.rows
            if row[STATUS] != Status.DEAD
        ]
        lacking = [each for each in leases if not is_whole(each)]
        queues = complete(self._connection, lacking)
        self.routed += len(lacking) if queues else 0
        if any(not self._pools.accepts(each) for each in queues):
            doorbell.ring(self._connection)
        return bool(queues)

    def _take(
        self, streams: Sequence[StreamRows], limit: int, retries: Mapping[str, datetime]
    ) -> int:
        """Hand out what was read, or release it to the workers of its queue; return the events."""
        taken: list[Lease] = []
        rescued: list[Lease] = []
        ready: list[tuple[Run, int, list[Lease], float]] = []
        deadly: list[tuple[Run, int, Lease, float]] = []
        for found in streams:
            run = self._held.get(found.name)
            if run is None:
                continue
            leases, due = self._plan(run, found, limit, retries.get(found.name))
            if leases and not self._pools.accepts(leases[0].queue):
                self._runs.leave(run, leases[0].queue)
                continue
            taken += leases
            rescued += [each for each in leases if each.rescued]
            if leases and run.rescues >= self._settings.MAX_RESCUES:
                deadly.append((run, found.seq, leases[0], due))
            else:
                ready.append((run, found.seq, leases, due))
        report_rescues(self._connection, rescued)
        for run, seq, leases, due in ready:
            self._runs.add_events(run, seq, leases, due)
        for run, seq, lease, due in deadly:
            self._runs.add_decided(run, seq, lease, due)
            self._decisions.put((lease, dead_after_rescues(lease.rescues)))
        for lease in taken:
            self._count(lease)
        return len(taken)

    def _plan(
        self, run: Run, found: StreamRows, limit: int, retry: datetime | None
    ) -> tuple[list[Lease], float]:
        """Return the events to run now, and when (monotonic) the stream is due again."""
        now, started = self._at or stored_instant(found.now), monotonic()
        assert now is not None
        leases: list[Lease] = []
        due = inf if retry is None else started + (retry - now).total_seconds()
        for row in found.rows:
            if row[STATUS] == Status.DEAD:
                return leases, due  # it blocks the events behind it, not a retry before it
            if row[ROUTED_UNTIL] is not None and row[ROUTED_UNTIL] < row[SEQ]:
                return leases, started + ROUTING_WAIT
            if self._is_paused(row):
                return leases, started + (0.0 if leases else self._postpone(run))
            next_try = stored_instant(row[DELIVER_AT])
            if next_try is not None and next_try > now:
                if not leases:
                    run.next_queue = _queue_of(row)
                return leases, started + (next_try - now).total_seconds()
            leases.append(self._lease(row, run, found.now, next_try, is_head=not leases))
        if len(found.rows) == limit and not _is_newest(found.rows[-1], found):
            due = 0.0
        return leases, due

    def _is_paused(self, row: Sequence[Any]) -> bool:
        pauses = self._known_pauses.pauses
        return bool(pauses) and is_paused(pauses, *(row[place] for place in PAUSE_COLUMNS))

    def _postpone(self, run: Run) -> float:
        """Return for how many seconds to leave a stream alone whose first event is paused."""
        self.postponed += 1
        if self._at is not None:  # it may be due again by then
            self.exclude.append(run.id)
        return POSTPONED_FOR

    def _lease(
        self, row: Row, run: Run, now: Any, next_try: datetime | None, *, is_head: bool
    ) -> Lease:
        """Return the lease of an event; what was lost with a stream counts against its head."""
        due, was = next_try or row[FIRST_DUE] or row[CREATED], None
        if is_head:
            was, run.lost_worker = run.lost_worker, None
        lease = lease_from_row((*row[:ROUTED_UNTIL], due, was, now), KEYED, run=run, me=self._me)
        lease.rescues = run.rescues if is_head else 0
        lease.queue = _queue_of(row)
        return lease

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        return self._connect()

    @property
    def _dialect(self) -> Any:
        return dialect_of(self._connection)


def _is_newest(row: Sequence[Any], stream: StreamRows) -> bool:
    """Return whether a row is known to be its stream's last.

    Only in the key's own stream is the version the number of its newest event.
    """
    lane, _ = split_stream(stream.name)
    return not lane and bool(row[SEQ] == stream.seq)


def _queue_of(row: Sequence[Any]) -> str:
    """Return the queue that a row belongs to: that of its listener, if it is known here."""
    return expected_queue(row[LISTENER], row[ROW_QUEUE])
