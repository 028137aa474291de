"""Settling, and what completes a claim: rows for further listeners, and slots."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import transaction

from ..events import SLOT_PREFIX, slot_of
from ..listeners.history import Entry, addition
from ..listeners.outcomes import COALESCED, DONE, Status
from ..listeners.queues import Route
from ..queue_settings import PARKED
from .streams import Streams
from .values import (
    DECIDED,
    FULL,
    SQL,
    Column,
    EachUpdate,
    Ending,
    LeaseKind,
    Leases,
    Row,
    in_parts,
    instant,
    instants,
    plain,
)

# What a further row has of the row that it is made from.
COPIED = (
    *("event_id", "event_type", "aggregate_type", "aggregate_id", "tenant_id", "payload"),
    *("headers", "occurred_at", "created_at", "key", "seq"),
)

IDS = 500  # per statement: below the 999 parameters that Django knows of SQLite


MOST_ROWS = 1000  # of a slot that one statement reads, or that one ends
# Neither leased nor parked by a pause; no suspect either, which is claimed alone.
FREE = f"(locked_by IS NULL AND queue NOT LIKE '{PARKED}%%' AND rescues < 2)"


class Settling(Streams):
    joined = "{} || {}"  # SQL for two texts as one
    skip_known = " ON CONFLICT (id) DO NOTHING"  # end of an INSERT of rows that may exist
    row_lock = " FOR UPDATE"

    def settle_all(
        self,
        *,
        me: str,
        endings: Sequence[Ending],
        kind: LeaseKind = LeaseKind.ROW,
        delete_done: bool = False,
    ) -> int:
        """Write decisions of any kind; return how many rows ``me`` still held."""
        # Of ``done``, only the rows' ends are to be written, or the rows are deleted.
        done, others = list[str](), list[Ending]()
        for each in endings:
            if each.decision is DONE or (delete_done and each.decision.status is Status.DONE):
                done.append(each.id)
            else:
                others.append(each)
        count = self.end_done(me=me, ids=done, kind=kind, delete=delete_done)
        for some in in_parts(others, self.rows_at_once):
            count += self.settle(me=me, endings=some, kind=kind)
        return count

    def end_done(
        self, *, me: str, ids: Sequence[str], kind: LeaseKind = LeaseKind.ROW, delete: bool
    ) -> int:
        """Mark rows DONE or delete them; return how many ``me`` still held."""
        count = self.delete_done(me=me, ids=ids, kind=kind) if ids and delete else 0
        if count < len(ids):
            count += self.settle_done(me=me, ids=ids, kind=kind)
        return count

    def settle_done(self, *, me: str, ids: Collection[str], kind: LeaseKind = LeaseKind.ROW) -> int:
        """Mark rows DONE; return how many ``me`` still held. Repeating it changes nothing.

        Any lease of ``me`` will do: the listener has run, and a claim of this worker may have
        leased the row anew while it did.
        """
        one_of, given = self._one_of(ids)
        fence, params = self._fence(me, None, kind)
        sql = f"""UPDATE {self._event_by_id} SET status = 1, done_at = {self.now},
                available_at = NULL, locked_by = NULL, locked_at = NULL
            WHERE {one_of} AND {fence}"""
        return self._run(sql, [*given, *params])

    def delete_done(self, *, me: str, ids: Collection[str], kind: LeaseKind = LeaseKind.ROW) -> int:
        """Delete rows that are done; keep those with a unique key, which must stay reserved."""
        one_of, given = self._one_of(ids)
        fence, params = self._fence(me, None, kind)
        sql = f"""DELETE {self.deleted_by_id.format(self._event)}
            WHERE {one_of} AND {fence} AND unique_key IS NULL"""
        return self._run(sql, [*given, *params])

    def settle(self, *, me: str, endings: Sequence[Ending], kind: LeaseKind = LeaseKind.ROW) -> int:
        """Write retries, deferrals and dead events; return how many rows ``me`` still held.

        Each is written by its own lease, and once.
        """
        given = [
            Column("id", "text", [each.id for each in endings]),
            instants("locked_at", [each.locked_at for each in endings], self.connection),
            Column("attempts", "int", [each.attempts for each in endings]),
        ]
        given += [
            Column(name, kind_of, [plain(getattr(each.decision, name)) for each in endings])
            for name, kind_of in DECIDED.items()
        ]
        kept = ("last_error", "error"), *((each, each) for each in ("cause", "history", "queue"))
        texts = ", ".join(f"{name} = COALESCE(v.{new}, e.{name})" for name, new in kept)
        changes = f"""status = v.status, attempts = e.attempts + v.spent, rescues = 0,
            {kind.value} = {self._after("v.delay")},
            done_at = CASE WHEN v.delay IS NULL THEN {self.now} END,
            {texts}, locked_by = NULL, locked_at = NULL"""
        fence, params = self._fence(me, ("= v.locked_at", []), kind)
        where = (f"e.attempts = v.attempts AND {fence}", params)
        return self._run(*self._update_each(EachUpdate("outbox_event", given, changes, where)))

    def note_lost(
        self, *, me: str, leases: Leases, entry: Entry, kind: LeaseKind = LeaseKind.ROW
    ) -> int:
        """Note in rows that a worker was lost with them; return how many ``me`` still held.

        The entry has the number of lost workers, which for a key stands on its stream.
        """
        held, params = self._held(me, leases, kind)
        longer = self.joined.format("SUBSTR(history, 1, LENGTH(history) - 1)", "%s")
        sql = f"""UPDATE {self._event_by_id} SET rescues = %s,
            history = CASE WHEN history IS NULL THEN %s ELSE {longer} END WHERE {held}"""
        return self._run(sql, [entry.number, *addition(entry), *params])

    @contextmanager
    def read_committed(self) -> Iterator[None]:
        """Open a transaction in which a fenced UPDATE sees a lease that was renewed meanwhile."""
        with transaction.atomic(using=self.connection.alias):
            yield

    # -- routing: rows for listeners that a writer did not know ------------------------------------

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

    # -- slots (``coalesce=``): of their pending rows, the newest runs and the others end ----------

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
