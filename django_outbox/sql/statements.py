"""Base class of the SQL statements: clock, table names, index hints, common conditions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import table_name
from ..events import stored_instant
from .values import AsRead, Hold, marks


class Statements:
    now: str  # SQL for the database's clock
    plus: str  # SQL for its clock plus %s seconds
    micros: str  # SQL for its clock in microseconds since 1970
    bound = 100  # rows per statement, where a CASE per row makes the cost quadratic
    apart = ""  # SQL at the end of a subquery that keeps the planner from making it a join

    def clock(self, connection: BaseDatabaseWrapper) -> datetime:
        """Return the database's current time, aware."""
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {self.now}", [])
            now = stored_instant(cursor.fetchone()[0])
        assert now is not None
        return now

    def _among(self, ids: Collection[str]) -> tuple[str, list[Any]]:
        """Return the condition that a row is one of these, and its parameters."""
        return f"event_id IN ({marks(ids)})", [*ids]

    def version_text(self, connection: BaseDatabaseWrapper) -> str:
        """Return the version text that the server reports; empty where there is no server."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT VERSION()")
            return str(cursor.fetchone()[0])

    def _run(self, connection: BaseDatabaseWrapper, sql: str, params: Sequence[Any]) -> int:
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            return int(cursor.rowcount)

    def _update_unlocked(
        self, connection: BaseDatabaseWrapper, name: str, assignments: str, values: Sequence[Any],
        where: str, params: Sequence[Any],
    ) -> int:  # fmt: skip
        """Update rows by primary key, except those that others have locked; return how many.

        Use one statement. A process stopped between two would keep its locks, and block every
        session that waits for one of them.
        """
        sql = f"UPDATE {self._by_key(connection, name)} SET {assignments} WHERE {where}"
        return self._run(connection, sql, [*values, *params])

    def _skip(self, connection: BaseDatabaseWrapper) -> str:
        """Return the clause that locks a SELECT's rows and skips locked ones, if supported."""
        return " FOR UPDATE SKIP LOCKED" * connection.features.has_select_for_update_skip_locked

    def _primary_key(self, connection: BaseDatabaseWrapper, name: str) -> str:
        return self._streams(connection)[1] if name == "outbox_stream" else "event_id"

    def _table(self, connection: BaseDatabaseWrapper, name: str = "outbox_event") -> str:
        return str(connection.ops.quote_name(table_name(name)))

    def _streams(self, connection: BaseDatabaseWrapper) -> tuple[str, str]:
        """Return the stream table and its primary key, both quoted: "key" is an SQL keyword."""
        name = connection.ops.quote_name
        return str(name(table_name("outbox_stream"))), str(name("key"))

    def _by_stream(self, connection: BaseDatabaseWrapper) -> str:
        """Return the event table, with any index hint, for a SELECT of a stream's rows."""
        return self._table(connection)

    def _stream_by_due(self, connection: BaseDatabaseWrapper) -> str:
        """Return the stream table, with any index hint, for a statement by due time."""
        return self._streams(connection)[0]

    def _fence(self, connection: BaseDatabaseWrapper, hold: Hold, of: str = "") -> str:
        """Return the condition that the worker owns an unsettled row: a stale one changes nothing.

        Use EXISTS, not a join: on MariaDB a joined UPDATE waited for business transactions.
        """
        table = of or self._table(connection)
        unsettled = f"{table}.status IN (0, 2)"
        if hold is Hold.ROW:
            return f"{table}.locked_by = %s AND {unsettled}"
        stream, key = self._streams(connection)
        return (
            f"{unsettled} AND EXISTS (SELECT 1 FROM {stream} owned "
            f"WHERE owned.{key} = {table}.{key} AND owned.locked_by = %s{self.apart})"
        )

    def _same(self, as_read: AsRead | None, of: str = "") -> tuple[str, list[Any]]:
        """Return the condition, to add to a fence, that the row is as read, and its parameters."""
        if as_read is None:
            return "", []
        attempts, progress = as_read
        if progress is None:
            return f" AND {of}attempts = %s AND {of}progress IS NULL", [attempts]
        return f" AND {of}attempts = %s AND {of}progress = %s", [attempts, progress]

    def _delete_by_key(self, connection: BaseDatabaseWrapper, name: str = "outbox_event") -> str:
        """Return the start of a DELETE by primary keys."""
        return f"DELETE FROM {self._table(connection, name)}"

    def _by_key(self, connection: BaseDatabaseWrapper, name: str = "outbox_event") -> str:
        """Return the table, with any index hint, for an UPDATE by primary keys."""
        return self._table(connection, name)
