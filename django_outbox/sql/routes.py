"""What completes a claim: rows for listeners that a writer did not know, and slots.

A slot (``coalesce=``) is a set of rows of which the newest pending one runs and the others end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..events import SLOT_PREFIX, slot_of
from ..listeners.outcomes import COALESCED
from ..listeners.queues import Route
from ..queue_settings import PARKED
from .inspection import Inspection
from .settle import Settling
from .streams import StreamLeases
from .values import FULL, SQL, LeaseKind, Leases, Row, in_parts, instant

# What a further row has of the row that it is made from.
COPIED = (
    *("event_id", "event_type", "aggregate_type", "aggregate_id", "tenant_id", "payload"),
    *("headers", "occurred_at", "created_at", "key", "seq"),
)

IDS = 500  # per statement: below the 999 parameters that Django knows of SQLite


class Routing(Settling):
    skip_known = " ON CONFLICT (id) DO NOTHING"  # end of an INSERT of rows that may exist
    row_lock = " FOR UPDATE"

    def route_rows(
        self,
        *,
        me: str,
        leases: Leases,
        route: Route,
        receipt: str,
        kind: LeaseKind = LeaseKind.ROW,
    ) -> int:
        """Give rows that are not routed to a listener; return how many ``me`` still held.

        Those with a key are not leased afterwards: they are due by their streams.
        """
        held, params = self._held(me, leases, kind)
        place, given = self._place(route)
        unkeyed = ", ".join(
            f"{each} = CASE WHEN {self.key} IS NULL THEN {each} END"
            for each in ("available_at", "locked_by", "locked_at")
        )
        sql = f"""UPDATE {self._event_by_id} SET
                listener = %s, routes = %s, queue = %s, stream = {place}, {unkeyed}
            WHERE listener IS NULL AND {held}"""
        return self._run(sql, [route.title, receipt, route.queue, *given, *params])

    def add_rows(self, *, ids: Sequence[str], route: Route, receipt: str) -> None:
        """Insert a row for a further listener of the events of these rows, due now.

        Only of rows with this receipt: the transaction has just given it to them.
        """
        one_of, given = self._one_of(ids)
        copied = ", ".join(self.key if each == "key" else each for each in COPIED)
        table, key, (place, places) = self._event, self.key, self._place(route)
        sql = f"""INSERT INTO {table} (id, listener, routes, queue, stream, first_due_at,
                available_at, deliver_at, status, attempts, rescues, {copied})
            SELECT {self.joined.format("event_id", "%s")}, %s, %s, %s, {place}, {self.now},
                CASE WHEN {key} IS NULL THEN {self.now} END,
                CASE WHEN {key} IS NULL THEN deliver_at END, 0, 0, 0, {copied}
            FROM {table} WHERE {one_of} AND routes = %s{self.skip_known}"""
        new = [f".{route.digest}", route.title, receipt, route.queue, *places]
        self._run(sql, [*new, *given, receipt])

    def _place(self, route: Route) -> SQL:
        """Return the SQL of the stream or slot of a row with this route."""
        name = f"SUBSTR(stream, {SLOT_PREFIX + 1})"
        sql = f"""CASE WHEN {self.key} IS NOT NULL THEN {self.joined.format("%s", self.key)}
            WHEN stream IS NOT NULL THEN {self.joined.format("%s", name)} END"""
        return sql, [f"{route.lane}:", slot_of(route.digest, "")]

    def lock_event(self, event_id: str) -> dict[str, str]:
        """Lock the rows of an event, in the order of their ids; return the receipt of each.

        Not by their range: MySQL would wait for the row behind it, too. What is added meanwhile is
        found when nothing can be added any more.
        """
        sql = f"SELECT id FROM {self._event_by_id} WHERE id >= %s AND id < %s AND event_id = %s"
        given, asked, locked = [event_id, f"{event_id}/", event_id], set[str](), dict[str, str]()
        while more := sorted({row[0] for row in self._rows(sql, given)} - asked):
            asked.update(more)
            locked.update((row_id, receipt) for row_id, _, receipt in self.lock_rows(more))
        return locked

    def lock_rows(self, ids: Sequence[str]) -> list[tuple[str, str, str]]:
        """Lock rows in the order of ``ids``; return the id, event id and receipt of each."""
        found: list[Row] = []
        for some in in_parts(ids, IDS):
            one_of, given = self._one_of(some)
            sql = f"SELECT id, event_id, routes FROM {self._event_by_id} WHERE {one_of} ORDER BY id"
            found += self._rows(f"{sql}{self.row_lock}", given)
        return [(row_id, event_id, receipt or "") for row_id, event_id, receipt in found]

    def note_receipt(self, *, ids: Sequence[str], receipt: str) -> None:
        """Write a receipt into locked rows."""
        for some in in_parts(ids, IDS):
            one_of, given = self._one_of(some)
            sql = f"UPDATE {self._event_by_id} SET routes = %s WHERE {one_of}"
            self._run(sql, [receipt, *given])


MOST_ROWS = 1000  # of a slot that one statement reads, or that one ends
# Neither leased nor parked by a pause; no suspect either, which is claimed alone.
FREE = f"(locked_by IS NULL AND queue NOT LIKE '{PARKED}%%' AND rescues < 2)"


class Slots(StreamLeases, Inspection):
    def pending_in_slots(
        self, *, slots: Sequence[str], me: str
    ) -> dict[str, list[tuple[str, bool]]]:
        """Return the newest pending rows of each slot that are free or that ``me`` has leased.

        Each is an id and whether it is leased, the newest first. A slot is ordered by the clock of
        the writes, then by the ids.
        """
        selects = [
            f"SELECT stream, seq, id, locked_by FROM {self._events_in_order} "
            f"WHERE stream = %s AND {each} AND ({FREE} OR locked_by = %s) "
            f"ORDER BY seq DESC, id DESC LIMIT {MOST_ROWS}"
            for each in self._conditions([0, 2])
        ]
        found: dict[str, list[tuple[int, str, bool]]] = {}
        rows = self._rows_of_each([(sql, [slot, me]) for slot in slots for sql in selects])
        for slot, seq, row_id, owner in rows:
            found.setdefault(slot, []).append((seq, row_id, owner is not None))
        return {
            slot: [each[1:] for each in sorted(some, reverse=True)[:MOST_ROWS]]
            for slot, some in found.items()
        }

    def lease_free(
        self, *, me: str, ids: Sequence[str], locked_at: Any, lease: float, rescues: int
    ) -> list[Row]:
        """Lease those of these pending rows that are free, due or not; return their ``FULL``.

        The leases are those of the claim at ``locked_at``. Each row has at least ``rescues`` then,
        those of the row that it replaces.
        """
        one_of, given = self._one_of(ids)
        update = f"""rescues = CASE WHEN rescues < %s THEN %s ELSE rescues END,
            locked_by = %s, locked_at = %s, available_at = {self.now_plus}"""
        changes = update, [rescues, rescues, me, instant(locked_at, self.connection), lease]
        where = f"{one_of} AND status IN (0, 2) AND {FREE}", given
        self._update_unlocked("outbox_event", changes=changes, where=where)
        mine, params = self._held(me, dict.fromkeys(ids, locked_at))
        sql = f"SELECT {self._columns(FULL)} FROM {self._event_by_id} WHERE {mine}"
        return self._rows(sql, params)

    def end_coalesced(self, *, me: str, ids: Sequence[str], locked_at: Any) -> int:
        """End pending rows as done that are free or leased by ``me`` since then; return how many.

        Locked rows stay as they are.
        """
        update = f"""status = 1, done_at = {self.now}, available_at = NULL, result = %s,
            locked_by = NULL, locked_at = NULL"""
        mine = f"status IN (0, 2) AND ({FREE} OR (locked_by = %s AND locked_at = %s))"
        count, owner, ended = 0, [me, instant(locked_at, self.connection)], (update, [COALESCED])
        for some in in_parts(ids, MOST_ROWS):
            one_of, given = self._one_of(some)
            where = f"{one_of} AND {mine}", [*given, *owner]
            count += self._update_unlocked("outbox_event", changes=ended, where=where)
        return count
