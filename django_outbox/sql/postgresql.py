"""SQL for PostgreSQL: one statement per claim, array parameters and SKIP LOCKED."""

from __future__ import annotations

import select
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..listeners.outcomes import Decision
from .dialect import Dialect
from .inserting import SQL, Written
from .numbering import Places, due_of_followers
from .pausing import single_transaction
from .stream_leases import wanted
from .values import (
    INSTANTS,
    KEYED,
    AsRead,
    Claim,
    Claimed,
    Found,
    Hold,
    Read,
    Release,
    StreamClaim,
    claimed,
    settle_values,
)

PREPARE_AFTER = 3  # executions before a statement is prepared
AUTOCOMMIT_LEVEL = r"-c default_transaction_isolation=read\ committed"  # for single statements
# A plan made for an empty table stays in use when the table is full, so it must suit both. A join
# must not read a whole index, even of a small table: while an old snapshot is open, it is long.
# Before PostgreSQL 18, these options add 10,000,000,000 to the cost of a plan that scans anyway.
# That would trigger JIT, hence jit=off: it took 50 to 90 ms for a heartbeat's three rows.
PLANS = (
    "-c enable_seqscan=off -c enable_bitmapscan=off -c enable_hashjoin=off -c enable_mergejoin=off "
    "-c jit=off"
)


