"""PostgreSQL: one statement per claim, array parameters and SKIP LOCKED."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar
from weakref import WeakSet

from django.db.backends.base.base import BaseDatabaseWrapper

from ..events import UNROUTED_LANE
from ..setting_rules import CENTURY
from .claim import COUNT_RESCUE
from .insert import Written, due_of_followers, places_of
from .postgresql_server import PostgreSQLServer
from .values import (
    DUE,
    EVENTS,
    INSTANTS,
    KEYED,
    PAYLOAD,
    QUEUE,
    SQL,
    Claim,
    Claimed,
    EachUpdate,
    Leases,
    Row,
    StreamQuery,
    StreamRows,
    claimed,
    instant,
    key_of,
)

MOST_BYTES = 2**31 - 1  # of payload text, where a claim has no limit
# A claim of events does not wait for the disk. If the server crashes and loses it, the rows are due
# again. A settle does wait, and flushes every claim before it.
UNFLUSHED = "(SELECT set_config('synchronous_commit', 'off', true)) unflushed"


class PostgreSQL(PostgreSQLServer):
    now = "statement_timestamp()"
    now_plus = "statement_timestamp() + %s * interval '1 second'"
    now_micros = "(extract(epoch FROM statement_timestamp()) * 1000000)::bigint"
    in_utc = "{} AT TIME ZONE 'UTC'"  # with USE_TZ=False, drivers would return local time
    shared_lock = " FOR SHARE"
    owned_by_key = " OFFSET 0"  # keeps the planner from making the subquery a join
    _read_committed: ClassVar[WeakSet[Any]] = WeakSet()  # driver connections at this level

    def claim(self, claim: Claim) -> Claimed:
        changes = f"""{COUNT_RESCUE}, locked_by = %s, locked_at = {self.now},
            {claim.table.due} = {self.now_plus}"""
        rows = self._lease_chosen(claim, (changes, [claim.me, claim.me, claim.lease]))
        rows.sort(key=lambda row: (row[-3], row[0]))
        return claimed(claim, rows, rows, _full(claim, rows))

    def _lease_chosen(self, claim: Claim, changes: SQL) -> list[Row]:
        """Change the rows that the claim chooses; return its columns of them, and TAIL."""
        table, (chosen, chosen_params) = claim.table, self._chosen(claim)
        sources = [] if self.connection.in_atomic_block else [UNFLUSHED]
        if _returns_old(self.connection):
            # The join takes a fifth longer with 500 rows, and 0.4 ms longer with one.
            given, old, params = "", "WITH (OLD AS before)", [*changes[1], *chosen_params]
            is_chosen = f"e.{table.key} = ANY(ARRAY(SELECT {table.key} FROM ({chosen}) due))"
        else:  # MATERIALIZED makes the planner obey the LIMIT
            given, old = f"WITH before AS MATERIALIZED ({chosen})", ""
            is_chosen = f"e.{table.key} = before.{table.key}"
            params = [*chosen_params, *changes[1]]
            sources.insert(0, "before")
        from_sources = f"FROM {', '.join(sources)}" if sources else ""
        columns = self._columns(claim.columns, "e.")
        return self._rows(
            f"""{given} UPDATE {self._table(table.name)} e SET {changes[0]}
            {from_sources} WHERE {is_chosen} RETURNING {old} {columns},
            {self._column(table.due, "before.")}, before.locked_by,
            {self.in_utc.format("e.locked_at")}""",
            params,
        )

    def _chosen(self, claim: Claim) -> SQL:
        """Return the query that locks the rows to claim: their keys, due times and owners."""
        table, until = claim.table, self._until(claim.at)
        name, columns = self._table(table.name), f"{table.key}, {table.due}, locked_by"
        wanted, params = self._wanted(claim)
        if claim.ids is not None:
            sql = f"""SELECT {columns} FROM {name} WHERE {table.due} <= {until[0]}{wanted}
                ORDER BY {table.order} FOR UPDATE SKIP LOCKED"""
            return sql, [*until[1], *params]
        branches, given = as_table(
            self.connection,
            ("text", "int", "float8", "int"),
            [
                (
                    each.queue,
                    each.limit,
                    CENTURY if each.since is None else each.since,
                    min(each.most_bytes or MOST_BYTES, MOST_BYTES),
                )
                for each in claim.branches
            ],
        )
        # Rows are compared, never due times alone, and ordered by queue, as the index is: a plan
        # that reads all queues is as slow as the longest of them.
        size = ", queue, octet_length(payload) AS size" if table is EVENTS else ""
        sql = f"""SELECT chosen.*, b.most_bytes
            FROM {branches} b (queue, n, age, most_bytes), LATERAL (
                SELECT {columns}{size} FROM {name}
                WHERE (queue, {table.due}) >= (b.queue, {self.now} - b.age * interval '1 second')
                AND (queue, {table.due}) <= (b.queue, {until[0]})
                AND {table.due} IS NOT NULL{wanted}
                ORDER BY queue, {table.order} LIMIT b.n FOR UPDATE SKIP LOCKED) chosen"""
        if table is EVENTS:  # a row is chosen while those before it have fewer bytes than allowed
            sql = f"""SELECT {columns} FROM (
                SELECT *, sum(size) OVER (PARTITION BY queue ORDER BY {table.order}
                    ROWS UNBOUNDED PRECEDING) - size AS before FROM ({sql}) locked) sized
                WHERE before < most_bytes"""
        return sql, [*given, *until[1], *params]

    def _column(self, name: str, of: str) -> str:
        return self.in_utc.format(f"{of}{name}") if name in (*INSTANTS, *DUE) else f"{of}{name}"

    def _update_unlocked(self, table: str, *, changes: SQL, where: SQL) -> int:
        name, key = self._table(table), key_of(table)
        return self._run(
            f"""WITH unlocked AS MATERIALIZED (
                SELECT {key} FROM {name} e WHERE {where[0]} FOR UPDATE SKIP LOCKED)
            UPDATE {name} e SET {changes[0]} FROM unlocked WHERE e.{key} = unlocked.{key}""",
            [*where[1], *changes[1]],
        )

    def _update_each(self, update: EachUpdate) -> SQL:
        rows = [*zip(*[each.values for each in update.given], strict=True)]
        row = f"({', '.join(f'%s::{each.kind}' for each in update.given)})"
        values = f"(VALUES {', '.join([row] * len(rows))})"
        return self._update_locked(update, (values, [*chain.from_iterable(rows)]), "FOR UPDATE")

    def _update_each_unlocked(self, update: EachUpdate) -> SQL:
        arrays = ", ".join(f"%s::{each.kind}[]" for each in update.given)
        # Numbers and instants in one text: the driver looks for quotes in each element of a list.
        values = [
            [*each.values] if each.kind == "text" else f"{{{','.join(map(str, each.values))}}}"
            for each in update.given
        ]
        return self._update_locked(update, (f"unnest({arrays})", values), "FOR UPDATE SKIP LOCKED")

    def _update_locked(self, update: EachUpdate, given: SQL, lock: str) -> SQL:
        table, columns, changes, where = update
        name, key = self._table(table), columns[0].name
        # LATERAL finds each by key: a join compared them with every stream, 150 ms for 400. No more
        # conditions at the end: the rows are locked, and a planner that expects few would scan. And
        # one more on what is locked, so that few are expected of it: a plan made for an empty table
        # joined many with all rows.
        sql = f"""WITH v AS MATERIALIZED (
                SELECT v.* FROM {given[0]} v ({", ".join(each.name for each in columns)}), LATERAL (
                    SELECT e.{key} FROM {name} e WHERE e.{key} = v.{key} AND {where[0]} {lock}
                ) locked WHERE locked.{key} = v.{key})
            UPDATE {name} e SET {changes} FROM v WHERE e.{key} = v.{key}"""
        return sql, [*given[1], *where[1]]

    def _in_queue(
        self, queue: str, *, column: str, after: SQL | None = None, until: SQL | None = None
    ) -> SQL:
        low, low_params = after or ("'-infinity'", [])
        high, high_params = until or ("'infinity'", [])
        sql = f"""(queue, {column}) >= (%s, {low}) AND (queue, {column}) <= (%s, {high})
            AND {column} IS NOT NULL"""
        return sql, [queue, *low_params, queue, *high_params]

    # One parameter for a list: parsing 500 took a tenth of a drain.

    def _one_of(self, keys: Collection[str], column: str = "id") -> SQL:
        return f"{column} = ANY(%s)", [text_array(keys)]

    def _any_of(self, leases: Leases) -> SQL:
        instants = {instant(each, self.connection) for each in {*leases.values()}}
        return "= ANY(%s::timestamptz[])", [[*instants]]

    @contextmanager
    def read_committed(self) -> Iterator[None]:
        outermost = not self.connection.in_atomic_block
        with super().read_committed():
            if outermost and self.connection.connection not in self._read_committed:
                # Before the transaction reads. Connections that begin with the level are known.
                if self._rows("SHOW transaction_isolation")[0][0] == "read committed":
                    self._read_committed.add(self.connection.connection)
                else:
                    self._run("SET TRANSACTION ISOLATION LEVEL READ COMMITTED", [])
            yield

    def _places(self, rows: Sequence[Written]) -> tuple[SQL, list[SQL]]:
        """Number a single event in the statement that inserts it."""
        own, in_lanes = places_of(rows)
        if in_lanes or not own or len(rows) > 1:
            return super()._places(rows)
        upsert, params = self._upsert(own, due=due_of_followers())
        return (f"WITH s AS ({upsert} RETURNING seq) ", params), [("(SELECT seq FROM s)", [])]

    def read_streams(self, read: StreamQuery) -> list[StreamRows]:
        # In one snapshot, but never in the claim's, which is older than its locks.
        statuses = "(0, 2, 3)" if read.dead_too else "(0, 2)"
        due = f" AND (status <> 2 OR deliver_at <= {self.now})" if read.only_due_retries else ""
        until = self._routed_until(f"'{UNROUTED_LANE}:' || s.key")
        leased_at, instants = self._any_of(read.streams)
        rows = self._rows(
            f"""SELECT s.stream, s.seq, {self.in_utc.format(self.now)},
                {self._columns(KEYED, "e.")}, e.routed_until
            FROM {self._stream} s LEFT JOIN LATERAL (
                SELECT {", ".join(KEYED)}, {until} AS routed_until FROM {self._event} e
                WHERE e.stream = s.stream AND status IN {statuses}{due} ORDER BY e.seq LIMIT %s
            ) e ON true
            WHERE s.stream = ANY(%s) AND s.locked_by = %s AND s.locked_at {leased_at}
            ORDER BY s.stream, e.seq""",
            [read.limit, [*read.streams], read.me, *instants],
        )
        found: dict[str, StreamRows] = {}
        for name, seq, now, *row in rows:
            stream = found.setdefault(name, StreamRows(name, seq, now))
            if row[0] is not None:
                stream.rows.append(tuple(row))
        return [*found.values()]

    def _released(self, statement: SQL, me: str, streams: Sequence[str]) -> set[str]:
        rows = self._rows(f"{statement[0]} RETURNING e.stream", statement[1])
        return {row[0] for row in rows}


def as_table(
    connection: BaseDatabaseWrapper, types: Sequence[str], rows: Sequence[Sequence[Any]]
) -> SQL:
    """Return SQL for a table of these rows, whose columns have these types."""
    if _returns_old(connection):
        # As many as the planner sees: with arrays, it planned each claim anew, for 0.3 ms.
        row = f"({', '.join([f'%s::{each}' for each in types])})"
        values = [value for each in rows for value in each]
        return f"(VALUES {', '.join([row] * len(rows))})", values
    # As many as the planner guesses: for a known limit of 500, it joined with a scan of the table.
    arrays = ", ".join([f"%s::{each}[]" for each in types])
    return f"unnest({arrays})", [[*column] for column in zip(*rows, strict=True)]


def _returns_old(connection: BaseDatabaseWrapper) -> bool:
    """Return whether an UPDATE can return what a row was before."""
    return bool(connection.pg_version >= 180000)  # type: ignore[attr-defined]


def _full(claim: Claim, rows: Sequence[Row]) -> set[str]:
    """Return the queues whose rows have all the bytes that the claim allows: more may be due."""
    left = {each.queue: each.most_bytes for each in claim.branches if each.most_bytes}
    # Most claims are far from it: a character has four bytes at most.
    if not left or 4 * sum(len(row[PAYLOAD]) for row in rows) < min(left.values()):
        return set()
    for row in rows:
        if row[QUEUE] in left:
            left[row[QUEUE]] -= len(row[PAYLOAD].encode())
    return {queue for queue, number in left.items() if number <= 0}


def text_array(texts: Collection[Any]) -> Any:
    """Return texts or numbers as an array literal, or as a list, of which drivers examine each."""
    joined = '","'.join(map(str, texts))
    if not texts or "\\" in joined or joined.count('"') > 2 * (len(texts) - 1):
        return [*texts]
    return f'{{"{joined}"}}'
