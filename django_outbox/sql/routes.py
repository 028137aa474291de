"""Routing at the claim: rows for the listeners that an event's writer did not know."""

from __future__ import annotations

from collections.abc import Sequence

from ..events import SLOT_PREFIX, slot_of
from ..listeners.queues import Route
from .settle import Settling
from .values import SQL, LeaseKind, Leases, Row, in_parts

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
