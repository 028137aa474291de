"""What every group of statements builds on: the clock, the table, one way to run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import table_name
from ..events import stored_instant
from .vocabulary import Hold, marks


class Statements:
    now = "CURRENT_TIMESTAMP"
    plus = "CURRENT_TIMESTAMP + %s * INTERVAL '1' SECOND"  # seconds from now
    micros = "CAST(EXTRACT(EPOCH FROM CURRENT_TIMESTAMP) * 1000000 AS BIGINT)"  # since 1970
    bound = 100  # rows per statement where a CASE per row makes it quadratic
    apart = ""  # ends a subquery that the planner is not to turn into a join

    def clock(self, connection: BaseDatabaseWrapper) -> datetime:
        """Return the database's now, aware."""
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {self.now}", [])
            now = stored_instant(cursor.fetchone()[0])
        assert now is not None
        return now

    def _among(self, ids: Collection[str]) -> tuple[str, list[Any]]:
        """The condition that a row is one of these, and its parameters."""
        return f"event_id IN ({marks(ids)})", [*ids]

    def _run(self, connection: BaseDatabaseWrapper, sql: str, params: Sequence[Any]) -> int:
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            return int(cursor.rowcount)

    def _update_unlocked(
        self, connection: BaseDatabaseWrapper, name: str, assignments: str, values: Sequence[Any],
        where: str, params: Sequence[Any],
    ) -> int:  # fmt: skip
        """Change rows found by primary keys, but those that others have locked; return how many.

        In one statement: a process that is stopped between two keeps its locks, and whatever waits
        for one of them waits for the process.
        """
        sql = f"UPDATE {self._by_key(connection, name)} SET {assignments} WHERE {where}"
        return self._run(connection, sql, [*values, *params])

    def _skip(self, connection: BaseDatabaseWrapper) -> str:
        """What makes a SELECT lock its rows and pass over locked ones, if the database can."""
        return " FOR UPDATE SKIP LOCKED" * connection.features.has_select_for_update_skip_locked

    def _primary_key(self, connection: BaseDatabaseWrapper, name: str) -> str:
        return self._streams(connection)[1] if name == "outbox_stream" else "event_id"

    def _table(self, connection: BaseDatabaseWrapper, name: str = "outbox_event") -> str:
        return str(connection.ops.quote_name(table_name(name)))

    def _streams(self, connection: BaseDatabaseWrapper) -> tuple[str, str]:
        """The table of streams, and its primary key, whose name is a word of SQL."""
        name = connection.ops.quote_name
        return str(name(table_name("outbox_stream"))), str(name("key"))

    def _by_stream(self, connection: BaseDatabaseWrapper) -> str:
        """The table in a SELECT of a stream's rows."""
        return self._table(connection)

    def _stream_by_due(self, connection: BaseDatabaseWrapper) -> str:
        """The streams in a statement by due times."""
        return self._streams(connection)[0]

    def _fence(self, connection: BaseDatabaseWrapper, hold: Hold, of: str = "") -> str:
        """The condition that a row is mine and unsettled: a stale worker changes nothing.

        One table and EXISTS: a joined UPDATE waited for business transactions on MariaDB.
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

    def _delete_by_key(self, connection: BaseDatabaseWrapper, name: str = "outbox_event") -> str:
        """The beginning of a DELETE by primary keys."""
        return f"DELETE FROM {self._table(connection, name)}"

    def _by_key(self, connection: BaseDatabaseWrapper, name: str = "outbox_event") -> str:
        """The table in an UPDATE by primary keys."""
        return self._table(connection, name)
