"""Settling: write what became of events, if the worker still owns them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ...listeners.history import Entry, addition
from ...listeners.outcomes import DONE, Decision, Status
from ..values import LeaseKind
from .claim import EventLeases


class Settling(EventLeases):
    deleted_by_id = "FROM {0}"  # what a DELETE by primary key deletes
    joined = "{} || {}"  # SQL for two texts as one
    rows_per_settle = 500

    def settle_all(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        decisions: Sequence[tuple[str, Decision]],
        kind: LeaseKind = LeaseKind.ROW,
        delete_done: bool = False,
        attempts: int | None = None,
    ) -> int:
        """Write decisions of any kind; return how many rows ``me`` still held.

        A group commit needs no ``attempts``: the decision of an abandoned thread never leaves it.
        An atomic listener needs it: its own transaction could still commit after that.
        """
        # Of ``done``, only the rows' ends are to be written, or the rows are deleted.
        done: list[str] = []
        others: list[tuple[str, Decision]] = []
        for each in decisions:
            decision = each[1]
            if decision is DONE or (delete_done and decision.status is Status.DONE):
                done.append(each[0])
            else:
                others.append(each)
        count = 0
        if done and delete_done:
            count = self.delete_done(connection, me=me, ids=done, kind=kind, attempts=attempts)
        if count < len(done):
            count += self.settle_done(connection, me=me, ids=done, kind=kind, attempts=attempts)
        for start in range(0, len(others), self.rows_per_settle):
            some = others[start : start + self.rows_per_settle]
            count += self.settle(connection, me=me, decisions=some, kind=kind, attempts=attempts)
        return count

    def settle_done(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        ids: Sequence[str],
        kind: LeaseKind = LeaseKind.ROW,
        attempts: int | None = None,
    ) -> int:
        """Mark rows DONE; return how many ``me`` still held. Repeating it changes nothing."""
        one_of, given = self._one_of(ids)
        fence, params = self._fence(connection, me, kind, attempts)
        return self._run(
            connection,
            f"""UPDATE {self._event_by_id(connection)} SET status = 1, done_at = {self.now},
                available_at = NULL, locked_by = NULL, locked_at = NULL
            WHERE {one_of} AND {fence}""",
            [*given, *params],
        )

    def delete_done(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        ids: Sequence[str],
        kind: LeaseKind = LeaseKind.ROW,
        attempts: int | None = None,
    ) -> int:
        """Delete rows that are done; keep those with a unique key, which must stay reserved."""
        one_of, given = self._one_of(ids)
        fence, params = self._fence(connection, me, kind, attempts)
        return self._run(
            connection,
            f"""DELETE {self.deleted_by_id.format(self._event(connection))}
            WHERE {one_of} AND {fence} AND unique_key IS NULL""",
            [*given, *params],
        )

    @abstractmethod
    def settle(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        decisions: Sequence[tuple[str, Decision]],
        kind: LeaseKind = LeaseKind.ROW,
        attempts: int | None = None,
    ) -> int:
        """Write retries, deferrals and dead events; return how many rows ``me`` still held."""

    def add_to_history(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        ids: Sequence[str],
        entry: Entry,
        kind: LeaseKind = LeaseKind.ROW,
    ) -> int:
        """Add an entry to the history of rows; return how many ``me`` still held."""
        (one_of, given), (fence, params) = self._one_of(ids), self._fence(connection, me, kind)
        longer = self.joined.format("SUBSTR(history, 1, LENGTH(history) - 1)", "%s")
        return self._run(
            connection,
            f"""UPDATE {self._event_by_id(connection)} SET
                history = CASE WHEN history IS NULL THEN %s ELSE {longer} END
            WHERE {one_of} AND {fence}""",
            [*addition(entry), *given, *params],
        )

    @contextmanager
    def read_committed(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        """Open a transaction in which a fenced UPDATE sees a lease that was renewed meanwhile."""
        with transaction.atomic(using=connection.alias):
            yield
