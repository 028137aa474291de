"""Routing at the claim: rows for the listeners that an event's writer did not know."""

from __future__ import annotations

from collections.abc import Sequence

from ..events import SLOT_PREFIX, slot_of
from ..listeners.queues import Route
from .settle import Settling
from .values import LeaseKind, Leases, Row

# What a further row has of the row that it is made from.
COPIED = (
    *("event_id", "event_type", "aggregate_type", "aggregate_id", "tenant_id", "payload"),
    *("headers", "occurred_at", "created_at", "key", "seq"),
)

IDS = 500  # per statement: below the limit of 999 parameters in old SQLite


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
        unkeyed = ", ".join(
            f"{each} = CASE WHEN {self.key} IS NULL THEN {each} END"
            for each in ("available_at", "locked_by", "locked_at")
        )
        return self._run(
            f"""UPDATE {self._event_by_id} SET
                listener = %s, routes = %s, queue = %s, stream = {self._place}, {unkeyed}
            WHERE listener IS NULL AND {held}""",
            [route.title, receipt, route.queue, *_places(route), *params],
        )

    def add_rows(self, *, ids: Sequence[str], route: Route, receipt: str) -> None:
        """Insert a row for a further listener of the events of these rows, due now.

        Only of rows with this receipt: the transaction has just given it to them.
        """
        one_of, given = self._one_of(ids)
        copied = ", ".join(self.key if each == "key" else each for each in COPIED)
        table, joined, key = self._event, self.joined, self.key
        self._run(
            f"""INSERT INTO {table} (id, listener, routes, queue, stream, first_due_at,
                available_at, deliver_at, status, attempts, rescues, {copied})
            SELECT {joined.format("event_id", "%s")}, %s, %s, %s,
                {self._place}, {self.now},
                CASE WHEN {key} IS NULL THEN {self.now} END,
                CASE WHEN {key} IS NULL THEN deliver_at END, 0, 0, 0, {copied}
            FROM {table} WHERE {one_of} AND routes = %s{self.skip_known}""",
            [
                *(f".{route.digest}", route.title, receipt, route.queue, *_places(route)),
                *given,
                receipt,
            ],
        )

    @property
    def _place(self) -> str:
        """The SQL of a routed row's stream or slot; its parameters are ``_places``."""
        name = f"SUBSTR(stream, {SLOT_PREFIX + 1})"
        return (
            f"CASE WHEN {self.key} IS NOT NULL THEN {self.joined.format('%s', self.key)} "
            f"WHEN stream IS NOT NULL THEN {self.joined.format('%s', name)} END"
        )

    def lock_event(self, event_id: str) -> dict[str, str]:
        """Lock the rows of an event, in the order of their ids; return the receipt of each."""
        return {
            row_id: routes or ""
            for row_id, routes in self._rows(
                f"""SELECT id, routes FROM {self._event_by_id}
                        WHERE id >= %s AND id < %s AND event_id = %s ORDER BY id{self.row_lock}""",
                [event_id, f"{event_id}/", event_id],
            )
        }

    def lock_rows(self, ids: Sequence[str]) -> list[tuple[str, str, str]]:
        """Lock rows in the order of ``ids``; return the id, event id and receipt of each."""
        found: list[Row] = []
        for start in range(0, len(ids), IDS):
            one_of, given = self._one_of(ids[start : start + IDS])
            found += self._rows(
                f"""SELECT id, event_id, routes FROM {self._event_by_id}
                                WHERE {one_of} ORDER BY id{self.row_lock}""",
                given,
            )
        return [(row_id, event_id, routes or "") for row_id, event_id, routes in found]

    def note_receipt(self, *, ids: Sequence[str], receipt: str) -> None:
        """Write a receipt into locked rows."""
        for start in range(0, len(ids), IDS):
            one_of, given = self._one_of(ids[start : start + IDS])
            sql = f"UPDATE {self._event_by_id} SET routes = %s WHERE {one_of}"
            self._run(sql, [receipt, *given])


def _places(route: Route) -> tuple[str, str]:
    """Return what comes before a key and before the name of a slot in a route's rows."""
    return f"{route.lane}:", slot_of(route.digest, "")
