"""PostgreSQL: one statement a claim, arrays, SKIP LOCKED."""

from __future__ import annotations

import select
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..outcomes import Decision
from .inserting import SQL, Written
from .numbering import Places, due_of_followers
from .optimistic import Optimistic
from .stream_leases import wanted
from .vocabulary import (
    INSTANTS,
    KEYED,
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

PREPARE_AFTER = 3  # executions of a statement
# A plan that was made while the table was empty is kept when it is not: it has to hold for both.
# Nor is any table so small that a join may read a whole index: beside an open snapshot it is long.
BY_INDEX = (
    "-c enable_seqscan=off -c enable_bitmapscan=off -c enable_hashjoin=off -c enable_mergejoin=off"
)


class PostgreSQL(Optimistic):
    now = "statement_timestamp()"
    plus = "statement_timestamp() + %s * interval '1 second'"
    micros = "(extract(epoch FROM statement_timestamp()) * 1000000)::bigint"
    bound = 500
    shared = " FOR SHARE"
    apart = " OFFSET 0"

    def _among(self, ids: Collection[str]) -> tuple[str, list[Any]]:
        return "event_id = ANY(%s)", [[*ids]]  # one parameter: parsing 500 cost a tenth of a drain

    def _places(
        self, connection: BaseDatabaseWrapper, rows: Sequence[Written]
    ) -> tuple[SQL, list[SQL]]:
        """Take the place of a single event in the statement that inserts it."""
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
        # Inside a transaction, for psycopg sets the level as it begins one.
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            level = str(cursor.fetchone()[0]).upper()
        return None if level == "READ COMMITTED" else level

    def claim(self, connection: BaseDatabaseWrapper, claim: Claim) -> Claimed:
        """Lease rows in one statement; MATERIALIZED holds the planner to the LIMIT."""
        table = self._table(connection)
        where, where_params = self._where(connection, claim)
        set_sql, set_params = self._lease(claim)
        found = ", ".join(_utc(f"e.{name}") if name in INSTANTS else f"e.{name}"
                          for name in claim.columns)  # fmt: skip
        with connection.cursor() as cursor:
            cursor.execute(
                f"WITH due AS MATERIALIZED (SELECT event_id, available_at AS due_at, "
                f"locked_by AS was FROM {table} WHERE {where} "
                "ORDER BY available_at, event_id LIMIT %s FOR UPDATE SKIP LOCKED) "
                f"UPDATE {table} e SET {set_sql} FROM due WHERE e.event_id = due.event_id "
                f"RETURNING {found}, {_utc('due.due_at')}, due.was, {_utc('e.locked_at')}",
                [*where_params, claim.limit, *set_params],
            )
            rows = cursor.fetchall()
        rows.sort(key=lambda row: (row[-3], row[0]))
        return claimed(rows, seen=rows, limit=claim.limit, due=-3)

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
        """Read in one snapshot, but never in the claim's: that is older than its locks."""
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
                # Each by its key: joined, they were compared with every stream, 150 ms for 400.
                "WITH given AS MATERIALIZED (SELECT mine.key, mine.seq, v.delay FROM "
                "unnest(%s::text[], %s::bigint[], %s::float8[]) v (key, seq, delay), "
                f"LATERAL (SELECT s.key, s.seq FROM {table} s WHERE s.key = v.key "
                "AND s.seq = COALESCE(v.seq, s.seq) AND s.locked_by = %s "
                "FOR UPDATE SKIP LOCKED) mine) "
                f"UPDATE {table} s SET due_at = {self.now} + given.delay * interval '1 second', "
                # No more conditions: the row is locked, and who guesses it rare scans for it.
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
    ) -> int:
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
            f"AND {self._fence(connection, hold, of='e')}",
            [value for each in decisions for value in settle_values(*each)] + [me],
        )

    notifies = True

    def notify(self, connection: BaseDatabaseWrapper, channel: str) -> None:
        # A ring commits, but has nothing to keep: not to wait for its flush halves its time.
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
            if outermost and connection.settings_dict["OPTIONS"].get("isolation_level"):
                with connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            yield

    def prepare_engine(self, settings: dict[str, Any], *, lock_wait: float) -> None:
        options = {**settings.get("OPTIONS", {})}
        options.pop("pool", None)
        options.pop("isolation_level", None)  # READ COMMITTED is the default
        if not settings.get("DISABLE_SERVER_SIDE_CURSORS"):  # a transaction pooler takes no options
            waits = f"-c lock_timeout={_ms(lock_wait)} -c idle_in_transaction_session_timeout=10000"
            options["options"] = f"{options.get('options', '')} {waits} {BY_INDEX}".strip()
            from django.db.backends.postgresql.psycopg_any import is_psycopg3

            if is_psycopg3:  # parsed and planned once: half the time of a claim that finds one row
                options.update(server_side_binding=True, prepare_threshold=PREPARE_AFTER)
        settings["OPTIONS"] = options


def _ms(seconds: float) -> int:
    return max(int(seconds * 1000), 1)


def _utc(column: str) -> str:
    """Read an instant without a time zone: with USE_TZ=False the driver would answer local time."""
    return f"{column} AT TIME ZONE 'UTC'"
