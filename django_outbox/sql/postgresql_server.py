"""PostgreSQL: questions to the server, engine connections, LISTEN and NOTIFY."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from .dialect import Dialect
from .statements import single_transaction

CONFLICTS = ("40001", "40P01")  # errors: a serialization failure, a deadlock
WAITED = ("55P03", "57014")  # errors: lock_timeout, and statement_timeout, which may be shorter
UNDEFINED_TABLE = "42P01"
PREPARE_AFTER = 3  # executions before a statement is prepared
# For single statements, and for threads that wait longer than the role's sessions may.
AUTOCOMMIT_LEVEL = r"-c default_transaction_isolation=read\ committed -c idle_session_timeout=0"
# A plan made for an empty table stays in use when the table is full, so it must suit both. A join
# must not read a whole index, even of a small table: while an old snapshot is open, it is long.
# Before PostgreSQL 18, these options add 10,000,000,000 to the cost of a plan that scans anyway.
# That would trigger JIT, hence jit=off: it took 50 to 90 ms for a heartbeat's three rows.
PLANS = (
    "-c enable_seqscan=off -c enable_bitmapscan=off -c enable_hashjoin=off -c enable_mergejoin=off "
    "-c jit=off"
)


class PostgreSQLServer(Dialect):
    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        name, is_inner = "statement_timeout", self.connection.in_atomic_block
        set_it = "SELECT set_config(%s, %s, true)"  # until the transaction ends
        with transaction.atomic(using=self.connection.alias):
            given = [name, name, str(int(seconds * 1000))]
            before = self._rows(set_it.replace("SELECT", "SELECT current_setting(%s),"), given)
            yield
            if is_inner:
                self._run(set_it, [name, before[0][0]])

    def _estimate(self) -> tuple[str, list[Any]]:
        sql = "SELECT reltuples::bigint FROM pg_class WHERE oid = to_regclass(%s)"
        return sql, [self._event]

    def is_conflict(self, error: BaseException) -> bool:
        return getattr(error.__cause__, "sqlstate", None) in CONFLICTS

    def is_lock_wait(self, error: BaseException) -> bool:
        return getattr(error.__cause__, "sqlstate", None) in WAITED

    def is_missing_table(self, error: BaseException) -> bool:
        return getattr(error.__cause__, "sqlstate", None) == UNDEFINED_TABLE

    def failing_isolation(self) -> str | None:
        # Inside a transaction, because psycopg sets the level when it begins one.
        with transaction.atomic(using=self.connection.alias):
            level = str(self._rows("SHOW transaction_isolation")[0][0]).upper()
        return None if level == "READ COMMITTED" else level

    def prepare_engine(self, settings: dict[str, Any], *, lock_wait: float) -> None:
        from django.db.backends.postgresql.psycopg_any import IsolationLevel, is_psycopg3

        options = {**settings.get("OPTIONS", {})}
        options.pop("pool", None)
        options["isolation_level"] = IsolationLevel.READ_COMMITTED  # in each BEGIN
        if not settings.get("DISABLE_SERVER_SIDE_CURSORS"):  # a transaction pooler takes no options
            most = max(int(lock_wait * 1000), 1)
            waits = f"-c lock_timeout={most} -c idle_in_transaction_session_timeout=10000"
            given = f"{options.get('options', '')} {waits} {AUTOCOMMIT_LEVEL} {PLANS}"
            options["options"] = given.strip()
            if is_psycopg3:  # parsed and planned once: halves the time of a claim of one row
                options.update(server_side_binding=True, prepare_threshold=PREPARE_AFTER)
        settings["OPTIONS"] = options

    def guard_engine(self) -> None:
        if self.connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
            self.connection.execute_wrappers.append(InReadCommitted())


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


def notify(connection: BaseDatabaseWrapper, channel: str) -> None:
    """Notify those that listen, now: a NOTIFY in a transaction would delay the writers' commits."""
    # A NOTIFY commits, but stores nothing. Not waiting for the WAL flush halves its time.
    ring = "SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, '')"
    with connection.cursor() as cursor:
        cursor.execute(ring, [channel])


def listen(connection: BaseDatabaseWrapper, channel: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"LISTEN {connection.ops.quote_name(channel)}")


def wait_for_notification(connection: BaseDatabaseWrapper, timeout: float) -> bool:
    """Wait up to ``timeout`` seconds for a notification; return whether one was received."""
    driver = connection.connection
    with connection.wrap_database_errors:
        if hasattr(driver, "notifies") and callable(driver.notifies):
            return bool([*driver.notifies(timeout=timeout, stop_after=1)])
        select.select([driver], [], [], timeout)  # psycopg2
        driver.poll()
        received, driver.notifies[:] = driver.notifies[:], []
        return bool(received)