class PostgreSQL(Dialect):
    now = "statement_timestamp()"
    plus = "statement_timestamp() + %s * interval '1 second'"
    micros = "(extract(epoch FROM statement_timestamp()) * 1000000)::bigint"
    bound = 500
    shared = " FOR SHARE"
    apart = " OFFSET 0"

    def __init__(self) -> None:
        self._read_committed: WeakSet[Any] = WeakSet()  # driver connections at this level

    def _among(self, ids: Collection[str]) -> tuple[str, list[Any]]:
        return "event_id = ANY(%s)", [[*ids]]  # one parameter: parsing 500 took a tenth of a drain

    def _places(
        self, connection: BaseDatabaseWrapper, rows: Sequence[Written]
    ) -> tuple[SQL, list[SQL]]:
        """Number a single event in the statement that inserts it."""
        key = rows[0][0].key
        if key is None or len(rows) > 1:
            return super()._places(connection, rows)
        upsert, params = self._upsert(connection, [(key, 1)], due=due_of_followers())
        return (f"WITH s AS ({upsert} RETURNING seq) ", params), [("(SELECT seq FROM s)", [])]

    def _number(self, connection: BaseDatabaseWrapper, places: Places) -> Mapping[str, int]:
        upsert, params = self._upsert(connection, places, due=due_of_followers())
        _, key = self._streams(connection)
        with connection.cursor() as cursor:
            cursor.execute(f"{upsert} RETURNING {key}, seq", params)
            return dict(cursor.fetchall())

    def estimated_rows(self, connection: BaseDatabaseWrapper) -> int:
        sql = "SELECT reltuples::bigint FROM pg_class WHERE oid = to_regclass(%s)"
        return self._estimate(connection, sql, [self._table(connection)])

    def failing_isolation(self, connection: BaseDatabaseWrapper) -> str | None:
        # Inside a transaction, because psycopg sets the level when it begins one.
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            level = str(cursor.fetchone()[0]).upper()
        return None if level == "READ COMMITTED" else level

    def claim(self, connection: BaseDatabaseWrapper, claim: Claim) -> Claimed:
        """Lease rows in one statement; MATERIALIZED makes the planner obey the LIMIT."""
        table = self._table(connection)
        where, where_params = self._where(connection, claim)
        set_sql, set_params = self._lease(claim)
        found = ", ".join(_utc(f"e.{name}") if name in INSTANTS else f"e.{name}"
                          for name in claim.columns)  # fmt: skip
        cut, of, size, most = "", "due", "", [claim.most_bytes] if claim.most_bytes else []
        count = ""
        if most:  # include a row while those before it have fewer bytes
            size, count = ", octet_length(payload) AS size", ", (SELECT count(*) FROM due)"
            cut = (
                ", cut AS MATERIALIZED (SELECT event_id, due_at, was FROM (SELECT *, sum(size) "
                "OVER (ORDER BY due_at, event_id ROWS UNBOUNDED PRECEDING) - size AS before "
                "FROM due) sized WHERE before < %s)"
            )
            of = "cut"
        with connection.cursor() as cursor:
            cursor.execute(
                f"WITH due AS MATERIALIZED (SELECT event_id, available_at AS due_at, "
                f"locked_by AS was{size} FROM {table} WHERE {where} "
                f"ORDER BY available_at, event_id LIMIT %s FOR UPDATE SKIP LOCKED){cut} "
                f"UPDATE {table} e SET {set_sql} FROM {of} due WHERE e.event_id = due.event_id "
                f"RETURNING {found}, {_utc('due.due_at')}, due.was, {_utc('e.locked_at')}"
                f"{count}",
                [*where_params, claim.limit, *most, *set_params],
            )
            rows = cursor.fetchall()
        limit = claim.limit
        if most and rows:
            limit = len(rows) if rows[0][-1] > len(rows) else limit
            rows = [row[:-1] for row in rows]
        rows.sort(key=lambda row: (row[-3], row[0]))
        return claimed(rows, seen=rows, limit=limit, due=-3)

    def _update_unlocked(
        self, connection: BaseDatabaseWrapper, name: str, assignments: str, values: Sequence[Any],
        where: str, params: Sequence[Any],
    ) -> int:  # fmt: skip
        key, table = self._primary_key(connection, name), self._table(connection, name)
        sql = (
            f"WITH unlocked AS MATERIALIZED (SELECT {key} AS id FROM {table} WHERE {where}"
            f"{self._skip(connection)}) UPDATE {table} SET {assignments} "
            f"FROM unlocked WHERE {table}.{key} = unlocked.id"
        )
        return self._run(connection, sql, [*params, *values])

    def claim_streams(self, connection: BaseDatabaseWrapper, claim: StreamClaim) -> Claimed:
        streams, _ = self._streams(connection)
        where, params = self._due_streams(connection, claim)
        with connection.cursor() as cursor:
            cursor.execute(
                f"WITH due AS MATERIALIZED (SELECT key, due_at, locked_by AS was FROM {streams} "
                f"WHERE {where} ORDER BY due_at LIMIT %s FOR UPDATE SKIP LOCKED) "
                f"UPDATE {streams} s SET due_at = {self.plus}, locked_by = %s, "
                f"locked_at = {self.now} FROM due WHERE s.key = due.key "
                f"RETURNING s.key, due.was, {_utc('due.due_at')}, {_utc('s.locked_at')}",
                [*params, claim.limit, claim.lease, claim.me],
            )
            rows = sorted(cursor.fetchall(), key=lambda row: row[2])
        found = [row[:2] for row in rows]
        return claimed(found, seen=rows, limit=claim.limit, due=2)

    def read_streams(self, connection: BaseDatabaseWrapper, read: Read) -> list[Found]:
        """Read in one snapshot, but never in the claim's, which is older than its locks."""
        streams, _ = self._streams(connection)
        columns = ", ".join(KEYED)
        instants = ", ".join(_utc(f"e.{name}") if name in INSTANTS else f"e.{name}"
                             for name in KEYED)  # fmt: skip
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT s.key, s.seq, {_utc(self.now)}, {instants} "
                f"FROM {streams} s LEFT JOIN LATERAL "
                f"(SELECT {columns} FROM {self._table(connection)} e WHERE e.key = s.key "
                f"AND {wanted(read, self.now)} ORDER BY e.seq LIMIT %s) e ON true "
                "WHERE s.key = ANY(%s) AND s.locked_by = %s ORDER BY s.key, e.seq",
                [read.limit, [*read.keys], read.me],
            )
            rows = cursor.fetchall()
        found: dict[str, Found] = {}
        for key, seq, now, *row in rows:
            stream = found.setdefault(key, Found(key, seq, now))
            if row[0] is not None:
                stream.rows.append(tuple(row))
        return [*found.values()]

    def _release_streams(
        self, connection: BaseDatabaseWrapper, me: str, streams: Sequence[Release]
    ) -> set[str]:
        table, _ = self._streams(connection)
        with connection.cursor() as cursor:
            cursor.execute(
                # Find each by key: a join compared them with every stream, 150 ms for 400.
                "WITH given AS MATERIALIZED (SELECT mine.key, mine.seq, v.delay FROM "
                "unnest(%s::text[], %s::bigint[], %s::float8[]) v (key, seq, delay), "
                f"LATERAL (SELECT s.key, s.seq FROM {table} s WHERE s.key = v.key "
                "AND s.seq = COALESCE(v.seq, s.seq) AND s.locked_by = %s "
                "FOR UPDATE SKIP LOCKED) mine) "
                f"UPDATE {table} s SET due_at = {self.now} + given.delay * interval '1 second', "
                # No more conditions: the row is locked, and a planner that expects few would scan.
                f"locked_by = NULL, locked_at = {self.now} FROM given WHERE s.key = given.key "
                "RETURNING s.key",
                [
                    [each.key for each in streams], [each.seq for each in streams],
                    [each.delay for each in streams], me,
                ],
            )  # fmt: skip
            return {row[0] for row in cursor.fetchall()}

    def _settle(
        self,
        connection: BaseDatabaseWrapper,
        me: str,
        decisions: Sequence[tuple[str, Decision]],
        hold: Hold,
        as_read: AsRead | None,
    ) -> int:
        same, read = self._same(as_read, of="e.")
        row = "(%s, %s::smallint, %s::int, %s::float8, %s::text, %s::text)"
        return self._run(
            connection,
            "WITH v (event_id, status, spent, delay, error, progress) AS "
            f"(VALUES {', '.join([row] * len(decisions))}) "
            f"UPDATE {self._table(connection)} e SET status = v.status, "
            "attempts = e.attempts + v.spent, rescues = 0, "
            f"{hold.value} = {self.now} + v.delay * interval '1 second', "
            f"done_at = CASE WHEN v.delay IS NULL THEN {self.now} END, "
            "last_error = COALESCE(v.error, e.last_error), "
            "progress = COALESCE(v.progress, e.progress), locked_by = NULL, locked_at = NULL "
            f"FROM v WHERE e.event_id = v.event_id "
            f"AND {self._fence(connection, hold, of='e')}{same}",
            [value for each in decisions for value in settle_values(*each)] + [me, *read],
        )

    def notify(self, connection: BaseDatabaseWrapper, channel: str) -> None:
        # A NOTIFY commits, but stores nothing. Not waiting for the WAL flush halves its time.
        ring = "SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, '')"
        with connection.cursor() as cursor:
            cursor.execute(ring, [channel])

    def listen(self, connection: BaseDatabaseWrapper, channel: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"LISTEN {connection.ops.quote_name(channel)}")

    def heard(self, connection: BaseDatabaseWrapper, timeout: float) -> bool:
        driver = connection.connection
        with connection.wrap_database_errors:
            if hasattr(driver, "notifies") and callable(driver.notifies):
                heard = [*driver.notifies(timeout=timeout, stop_after=1)]
                return bool(heard)
            select.select([driver], [], [], timeout)  # psycopg2
            driver.poll()
            heard, driver.notifies[:] = driver.notifies[:], []
            return bool(heard)

    @contextmanager
    def read_committed(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        outermost = not connection.in_atomic_block
        with transaction.atomic(using=connection.alias):
            if outermost and connection.connection not in self._read_committed:
                self._make_read_committed(connection)
            yield

    def _make_read_committed(self, connection: BaseDatabaseWrapper) -> None:
        """Set the level before the transaction reads; remember connections that begin with it."""
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            if cursor.fetchone()[0] == "read committed":
                self._read_committed.add(connection.connection)
            else:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def prepare_engine(self, settings: dict[str, Any], *, lock_wait: float) -> None:
        from django.db.backends.postgresql.psycopg_any import IsolationLevel, is_psycopg3

        options = {**settings.get("OPTIONS", {})}
        options.pop("pool", None)
        options["isolation_level"] = IsolationLevel.READ_COMMITTED  # in each BEGIN
        if not settings.get("DISABLE_SERVER_SIDE_CURSORS"):  # a transaction pooler takes no options
            waits = f"-c lock_timeout={_ms(lock_wait)} -c idle_in_transaction_session_timeout=10000"
            given = f"{options.get('options', '')} {waits} {AUTOCOMMIT_LEVEL} {PLANS}"
            options["options"] = given.strip()
            if is_psycopg3:  # parsed and planned once: halves the time of a claim of one row
                options.update(server_side_binding=True, prepare_threshold=PREPARE_AFTER)
        settings["OPTIONS"] = options

    def guard_engine(self, connection: BaseDatabaseWrapper) -> None:
        if connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
            connection.execute_wrappers.append(InReadCommitted())


class InReadCommitted:
    """Runs a pooled connection's single statements in transactions if its default is stricter.

    A transaction pooler shares sessions, so a connection cannot set their isolation level, neither
    at the start nor later. The default is queried once for each engine connection.
    """

    def __init__(self) -> None:
        self._is_stricter: bool | None = None

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        connection = context["connection"]
        if connection.in_atomic_block or not connection.get_autocommit():
            return execute(sql, params, many, context)
        if self._is_stricter is None:
            with connection.wrap_database_errors, connection.connection.cursor() as cursor:
                cursor.execute("SHOW default_transaction_isolation")
                self._is_stricter = cursor.fetchone()[0] != "read committed"
        if not self._is_stricter:
            return execute(sql, params, many, context)
        with single_transaction(connection):
            return execute(sql, params, many, context)


def _ms(seconds: float) -> int:
    return max(int(seconds * 1000), 1)


def _utc(column: str) -> str:
    """Return SQL for an instant without time zone: with USE_TZ=False drivers return local time."""
    return f"{column} AT TIME ZONE 'UTC'"
