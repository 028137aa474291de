"""Parking: what a pause holds waits in a queue of the pause, which no worker serves.

Nothing is moved there for a pause that has ended, and a pause does not end while something is. So
its resume finds all that is parked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..listeners.outcomes import UNSETTLED
from ..listeners.queues import expected_queue
from ..queue_settings import DEFAULT_QUEUE, PARKED, PARKED_END, parked_by, parked_queue
from .inspection import Inspection
from .streams import StreamLeases
from .transactions import single_transaction
from .values import EVENTS, Release, Row, Table


class Parking(StreamLeases, Inspection):
    shared_lock = ""  # SQL that locks selected rows against changes, but not against each other

    def keep_pauses(self, ids: Collection[Any]) -> set[int]:
        """Return those of these pauses that there are; none can end before the transaction does."""
        one_of, given = self._one_of(ids)
        sql = f"SELECT id FROM {self._table('outbox_pause')} WHERE {one_of}{self.shared_lock}"
        return {row[0] for row in self._rows(sql, given)}

    def due_first(self, *, queues: Collection[str], limit: int) -> list[Row]:
        """Return id, event type, listener and key of the ``limit`` rows due first of each queue."""
        selects = []
        for queue in queues:
            due, given = self._in_queue(queue, column="available_at", until=(self.now, []))
            sql = f"""SELECT id, event_type, listener, {self.key} FROM {self._by_due(EVENTS)}
                WHERE {due} ORDER BY {self.by_queue}available_at, id LIMIT %s"""
            selects.append((sql, [*given, limit]))
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

    def release_streams(self, *, me: str, streams: Sequence[Release]) -> set[str]:
        # Those to be parked, too; if their pauses have ended, in the queues that they are in.
        pauses = {pause for each in streams if (pause := parked_by(each.queue)) is not None}
        if not pauses:
            return super().release_streams(me=me, streams=streams)
        with single_transaction(self.connection):
            over = {parked_queue(each) for each in pauses - self.keep_pauses(pauses)}
            given = [each._replace(queue=None) if each.queue in over else each for each in streams]
            return super().release_streams(me=me, streams=given)

    def unpark(self, table: Table, *, pause: int, limit: int) -> int:
        """Move what is parked for a pause that has ended to the queues of its listeners; count it.

        Due times are kept; a row that was due is so for the first time. Locked rows stay.
        """
        parked = parked_queue(pause)
        within, given = self._in_queue(parked, column=table.due)
        sql = f"""SELECT {table.key} FROM {self._by_due(table)}
            WHERE {within} AND {table.due} IS NOT NULL
            ORDER BY {self.by_queue}{table.order} LIMIT %s"""
        homes: defaultdict[str, list[str]] = defaultdict(list)
        for key, home in self._homes(table, [row[0] for row in self._rows(sql, [*given, limit])]):
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
