"""Leases of streams (the events of one key), and what is parked in the queue of its pause.

A worker touches a stream's row only to claim, renew or release it. Business transactions lock the
row from their write to their commit, so locked rows are skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from ..events import stored_instant, unrouted
from ..listeners.outcomes import UNSETTLED
from ..listeners.queues import expected_queue
from ..queue_settings import DEFAULT_QUEUE, PARKED, PARKED_END, parked_by, parked_queue
from .claim import EventLeases
from .statements import single_transaction
from .values import (
    EVENTS,
    KEYED,
    SQL,
    Column,
    EachUpdate,
    Leases,
    Release,
    Row,
    StreamQuery,
    StreamRows,
    Table,
    in_parts,
    instants,
)

SEQ, STREAM = KEYED.index("seq"), KEYED.index("stream")


# SQLite uses a partial index only if a query repeats its condition word for word.
INDEXED = "status IN (0, 2, 3)"


class Streams(EventLeases):
    shared_lock = ""  # SQL that locks selected rows against changes, but not against each other

    def read_streams(self, read: StreamQuery) -> list[StreamRows]:
        """Read those of ``read.streams`` that ``read.me`` holds, and their next events in order.

        A stream's version is never newer than its events. So an event written meanwhile makes the
        release fail, and the stream is read again.
        """
        mine, params = self._leased("outbox_stream", read.me, read.streams)
        sql = f"SELECT stream, seq, {self.now} FROM {self._stream} WHERE {mine}"
        found = {row[0]: StreamRows(*row) for row in self._rows(sql, params)}
        for row in sorted(self._next_events([*found], read), key=lambda row: row[SEQ]):
            if len(rows := found[row[STREAM]].rows) < read.limit:
                rows.append(row)
        return [*found.values()]

    def _next_events(self, streams: Sequence[str], read: StreamQuery) -> list[Row]:
        """Return the next events of streams, each status by itself, as is the index."""
        due = f" AND deliver_at <= {self.now}" if read.only_due_retries else ""
        columns = f"{self._columns(KEYED)}, {self._routed_until('%s')}"
        selects = [
            f"SELECT {columns} FROM {self._events_in_order} "
            f"WHERE stream = %s AND status = {each} ORDER BY seq LIMIT %s"
            for each in ["0", f"2{due}", *["3"] * read.dead_too]
        ]
        given = [(sql, [unrouted(each), each, read.limit]) for each in streams for sql in selects]
        return self._rows_of_each(given, kept=len(selects))  # each stream in one snapshot

    def _routed_until(self, stream: str) -> str:
        """Return the SQL of the first place of a key whose event is about to be routed, or NULL.

        Events behind it have to wait: it may belong before them. One that no worker could route is
        not about to be. ``stream`` is the SQL of the name under which the key's events wait.
        """
        # The index is partial: a query has to repeat its condition.
        return f"""(SELECT MIN(u.seq) FROM {self._event} u WHERE u.stream = {stream}
            AND u.status IN (0, 2) AND u.status IN (0, 2, 3)
            AND (u.available_at <= {self.now} OR u.locked_by IS NOT NULL))"""

    def next_retries(self, read: StreamQuery) -> dict[str, datetime]:
        """Return when the next failed event of each stream is due, for those that have one.

        If dead events block a stream, failed events behind the first dead one do not count.
        """
        event, (one_of, streams) = self._event, self._one_of(read.streams, "stream")
        # The index is partial: a query has to repeat its condition.
        reachable = (
            f"""AND NOT EXISTS (SELECT 1 FROM {event} dead WHERE dead.stream = {event}.stream
                AND dead.seq < {event}.seq AND dead.status = 3 AND dead.status IN (0, 2, 3))"""
        ) * read.dead_too
        rows = self._rows(
            f"""SELECT stream, {self.in_utc.format("MIN(deliver_at)")}
            FROM {self._events_in_order} WHERE {one_of}
            AND status = 2 AND status IN (0, 2, 3) {reachable} GROUP BY stream""",
            streams,
        )
        return {row[0]: due for row in rows if (due := stored_instant(row[1])) is not None}

    def keep_suspected(self, *, me: str, leases: Leases, rescues: int) -> int:
        """Lower the counts of suspects to ``rescues``, before what was tried of them is settled.

        What killed a worker must not count against the event behind it. This waits for a business
        transaction that has locked the stream; nothing else runs in this process meanwhile.
        Return how many ``me`` still held.
        """
        mine, params = self._leased("outbox_stream", me, leases)
        sql = f"UPDATE {self.by_id.format(self._stream)} SET rescues = %s WHERE {mine}"
        return self._run(sql, [rescues, *params])

    def release_streams(self, *, me: str, streams: Sequence[Release]) -> set[str]:
        """Release streams whose version and lease are those that were read; return their names.

        Those to be parked stay in their queues if their pauses have ended. It queries no events:
        the statement's snapshot of them may be older than the row's lock.
        """
        pauses = {pause for each in streams if (pause := parked_by(each.queue)) is not None}
        if not pauses:
            return self._release_streams(me, streams)
        with single_transaction(self.connection):
            over = {parked_queue(each) for each in pauses - self.keep_pauses(pauses)}
            given = [each._replace(queue=None) if each.queue in over else each for each in streams]
            return self._release_streams(me, given)

    def _release_streams(self, me: str, streams: Sequence[Release]) -> set[str]:
        released, same = set[str](), "e.seq = COALESCE(NULLIF(v.seq, -1), e.seq)"
        for some in in_parts(streams, self.rows_at_once):
            # No NULL among the values: with array_nulls off, it would be the text "NULL".
            given = [
                Column("stream", "text", [each.name for each in some]),
                Column("seq", "bigint", [-1 if each.seq is None else each.seq for each in some]),
                instants("locked_at", [each.locked_at for each in some], self.connection),
                Column("delay", "float8", [-1.0 if e.delay is None else e.delay for e in some]),
                Column("queue", "text", [each.queue or "" for each in some]),
                Column("kept", "int", [int(not each.is_innocent) for each in some]),
            ]
            update = EachUpdate(
                "outbox_stream",
                given=given,
                changes=f"""due_at = {self._after("NULLIF(v.delay, -1)")},
                    queue = COALESCE(NULLIF(v.queue, ''), e.queue),
                    rescues = e.rescues * v.kept, locked_by = NULL, locked_at = {self.now}""",
                where=(f"{same} AND e.locked_by = %s AND e.locked_at = v.locked_at", [me]),
            )
            statement = self._update_each_unlocked(update)
            released |= self._released(statement, me, [each.name for each in some])
        return released

    def _released(self, statement: SQL, me: str, streams: Sequence[str]) -> set[str]:
        """Execute the release of streams; return which were released."""
        if (taken := self._run(*statement)) in (0, len(streams)):
            return {*streams[:taken]}
        one_of, params = self._one_of(streams, "stream")
        sql = f"SELECT stream, locked_by FROM {self._stream} WHERE {one_of}"
        others = {key: owner for key, owner in self._rows(sql, params) if owner != me}
        all_are = taken == len(others)  # though some may have a new owner already
        return {key for key, owner in others.items() if all_are or owner is None}

    @property
    def _events_in_order(self) -> str:
        """Return the event table for a SELECT by stream, with an index hint if it needs one."""
        return self._event

    # -- pauses ------------------------------------------------------------------------------------

    def keep_pauses(self, ids: Collection[Any]) -> set[int]:
        """Return those of these pauses that there are; none can end before the transaction does."""
        one_of, given = self._one_of(ids)
        sql = f"SELECT id FROM {self._table('outbox_pause')} WHERE {one_of}{self.shared_lock}"
        return {row[0] for row in self._rows(sql, given)}

    def due_first(self, *, queues: Collection[str], limit: int) -> list[Row]:
        """Return id, event type, listener and key of the ``limit`` rows due first of each queue."""
        selects = []
        for queue in queues:
            sql, given = self._now_due(EVENTS, queue, f"id, event_type, listener, {self.key}")
            selects.append((f"{sql} LIMIT %s", [*given, limit]))
        return self._rows_of_each(selects)

    def park(self, rows: Mapping[str, int]) -> set[int]:
        """Move rows to the queues of their pauses, given by id; return the pauses that have ended.

        Leased and locked rows stay where they are.
        """
        with single_transaction(self.connection):
            there = self.keep_pauses({*rows.values()})
            for pause in there:
                one_of, given = self._one_of([each for each in rows if rows[each] == pause])
                where = f"{one_of} AND locked_by IS NULL AND available_at IS NOT NULL", given
                changes = "queue = %s", [parked_queue(pause)]
                self._update_unlocked("outbox_event", changes=changes, where=where)
        return {*rows.values()} - there

    def unpark(self, table: Table, *, pause: int, limit: int) -> int:
        """Move what is parked for a pause that has ended to the queues of its listeners; count it.

        Due times are kept; a row that was due is so for the first time. Locked rows stay.
        """
        parked = parked_queue(pause)
        waits = f" AND {table.due} IS NOT NULL"
        sql, given = self._due_first(table, parked, table.key, more=waits)
        homes: defaultdict[str, list[str]] = defaultdict(list)
        for key, home in self._homes(
            table, [row[0] for row in self._rows(f"{sql} LIMIT %s", [*given, limit])]
        ):
            homes[home].append(key)
        due = f"CASE WHEN e.available_at > {self.now} THEN e.first_due_at ELSE {self.now} END"
        changes = f"queue = %s, first_due_at = {due}" if table is EVENTS else "queue = %s"
        count = 0
        for home, keys in homes.items():
            one_of, given = self._one_of(keys, table.key)
            where = f"{one_of} AND queue = %s", [*given, parked]
            count += self._update_unlocked(table.name, changes=(changes, [home]), where=where)
        return count

    def _homes(self, table: Table, keys: Sequence[str]) -> list[tuple[str, str]]:
        """Return these rows or streams, each with the queue of its listener or first event."""
        heads = dict(zip(keys, keys, strict=True))
        if table is not EVENTS:
            heads = self.heads(streams=keys, statuses=UNSETTLED)
        one_of, given = self._one_of([*heads.values()])
        sql = f"SELECT id, listener, queue FROM {self._event_by_id} WHERE {one_of}"
        rows = self._rows(sql, given) if heads else []
        found = {row[0]: expected_queue(*row[1:]) for row in rows}
        return [(each, found.get(heads.get(each, ""), DEFAULT_QUEUE)) for each in keys]

    def stranded(self) -> list[int]:
        """Return pauses that have ended, and for which something is parked nevertheless."""
        pauses = self._rows(f"SELECT id FROM {self._table('outbox_pause')}")
        found = self.queues_besides(
            [parked_queue(row[0]) for row in pauses], [(PARKED, PARKED_END)]
        )
        return [pause for each in found if (pause := parked_by(each)) is not None]

    # -- heads -------------------------------------------------------------------------------------

    def heads(self, *, streams: Sequence[str], statuses: Sequence[int]) -> dict[str, str]:
        """Return the id of each stream's first event that has one of these statuses."""
        selects = [
            f"SELECT stream, seq, id FROM {self._event} WHERE stream = %s AND {each} "
            "ORDER BY seq LIMIT 1"
            for each in self._conditions(statuses)
        ]
        found = self._rows_of_each([(sql, [stream]) for stream in streams for sql in selects])
        return {stream: row_id for stream, _, row_id in sorted(found, reverse=True)}

    def _conditions(self, statuses: Sequence[int]) -> list[str]:
        return [f"status IN ({', '.join(str(int(each)) for each in statuses)}) AND {INDEXED}"]
