"""Leases of events without a key: claim, renew, release. Each database has its own statements."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from datetime import timedelta
from itertools import chain

from ..queue_settings import MAX_QUEUES, PARKED, PARKED_END
from .statements import Statements
from .values import (
    EVENTS,
    SQL,
    STREAMS,
    Claim,
    Claimed,
    Column,
    EachUpdate,
    Leases,
    RescueState,
    Row,
    Table,
    Unclaimed,
    claimed,
    in_parts,
    instant,
    instants,
    seconds_between,
    to_database,
)

AT_ONCE = 25  # rows to fetch before their payload size is checked; one by one took 4 calls each
# A claim counts the workers that were lost with a row or stream; the parameter is the claimer.
COUNT_RESCUE = (
    "rescues = e.rescues + CASE WHEN e.locked_by IS NULL OR e.locked_by = %s THEN 0 ELSE 1 END"
)

Gap = tuple[str, str | None]  # between two names of queues; None: to the end
WHOLE: Sequence[Gap] = (("", None),)

logger = logging.getLogger("django_outbox")


class EventLeases(Statements):
    has_due_time = "{} IS NOT NULL"  # the condition of the partial indexes, if there are any
    unindexed = ""  # before a column that is to be tested, but not sought in its index

    # The claim here is a SELECT without locks, then a conditional UPDATE by key: if several workers
    # select the same rows, the first UPDATE leases them, and the others read back which they own.

    def claim(self, claim: Claim) -> Claimed:
        """Lease due rows; return their ``claim.columns`` + TAIL, oldest due first.

        A row that another worker has locked is skipped. An event whose lease has expired counts a
        rescue.
        """
        seen, cut = self._select_due(claim)
        rows = self._lease(claim, seen)
        if seen and not rows:  # others leased or locked them: more may be due behind
            seen, cut = self._select_due(claim, skip_locked=True)
            rows = self._lease(claim, seen)
        return claimed(claim, rows, seen, cut)

    def _select_due(self, claim: Claim, *, skip_locked: bool = False) -> tuple[list[Row], set[str]]:
        """Return the due rows, and of which queues only some."""
        lock = self._skip_locked if skip_locked else ""
        branches = self._branches(claim)
        sql, params = self._union([(f"{select}{lock}", given) for select, given in branches])
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            some = iter(lambda: [*cursor.fetchmany(AT_ONCE)], [])
            kept, cut = claim.cut(chain.from_iterable(some))
        return sorted(kept, key=lambda row: (row[-3], row[0])), cut

    def _lease(self, claim: Claim, rows: list[Row]) -> list[Row]:
        """Lease the selected rows; return those that the worker owns now, as they are now."""
        if not rows:
            return []
        # One instant for all: SQLite's clock goes on while the rows are fetched.
        table, me, now = claim.table, claim.me, rows[0][-1]
        leased_at = instant(now, self.connection)
        # The count comes first, because MySQL assigns in this order.
        changes = f"{COUNT_RESCUE}, locked_by = %s, locked_at = %s, {table.due} = {self.now_plus}"
        # A row that was claimed or settled since the SELECT has a later due time, or none.
        where, params = self._as_selected(table, rows)
        where = f"{where} AND {self.unindexed}{table.due} <= %s AND {claim.state.value}"
        params = [*params, instant(max(row[-3] for row in rows), self.connection), me]
        taken = self._take(table, (changes, [me, me, leased_at, claim.lease]), (where, params))
        if taken < len(rows):
            logger.debug("others were faster rows=%d taken=%d", len(rows), taken)
            one_of, params = self._one_of([row[0] for row in rows], table.key)
            sql = f"SELECT {table.key} FROM {self._table(table.name)} WHERE {one_of}"
            mine = f"{sql} AND locked_by = %s AND locked_at = %s"
            taken_ids = {row[0] for row in self._rows(mine, [*params, me, leased_at])}
            rows = [row for row in rows if row[0] in taken_ids]
        if all(row[-1] == now and row[-2] in (None, me) for row in rows):
            return rows  # as they are: a copy of each would be more for the garbage collector
        return [(*row[:2], row[2] + (row[-2] not in (None, me)), *row[3:-1], now) for row in rows]

    def _take(self, table: Table, changes: SQL, where: SQL) -> int:
        """Lease rows by primary key; return how many."""
        return self._update_unlocked(table.name, changes=changes, where=where)

    def _as_selected(self, table: Table, rows: Sequence[Row]) -> SQL:
        """Return the condition that a row is one of these, as it was selected."""
        return self._one_of([row[0] for row in rows], table.key)

    @property
    def _skip_locked(self) -> str:
        """Return the end of a SELECT that locks its rows, without those that are locked."""
        return ""

    def renew(
        self, *, me: str, leases: Leases, lease: float, table: Table = EVENTS
    ) -> tuple[set[str], set[str]]:
        """Renew ``me``'s leases for ``lease`` seconds; return (renewed, still held).

        Locked rows are skipped, because they are just being settled.
        """
        mine, params = self._leased(table.name, me, leases)
        renewal: SQL = (f"{table.due} = {self.now_plus}", [lease])
        taken = self._update_unlocked(table.name, changes=renewal, where=(mine, params))
        if taken == len(leases):
            return {*leases}, {*leases}
        # Again, by a known clock: another thread may release what was renewed before it is read,
        # so the latest of the due times that are left says nothing. SQLite rounds to milliseconds.
        least = self.clock() + timedelta(seconds=lease - 0.01)
        self._update_unlocked(table.name, changes=renewal, where=(mine, params))
        sql = f"SELECT {table.key}, {table.due} >= %s FROM {self._table(table.name)} WHERE {mine}"
        given = [to_database(least, self.connection), *params]
        rows: dict[str, bool] = dict(self._rows(sql, given))
        return {each for each, is_renewed in rows.items() if is_renewed}, {*rows}

    def release(
        self, *, me: str, leases: Leases, after: float | None = 0.0, table: Table = EVENTS
    ) -> int:
        """Release leases without counting an attempt; return how many ``me`` held.

        The rows are due ``after`` seconds from now; with None, when their leases would have ended.
        Locked rows stay leased.
        """
        due: SQL = ("", []) if after is None else (f"{table.due} = {self.now_plus}, ", [after])
        leased_at = "NULL" if table is EVENTS else self.now  # since when a stream is idle
        free: SQL = (f"{due[0]}locked_by = NULL, locked_at = {leased_at}", due[1])
        where = self._leased(table.name, me, leases)
        return self._update_unlocked(table.name, changes=free, where=where)

    def unclaim(self, *, me: str, due: Sequence[Unclaimed]) -> set[str]:
        """Release leases, each due at its own time and in its queue, as before the claim.

        Return those that ``me`` still has, because they are locked.
        """
        left: set[str] = set()
        for some in in_parts(due, self.rows_at_once):
            update = EachUpdate(
                "outbox_event",
                given=[
                    Column("id", "text", [each.id for each in some]),
                    instants("locked_at", [each.locked_at for each in some], self.connection),
                    instants("due_at", [each.due_at for each in some], self.connection),
                    Column("queue", "text", [each.queue for each in some]),
                ],
                changes="available_at = v.due_at, queue = v.queue, locked_by = NULL, "
                "locked_at = NULL",
                where=self._fence(me, ("= v.locked_at", [])),
            )
            if self._run(*self._update_each_unlocked(update)) < len(some):
                mine, params = self._leased("outbox_event", me, {e.id: e.locked_at for e in some})
                sql = f"SELECT id FROM {self._event} WHERE {mine}"
                left |= {row[0] for row in self._rows(sql, params)}
        return left

    def suspects(self, *, me: str, queues: Sequence[str], limit: int) -> list[tuple[Table, str]]:
        """Return where suspects are due: tables and queues, by the ``limit`` rows due first."""
        selects = []
        for table in (EVENTS, STREAMS):
            for queue in queues:
                due, given = self._now_due(table, queue, "queue, rescues, locked_by")
                sql = f"""SELECT '{table.name}', MAX(queue) FROM ({due} LIMIT %s) due
                    WHERE {RescueState.SUSPECT.value}"""
                selects.append((sql, [*given, limit, me]))
        tables, found = {each.name: each for each in (EVENTS, STREAMS)}, self._rows_of_each(selects)
        return [(tables[name], queue) for name, queue in found if queue is not None]

    def seconds_to_next_due(self, *, queues: Sequence[str], since: float = 0.0) -> dict[str, float]:
        """Return the seconds until the next row, stream or lease end is due, by queue.

        What became due in the last ``since`` seconds, after the previous claim, counts too. A queue
        in which nothing is due later is left out.
        """
        found: dict[str, float] = {}
        after = self.now_plus, [-since]
        for queue, due, now in self._first_of_each(queues, after=after):
            if (seconds := seconds_between(now, due)) is not None:
                found[queue] = min(seconds, found.get(queue, seconds))
        return found

    def has_due(self, *, queue: str) -> bool:
        """Return whether a row or a stream of the queue is due."""
        return bool(self._first_of_each([queue], until=(self.now, [])))

    def _first_of_each(
        self, queues: Sequence[str], *, after: SQL | None = None, until: SQL | None = None
    ) -> list[Row]:
        """Return queue, due time and clock of the first row and stream of each queue in bounds."""
        selects = []
        for queue in queues:
            for table in (EVENTS, STREAMS):
                columns = f"queue, {self.in_utc.format(table.due)}, {self.in_utc.format(self.now)}"
                sql, given = self._due_first(table, queue, columns, after=after, until=until)
                selects.append((f"{sql} LIMIT 1", given))
        return self._rows_of_each(selects)

    def other_queues(self, *, known: Collection[str]) -> list[str]:
        """Return queues besides the ``known`` ones and those of pauses in which anything waits."""
        return self.queues_besides(known, [("", PARKED), (PARKED_END, None)])

    def queues_besides(self, known: Collection[str], within: Sequence[Gap] = WHOLE) -> list[str]:
        """Return queues between these names, besides the ``known`` ones, in which anything waits.

        A statement seeks the gaps between known names in the indexes, whatever the number of rows.
        It finds the first queue of each gap, so others are sought behind those that it found.
        """
        found: set[str] = set()
        for _ in range(MAX_QUEUES):
            names = sorted({*known, *found})
            gaps: list[Gap] = []
            for low, high in within:
                inside = [each for each in names if low < each and (high is None or each < high)]
                gaps += zip([low, *inside], [*inside, high], strict=True)
            if not (more := self._first_in(gaps)):
                break
            found |= more
        return sorted(found)

    def _first_in(self, gaps: Sequence[Gap]) -> set[str]:
        """Return the first queue in each gap between two names."""
        selects = []
        for low, high in gaps:
            for table in (EVENTS, STREAMS):
                below, more = ("", []) if high is None else ("AND queue < %s ", [high])
                sql = f"""SELECT queue FROM {self._by_due(table)} WHERE queue > %s {below}
                    AND {self.has_due_time.format(table.due)} ORDER BY queue, {table.due} LIMIT 1"""
                selects.append((sql, [low, *more]))
        return {row[0] for row in self._rows_of_each(selects)}

    def move(self, table: Table, *, of: str, queue: str, limit: int) -> int:
        """Move unlocked rows of a table that are due from one queue to another; return how many."""
        sql, params = self._now_due(table, of, table.key)
        keys = [row[0] for row in self._rows(f"{sql} LIMIT %s", [*params, limit])]
        if not keys:
            return 0
        one_of, given = self._one_of(keys, table.key)
        where = (f"{one_of} AND queue = %s AND {table.due} <= {self.now}", [*given, of])
        return self._update_unlocked(table.name, changes=("queue = %s", [queue]), where=where)

    def _wanted(self, claim: Claim) -> SQL:
        """Return what a claim wants of rows besides their queues and due times, after an AND."""
        where, params = [], []
        if claim.ids is not None:
            one_of, ids = self._one_of(claim.ids)
            where.append(one_of)
            params += ids
        if claim.skip_recent:
            where.append(f"created_at <= {self.now_plus}")
            params.append(-claim.skip_recent)
        if claim.exclude:
            one_of, ids = self._one_of(claim.exclude, claim.table.key)
            where.append(f"NOT ({one_of})")
            params += ids
        where.append(claim.state.value)
        params.append(claim.me)
        return "".join(f" AND {each}" for each in where), params

    def _branches(self, claim: Claim) -> list[SQL]:
        """Return the SELECT of each branch of a claim."""
        columns = self._columns([*claim.columns, claim.table.due, "locked_by"])
        columns = f"{columns}, {self.now}"
        until, (wanted, wanted_params) = self._until(claim.at), self._wanted(claim)
        table = claim.table
        if claim.ids is not None:
            sql = f"""SELECT {columns} FROM {self._table(table.name)}
                WHERE {table.due} <= {until[0]}{wanted} ORDER BY {table.order} LIMIT %s"""
            return [(sql, [*until[1], *wanted_params, len(claim.ids)])]
        found = []
        for branch in claim.branches:
            after = None if branch.since is None else (self.now_plus, [-branch.since])
            sql, params = self._due_first(
                table, branch.queue, columns, more=wanted, after=after, until=until
            )
            found.append((f"{sql} LIMIT %s", [*params, *wanted_params, branch.limit]))
        return found

    @property
    def _event_by_id(self) -> str:
        """Return the event table as ``e``, for an UPDATE by id."""
        return self.by_id.format(self._event)
