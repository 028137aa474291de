"""Claim: the verb that leases rows and streams, reads the latter, and hands out their events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from math import ceil, inf
from operator import itemgetter
from typing import Any

from .. import doorbell
from ..clocks import monotonic
from ..delivery.lease import Lease, Run, columns_of, lease_from_row, row_run
from ..delivery.route import dead_after_rescues
from ..events import Event, split_stream, stored_instant
from ..listeners.outcomes import Decision, Status
from ..listeners.queues import expected_queue
from ..models.pause_queryset import holding
from ..queue_settings import parked_by, parked_queue
from ..signals import announce, events_claimed
from ..sql.values import (
    EVENTS,
    KEYED,
    STREAMS,
    Branch,
    Claim,
    Claimed,
    RescueState,
    Row,
    StreamQuery,
    StreamRows,
    Table,
    Unclaimed,
)
from .effects import Steps, Wait, ask
from .gate import Gate
from .held import ids_and_leases
from .intake import coalesce_and_complete, complete, is_whole, report_rescues
from .leases import Releases
from .pauses import KnownPauses
from .runs import StreamRead, stream_run

SMALL_CLAIM = 50  # events; a claim of fewer is a small one
# So much later is an event due that was passed on: two releases must not pass it to and fro.
PASSED_ON_DELAY = timedelta(milliseconds=1)
MAX_EVENTS = 32  # events of one stream that are read at a time
ROUTING_WAIT = 0.1  # seconds for which a stream waits until an earlier event of its key is routed
SEQ, STATUS, DELIVER_AT, LISTENER, ROW_QUEUE, FIRST_DUE, CREATED = map(
    KEYED.index, ("seq", "status", "deliver_at", "listener", "queue", "first_due_at", "created_at")
)
ROUTED_UNTIL = len(KEYED)  # the column behind them
# What of a row decides whether it is paused, and whether it was given to all its listeners.
pause_of = itemgetter(*map(KEYED.index, ("event_type", "listener", "key")))
routes_of = itemgetter(*map(KEYED.index, ("aggregate_type", "event_type", "listener", "routes")))


class Claims:
    """Makes the claims of one thread: the claimer's or ``drain()``'s."""

    def __init__(
        self,
        *,
        releases: Releases,
        known_pauses: KnownPauses,
        gates: Mapping[str, Gate],
        at: datetime | None = None,
    ) -> None:
        """``at`` is used instead of the database's now, by ``drain()``, which has no ``gates``."""
        self._pools, self._gates, self._at = releases.runs.pools, gates, at
        self._alias, self._me, self._settings = releases.alias, releases.me, releases.settings
        self._held, self._runs = releases.held, releases.runs
        self.known_pauses = known_pauses
        self.routed = 0  # events of streams so far that were given to listeners they lacked
        self.empty = 0  # streams so far of which nothing was to run
        self._several = len(self._settings.queues) > 1  # otherwise, all events belong to default
        self._events_per_stream = 2  # events that a stream is expected to bring

    def of(self, branches: Sequence[Branch] = (), **which: Any) -> Claim:
        """Return a claim by this worker of what is due."""
        return Claim(me=self._me, lease=self._held.lease, at=self._at, branches=branches, **which)

    def claim_rows(self, claim: Claim, hot: Mapping[str, Event] | None = None) -> Steps[Claimed]:
        """Claim rows; ``hot`` has the events that this process offered, by id, in memory."""
        deadline, by_id = self._held.deadline(monotonic()), hot or {}
        self._held.begin_claim()
        found: Claimed = yield ask("claim", claim)
        now, columns = monotonic(), columns_of(claim.columns, hot=hot is not None)
        leases = [
            lease_from_row(
                row,
                columns,
                run=row_run(row, deadline=deadline, me=self._me),
                me=self._me,
                claimed_at=now,
                hot=by_id.get(row[0]),
            )
            for row in found.rows
        ]
        # What this process offered may be parked meanwhile.
        may_be_paused = hot is not None or bool(self.known_pauses.pauses)
        if self._several or may_be_paused:
            leases = yield from self._placed(leases)
        leases, queues = yield from coalesce_and_complete(leases, self._held)
        if queues:
            yield from self._look_at(dict.fromkeys(queues, 0.0))
            # Some have a listener only now.
            leases = yield from self._placed([each for each in leases if each.stream is None])
        new = self._held.add_rows(leases)
        dead = yield from self._note(new)
        source = "cold" if hot is None else "hot"
        announce(events_claimed, sender=self._alias, count=len(new), source=source)
        for each in dead:
            self._pools.settle(each)
        self._pools.put([each for each in new if not each.decided])
        if len(new) < SMALL_CLAIM and self._gates:
            yield Wait(0)  # let the threads that wait for them run first; ``drain()`` has none
        return found

    def _look_at(self, queues: Mapping[str, float]) -> Steps[None]:
        """Have found what was added to queues, and has been due there for so many seconds."""
        for queue, waited in queues.items():
            if (gate := self._gates.get(queue)) is not None:
                gate.poll_soon(waited)
        if any(not self._pools.accepts(each) for each in queues):
            yield doorbell.ring

    def _placed(self, leases: list[Lease]) -> Steps[list[Lease]]:
        """Set the queue of each; release what is paused or to run elsewhere; return the others.

        What another worker has parked can be among them if this process offered it. What has a key
        is routed first, so that it waits in its order.
        """
        known, kept, given = self.known_pauses, list[Lease](), list[Unclaimed]()
        paused, passed_on = dict[str, int](), dict[str, float]()
        rooms: dict[str, float] = {each.name: each.free for each in self._gates.values()}
        for lease in leases:
            lease.queue = expected_queue(lease.listener, lease.run.queue)
            pause = holding(known.pauses, lease.event_type, lease.listener, None)
            pause = parked_by(lease.run.queue) if pause is None else pause
            if pause is not None and lease.key is None and self._held.get(lease.id) is None:
                paused[lease.id] = pause
                # Not to where it was: its pause may have ended since.
                given.append(Unclaimed(lease.id, lease.locked_at, lease.due_at, lease.queue))
            elif self._may_stay(lease, rooms):
                kept.append(lease)
            else:
                given.append(self._passed_on(lease))
                passed_on[lease.queue] = max(lease.lag, passed_on.get(lease.queue, 0.0))
        if given:
            left = yield ask("unclaim", me=self._me, due=given)
            kept += [each for each in leases if each.id in left and each.id in paused]
        if paused:
            queues = {each.run.queue for each in leases if each.id in paused}
            yield lambda connection: known.park(connection, paused, queues)
        yield from self._look_at(passed_on)
        return kept

    def _may_stay(self, lease: Lease, rooms: dict[str, float]) -> bool:
        """Return whether an event runs here: threads of its queue are free, or it was passed on.

        It is in a wrong queue if a writer did not know the listeners, or if these have another
        queue since. It is released once, before its first try; then it runs where it is.
        """
        room = rooms.get(lease.queue, inf)  # ``drain()`` has room for all
        rooms[lease.queue] = room - 1
        is_open = self._pools.accepts(lease.queue)
        if lease.queue == lease.run.queue or (is_open and room > 0):
            return True
        first = lease.first_due_at
        was_passed_on = first is None or lease.due_at >= first + PASSED_ON_DELAY
        is_closed = lease.queue in self._gates and not is_open
        if is_closed or not was_passed_on or not self._gates:  # a drain passes nothing on twice
            return False
        lease.queue = lease.run.queue
        return True

    def _passed_on(self, lease: Lease) -> Unclaimed:
        """Return how an event is released into another queue.

        Other workers, whose claims begin at a watermark, find it sooner if it is due now.
        """
        due = lease.due_at
        if self._gates:
            due += PASSED_ON_DELAY
            if lease.queue not in self._gates:
                due = max(due, lease.now)
        return Unclaimed(lease.id, lease.locked_at, due, lease.queue)

    def claim_streams(self, rooms: Mapping[str, int], *, scan: bool) -> Steps[tuple[int, set[str]]]:
        """Claim due streams, for as many events of each queue as it has room for.

        With ``scan``, claim those below the watermarks too. Return how many events they brought,
        and of which queues more streams are due.
        """
        excluded, gates, branches = self._runs.excluded(monotonic()), self._gates, list[Branch]()
        for queue, room in rooms.items():
            limit = max(room // self._events_per_stream, min(room, self._settings.WORKERS))
            gate = gates.get(queue)  # ``drain()`` has none
            branch = gate.branch(STREAMS, limit, scan=scan) if gate else Branch(queue, limit)
            branches.append(branch)
        claim = self.of(branches, table=STREAMS, exclude=excluded)
        found, new = yield from self._lease_streams(claim)
        if not excluded:  # else the next claim must find what was
            for queue in rooms.keys() & gates.keys():
                gates[queue].polled(STREAMS, found.found(queue))
        count = yield from self.read(new, max(rooms.values()))
        if new:
            self._events_per_stream = min(2 * ceil(count / len(new)) or 1, MAX_EVENTS)
        return count, {queue for queue, each in found.queues.items() if each.more}

    def claim_suspect(self, table: Table, queue: str) -> Steps[int]:
        """Claim one suspect, a stream's events to run one by one; return how many it brought."""
        excluded = self._runs.excluded(monotonic()) if table is STREAMS else ()
        state = RescueState.SUSPECT
        claim = self.of([Branch(queue, 1)], table=table, exclude=excluded, state=state)
        if table is EVENTS:
            return len((yield from self.claim_rows(claim)).rows)
        _, new = yield from self._lease_streams(claim, alone=MAX_EVENTS)
        return (yield from self.read(new, 1))

    def _lease_streams(self, claim: Claim, *, alone: int = 0) -> Steps[tuple[Claimed, list[Run]]]:
        deadline = self._held.deadline(monotonic())
        found = yield ask("claim", claim)
        runs = [stream_run(row, deadline=deadline, me=self._me, alone=alone) for row in found.rows]
        return found, self._held.add(runs)

    def read(self, runs: Sequence[Run], room: int) -> Steps[int]:
        """Read streams and hand out their events, about as many as there is room for.

        Return how many events they brought. Streams that are not ours any more are given up, and
        those are released of which nothing is to run.
        """
        if not runs:
            return 0
        settings = self._settings
        is_alone = any(each.alone for each in runs)
        limit = 1 if is_alone else max(min(room // len(runs), MAX_EVENTS), 1)
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
        count = yield from self._take(streams, limit, retries)
        yield from self._runs.release_ended()
        announce(events_claimed, sender=self._alias, count=count, source="cold")
        return count

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
        yield from self._look_at(dict.fromkeys(queues, 0.0))
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
        dead = yield from self._note(taken)
        self._runs.add_events(ready)
        for each in dead:
            self._pools.settle(each)
        return len(taken)

    def _note(self, leases: Sequence[Lease]) -> Steps[list[tuple[Lease, Decision]]]:
        """Note what is to run here; decide what is dead: too many workers were lost with it."""
        self._pools.claimed(leases)
        if rescued := [each for each in leases if each.rescued]:
            yield partial(report_rescues, leases=rescued)
        found = [each for each in leases if each.rescues >= self._settings.MAX_RESCUES]
        for lease in found:
            lease.decided = True
        return [(each, dead_after_rescues(each.rescues)) for each in found]

    def _plan(self, run: Run, found: StreamRows, limit: int, retry: datetime | None) -> StreamRead:
        """Return the events to run now, and when the stream is due again."""
        now, started = self._at or stored_instant(found.now), monotonic()
        assert now is not None
        pauses, leases = self.known_pauses.pauses, list[Lease]()
        due, queue = inf if retry is None else started + (retry - now).total_seconds(), None
        for row in found.rows:
            if row[STATUS] == Status.DEAD:
                break  # it blocks the events behind it, not a retry before it
            if row[ROUTED_UNTIL] is not None and row[ROUTED_UNTIL] < row[SEQ]:
                return StreamRead(run, found.seq, leases, started + ROUTING_WAIT)
            if (pause := holding(pauses, *pause_of(row))) is not None:
                due, queue = started, parked_queue(pause)
                break
            next_try = stored_instant(row[DELIVER_AT])
            if next_try is not None and next_try > now:
                due = started + (next_try - now).total_seconds()
                queue = expected_queue(row[LISTENER], row[ROW_QUEUE])
                break
            leases.append(self._lease(row, run, found.now, next_try, is_head=not leases))
        else:
            lane, _ = split_stream(found.name)
            # Only in the key's own stream is the version the number of its newest event.
            if len(found.rows) == limit and (lane or found.rows[-1][SEQ] != found.seq):
                due = 0.0
        self.empty += not leases
        return StreamRead(run, found.seq, leases, due, None if leases else queue)

    def _lease(
        self, row: Row, run: Run, now: Any, next_try: datetime | None, *, is_head: bool
    ) -> Lease:
        """Return the lease of an event; what was lost with a stream counts against its head."""
        due, was = next_try or row[FIRST_DUE] or row[CREATED], None
        if is_head:
            was, run.lost_worker = run.lost_worker, None
        claimed = (*row[:ROUTED_UNTIL], due, was, now)
        lease = lease_from_row(claimed, columns_of(KEYED), run=run, me=self._me)
        lease.rescues = run.rescues if is_head else 0
        lease.queue = expected_queue(row[LISTENER], row[ROW_QUEUE])
        return lease
