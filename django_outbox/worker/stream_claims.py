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
from ..delivery.lease import Lease, lease_from_row
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
from .pauses import KnownPauses
from .queues import Decisions, Held
from .rescues import report_rescues
from .routing import complete, is_whole
from .stream import Stream, StreamHeads, of_streams
from .streams import Streams
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
        streams: Streams,
        known_pauses: KnownPauses,
        connect: Callable[[], BaseDatabaseWrapper],
        at: datetime | None = None,
        count: Callable[[Lease], None] = lambda lease: None,
    ) -> None:
        self._alias, self._me, self._settings, self._connect = alias, me, settings, connect
        self._held, self._pools, self._decisions = held, pools, decisions
        self.streams, self._known_pauses = streams, known_pauses
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
        excluded = [*self.exclude, *self.streams.excluded_names(now)]
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
        new = self.streams.claimed(self._stream(row, deadline) for row in found.rows)
        room = max((rooms[each.queue] for each in branches), default=0)
        count = self._read([each for key in new if (each := self.streams.get(key))], room)
        if new:
            self._events_per_stream = min(2 * ceil(count / len(new)) or 1, MAX_EVENTS)
        return count, {queue for queue, each in found.queues.items() if each.more}

    def claim_suspect(self, queue: str) -> int:
        """Claim one suspect of a queue, whose events run one by one; return how many it brought."""
        deadline = self._held.deadline(monotonic())
        excluded = [*self.exclude, *self.streams.excluded_names(monotonic())]
        claim = self._claim_of([Branch(queue, 1)], exclude=excluded, state=RescueState.SUSPECT)
        found = self._dialect.claim(claim).rows
        new = self.streams.claimed(self._stream(row, deadline, alone=MAX_EVENTS) for row in found)
        return self._read([each for key in new if (each := self.streams.get(key))], 1)

    def _claim_of(self, branches: Sequence[Branch], **more: Any) -> Claim:
        return Claim(
            me=self._me,
            lease=self._held.lease,
            table=STREAMS,
            branches=branches,
            at=self._at,
            **more,
        )

    def _stream(self, row: Row, deadline: float, *, alone: int = 0) -> Stream:
        name, queue, rescues, _due, was, locked_at = row
        lost = was if was != self._me else None
        return Stream(name, deadline, locked_at, rescues, lost, alone, queue=queue)

    def _watermark(self, queue: str) -> Watermark:
        return self._watermarks.setdefault(queue, Watermark())

    def read_again(self, now: float, room: int) -> None:
        """Read streams again that could not be released, or that run event by event."""
        self._read(self.streams.to_read(now, room), room)

    def read_suspect(self, suspect: Stream) -> None:
        """Read the next event of a suspect, whose last one is settled."""
        self._read([suspect], 1)

    def _read(self, streams_to_read: Sequence[Stream], room: int) -> int:
        if not streams_to_read:
            return 0
        settings = self._settings
        limit = max(min(room // len(streams_to_read), MAX_EVENTS), 1)
        if any(each.alone for each in streams_to_read):
            limit = 1
        read = StreamQuery(
            me=self._me,
            streams=of_streams(streams_to_read),
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
        self.streams.drop_lost(each for each in streams_to_read if each.name not in mine)
        if any(self._is_paused(row) for each in streams for row in each.rows[:1]):
            # A resume after our read makes a new version of the stream, so its release is refused.
            self._known_pauses.read(self._connection)
        count = self._take(streams, limit, retries)
        self.streams.release(self._connection)
        announce(events_claimed, sender=self._alias, count=count, source="cold")
        return count

    def _complete(self, streams: Sequence[StreamRows]) -> bool:
        """Give the events that were read to the listeners that they lack; return if any did."""
        leases = [
            self._lease(row, stream, found.now, None, is_head=False)
            for found in streams
            if (stream := self.streams.get(found.name)) is not None
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
        ready: list[tuple[Stream, int, list[Lease], float]] = []
        deadly: list[tuple[Stream, int, Lease, float]] = []
        for found in streams:
            stream = self.streams.get(found.name)
            if stream is None:
                continue
            leases, due = self._plan(stream, found, limit, retries.get(found.name))
            if leases and not self._pools.accepts(leases[0].queue):
                stream.seq = found.seq
                self.streams.leave_to(stream, leases[0].queue)
                continue
            taken += leases
            rescued += [each for each in leases if each.rescued]
            if leases and stream.rescues >= self._settings.MAX_RESCUES:
                deadly.append((stream, found.seq, leases[0], due))
            else:
                ready.append((stream, found.seq, leases, due))
        report_rescues(self._connection, rescued)
        for stream, seq, leases, due in ready:
            self.streams.add_events(stream, seq, leases, due)
        for stream, seq, lease, due in deadly:
            self.streams.add_decided(stream, seq, lease, due)
            self._decisions.put((lease, dead_after_rescues(lease.rescues)))
        for lease in taken:
            self._count(lease)
        return len(taken)

    def _plan(
        self, stream: Stream, found: StreamRows, limit: int, retry: datetime | None
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
                return leases, started + (0.0 if leases else self._postpone(stream))
            next_try = stored_instant(row[DELIVER_AT])
            if next_try is not None and next_try > now:
                if not leases:
                    stream.next_queue = _queue_of(row)
                return leases, started + (next_try - now).total_seconds()
            leases.append(self._lease(row, stream, found.now, next_try, is_head=not leases))
        if len(found.rows) == limit and not _is_newest(found.rows[-1], found):
            due = 0.0
        return leases, due

    def _is_paused(self, row: Sequence[Any]) -> bool:
        pauses = self._known_pauses.pauses
        return bool(pauses) and is_paused(pauses, *(row[place] for place in PAUSE_COLUMNS))

    def _postpone(self, stream: Stream) -> float:
        """Return for how many seconds to leave a stream alone whose first event is paused."""
        self.postponed += 1
        if self._at is not None:  # it may be due again by then
            self.exclude.append(stream.name)
        return POSTPONED_FOR

    def _lease(
        self, row: Row, stream: Stream, now: Any, next_try: datetime | None, *, is_head: bool
    ) -> Lease:
        """Return the lease of an event; what was lost with a stream counts against its head."""
        due, was = next_try or row[FIRST_DUE] or row[CREATED], None
        if is_head:
            was, stream.lost_worker = stream.lost_worker, None
        lease = lease_from_row(
            (*row[:ROUTED_UNTIL], due, was, now),
            KEYED,
            deadline=stream.deadline,
            me=self._me,
            locked_at=stream.locked_at,
        )
        lease.rescues = stream.rescues if is_head else 0
        lease.queue, lease.queue_in_row = _queue_of(row), stream.queue
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
