"""Settling: write what became of events, if the worker still owns them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from django.db import transaction

from ..listeners.history import Entry, addition
from ..listeners.outcomes import DONE, Status
from .claim import EventLeases
from .values import (
    DECIDED,
    Column,
    EachUpdate,
    Ending,
    LeaseKind,
    Leases,
    in_parts,
    instants,
    plain,
)


class Settling(EventLeases):
    joined = "{} || {}"  # SQL for two texts as one

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
