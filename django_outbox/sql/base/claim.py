"""Leases of events without a key: claim, renew, release. Each database has its own statements."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper

from ...events import stored_instant
from ...queue_settings import MAX_QUEUES
from ..values import (
    SQL,
    Claim,
    Claimed,
    Column,
    Leases,
    LostEvents,
    RescueState,
    Unclaimed,
    instants,
    to_database,
)
from .statements import Statements


class EventLeases(Statements):
    @abstractmethod
    def claim(self, connection: BaseDatabaseWrapper, claim: Claim) -> Claimed:
        """Lease due rows; return their ``claim.columns`` + TAIL, oldest due first.

        A row that another worker has locked is skipped. A row whose lease has expired counts a
        rescue.
        """

    def renew(
        self, connection: BaseDatabaseWrapper, *, me: str, leases: Leases, lease: float
    ) -> tuple[set[str], set[str]]:
        """Renew ``me``'s leases of rows for ``lease`` seconds; return (renewed, still held).

        Locked rows are skipped, because they are just being settled.
        """
        due = "available_at"
        return self._renew(connection, "outbox_event", due=due, me=me, leases=leases, lease=lease)

    def release(
        self, connection: BaseDatabaseWrapper, *, me: str, leases: Leases, after: float | None = 0.0
    ) -> int:
        """Release leases without counting an attempt; return how many ``me`` held.

        The rows are due ``after`` seconds from now; with None, when their leases would have ended.
        Locked rows stay leased.
        """
        due, seconds = ("", []) if after is None else (f"available_at = {self.now_plus}, ", [after])
        return self._update_unlocked(
            connection,
            "outbox_event",
            changes=(f"{due}locked_by = NULL, locked_at = NULL", [*seconds]),
            where=self._held(connection, me, leases),
        )

    def unclaim(self, connection: BaseDatabaseWrapper, *, me: str, due: Sequence[Unclaimed]) -> int:
        """Release leases, each due at its own time and in its queue, as before the claim.

        Return how many ``me`` held. Locked rows stay leased.
        """
        count = 0
        for start in range(0, len(due), self.rows_at_once):
            some = due[start : start + self.rows_at_once]
            statement = self._update_each(
                connection,
                "outbox_event",
                given=[
                    Column("id", "text", [each.id for each in some]),
                    instants("locked_at", [each.locked_at for each in some], connection),
                    instants("due_at", [each.due_at for each in some], connection),
                    Column("queue", "text", [each.queue for each in some]),
                ],
                changes="available_at = v.due_at, queue = v.queue, locked_by = NULL, "
                "locked_at = NULL",
                where=self._fence(connection, me, ("= v.locked_at", [])),
                skip_locked=True,
            )
            count += self._run(connection, *statement)
        return count

    def lost_events(
        self, connection: BaseDatabaseWrapper, *, me: str, queues: Sequence[str], limit: int
    ) -> dict[str, LostEvents]:
        """Scan the ``limit`` rows due first in each queue for those whose workers were lost.

        The result has the queues in which something is due.
        """
        selects, params = [], []
        lost = f"MAX(CASE WHEN {RescueState.LOST.value} THEN available_at END)"
        for queue in queues:
            due, due_params = self._in_queue(queue, column="available_at", until=(self.now, []))
            selects.append(
                f"SELECT MAX(queue), "
                f"{self._in_utc(lost)}, "
                f"MAX(CASE WHEN {RescueState.SUSPECT.value} THEN 1 ELSE 0 END), "
                f"{self._in_utc('MIN(available_at)')}, {self._in_utc(self.now)} FROM ("
                f"SELECT queue, rescues, locked_by, available_at "
                f"FROM {self._events_by_due(connection)} "
                f"WHERE {due} ORDER BY {self.by_queue}available_at, id LIMIT %s) due"
            )
            params += [me, me, *due_params, limit]
        with connection.cursor() as cursor:
            cursor.execute(" UNION ALL ".join(selects), params)
            rows = cursor.fetchall()
        found = {}
        for queue, until, suspect, *first_and_now in rows:
            first, now = map(stored_instant, first_and_now)
            if queue is not None and first is not None and now is not None:
                waited = (now - first).total_seconds()
                found[queue] = LostEvents(stored_instant(until), bool(suspect), waited)
        return found

    def seconds_to_next_due(
        self, connection: BaseDatabaseWrapper, *, queues: Sequence[str], since: float = 0.0
    ) -> dict[str, float]:
        """Return the seconds until the next row, stream or lease end is due, by queue.

        What became due in the last ``since`` seconds, after the previous claim, counts too. A queue
        in which nothing is due later is left out.
        """
        selects, params = [], []
        for queue in queues:
            for table, column in self._tables_by_due(connection):
                later, given = self._in_queue(queue, column=column, after=(self.now_plus, [-since]))
                selects.append(
                    f"SELECT * FROM (SELECT queue, {self._in_utc(column)} AS at, "
                    f"{self._in_utc(self.now)} AS now FROM {table} "
                    f"WHERE {later} ORDER BY {self.by_queue}{column} LIMIT 1) due"
                )
                params += given
        with connection.cursor() as cursor:
            cursor.execute(" UNION ALL ".join(selects), params)
            rows = cursor.fetchall()
        found: dict[str, float] = {}
        for queue, *due_and_now in rows:
            due, now = map(stored_instant, due_and_now)
            if due is not None and now is not None:
                seconds = (due - now).total_seconds()
                found[queue] = min(seconds, found.get(queue, seconds))
        return found

    def has_due(self, connection: BaseDatabaseWrapper, *, queue: str) -> bool:
        """Return whether a row or a stream of the queue is due."""
        selects, params = [], []
        for table, column in self._tables_by_due(connection):
            due, given = self._in_queue(queue, column=column, until=(self.now, []))
            selects.append(
                f"SELECT * FROM (SELECT queue FROM {table} WHERE {due} "
                f"ORDER BY {self.by_queue}{column} LIMIT 1) due"
            )
            params += given
        with connection.cursor() as cursor:
            cursor.execute(" UNION ALL ".join(selects), params)
            return cursor.fetchone() is not None

    def other_queues(self, connection: BaseDatabaseWrapper, *, known: Collection[str]) -> list[str]:
        """Return queues besides the ``known`` ones that rows or streams wait in.

        A statement seeks the gaps between known names in the indexes, whatever the number of rows.
        It finds the first queue of each gap, so others are sought behind those that it found.
        """
        found: set[str] = set()
        for _ in range(MAX_QUEUES):
            names = self._first_in_gaps(connection, sorted({*known, *found}))
            if not names:
                break
            found |= names
        return sorted(found)

    def _first_in_gaps(self, connection: BaseDatabaseWrapper, names: Sequence[str]) -> set[str]:
        """Return the first queue between each two of these sorted names, and at both ends."""
        selects, params = [], []
        for low, high in zip(["", *names], [*names, None], strict=True):
            for table, column in self._tables_by_due(connection):
                below, more = ("", []) if high is None else ("AND queue < %s ", [high])
                selects.append(
                    f"SELECT * FROM (SELECT queue FROM {table} WHERE queue > %s {below}"
                    f"AND {self._has_due_time(column)} ORDER BY queue, {column} LIMIT 1) gap"
                )
                params += [low, *more]
        with connection.cursor() as cursor:
            cursor.execute(" UNION ALL ".join(selects), params)
            return {row[0] for row in cursor.fetchall()}

    def move(
        self, connection: BaseDatabaseWrapper, *, ids: Sequence[str], queue: str, newest: datetime
    ) -> int:
        """Move unlocked rows that are due until ``newest`` to a queue; return how many."""
        one_of, given = self._one_of(ids)
        return self._update_unlocked(
            connection,
            "outbox_event",
            changes=("queue = %s", [queue]),
            where=(f"{one_of} AND available_at <= %s", [*given, to_database(newest, connection)]),
        )

    def _has_due_time(self, column: str) -> str:
        """Return the condition of the partial indexes; where there are none, one that holds."""
        return f"{column} IS NOT NULL"

    def _wanted(self, claim: Claim) -> SQL:
        """Return what a claim wants of rows, besides their queues and due times."""
        where, params = [], []
        if claim.ids is not None:
            one_of, ids = self._one_of(claim.ids)
            where.append(one_of)
            params += ids
        if claim.skip_recent:
            where.append(f"created_at <= {self.now_plus}")
            params.append(-claim.skip_recent)
        if claim.exclude:
            one_of, ids = self._one_of(claim.exclude)
            where.append(f"NOT ({one_of})")
            params += ids
        where.append(claim.state.value)
        return " AND ".join(where), [*params, claim.me]

    def _branches(self, connection: BaseDatabaseWrapper, claim: Claim) -> list[SQL]:
        """Return the condition of each branch of a claim, followed by its order."""
        until, (wanted, wanted_params) = self._until(connection, claim.at), self._wanted(claim)
        if claim.ids is not None:
            sql = f"available_at <= {until[0]} AND {wanted} ORDER BY available_at, id"
            return [(f"{sql} LIMIT %s", [*until[1], *wanted_params, len(claim.ids)])]
        found = []
        for branch in claim.branches:
            after = None if branch.since is None else (self.now_plus, [-branch.since])
            due, params = self._in_queue(
                branch.queue, column="available_at", after=after, until=until
            )
            sql = f"{due} AND {wanted} ORDER BY {self.by_queue}available_at, id LIMIT %s"
            found.append((sql, [*params, *wanted_params, branch.limit]))
        return found

    def _tables_by_due(
        self, connection: BaseDatabaseWrapper
    ) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return both tables for a SELECT by due time, and the column that has it."""
        return (
            (self._events_by_due(connection), "available_at"),
            (self._streams_by_due(connection), "due_at"),
        )

    def _event_by_id(self, connection: BaseDatabaseWrapper) -> str:
        """Return the event table as ``e``, for an UPDATE by id, with any index hint it needs."""
        return f"{self._event(connection)} AS e"

    def _events_by_due(self, connection: BaseDatabaseWrapper) -> str:
        """Return the event table for a SELECT by due time, with an index hint if it needs one."""
        return self._event(connection)

    def _streams_by_due(self, connection: BaseDatabaseWrapper) -> str:
        """Return the stream table for a SELECT by due time, with an index hint if it needs one."""
        return self._stream(connection)
