"""What every statement needs: the database's clock, the names of the tables, and the fence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ...conf import table_name
from ...events import stored_instant
from ..values import SQL, LeaseKind, to_database


class Statements(ABC):
    now: str  # SQL for the database's clock
    now_plus: str  # SQL for its clock plus %s seconds
    now_micros: str  # SQL for its clock in microseconds since 1970
    key: str = "key"  # the column's name, as SQL has to spell it
    # Start of an ORDER BY of one queue's rows, where the planner needs it to choose the index.
    by_queue: str = "queue, "
    owned_by_key: str = ""  # end of the fence's subquery, where the planner needs one

    def clock(self, connection: BaseDatabaseWrapper) -> datetime:
        """Return the database's current time, aware."""
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {self._in_utc(self.now)}", [])
            now = stored_instant(cursor.fetchone()[0])
        assert now is not None
        return now

    def version_text(self, connection: BaseDatabaseWrapper) -> str:
        """Return the version text that the server reports; empty where there is no server."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT VERSION()")
            return str(cursor.fetchone()[0])

    @abstractmethod
    def is_lock_wait(self, error: BaseException) -> bool:
        """Return whether a statement failed because it took too long, as a rule for a lock."""

    def _run(self, connection: BaseDatabaseWrapper, sql: str, params: Sequence[Any]) -> int:
        """Execute one statement; return how many rows it changed."""
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            return int(cursor.rowcount)

    def _table(self, connection: BaseDatabaseWrapper, name: str) -> str:
        return str(connection.ops.quote_name(table_name(name)))

    def _in_utc(self, instant: str) -> str:
        """Return the SQL that selects an instant, so that drivers return it in UTC."""
        return instant

    def _event(self, connection: BaseDatabaseWrapper) -> str:
        return self._table(connection, "outbox_event")

    def _stream(self, connection: BaseDatabaseWrapper) -> str:
        return self._table(connection, "outbox_stream")

    def _until(self, connection: BaseDatabaseWrapper, at: datetime | None) -> SQL:
        """Return until when rows are due: the database's now, or ``at`` instead."""
        return (self.now, []) if at is None else ("%s", [to_database(at, connection)])

    def _in_queue(
        self, queue: str, *, column: str, after: SQL | None = None, until: SQL | None = None
    ) -> SQL:
        """Return the condition of a queue's rows whose due time is in these bounds, both included.

        Order by queue and due time: together they are the index.
        """
        bounds = [(f"{column} >= ", after), (f"{column} <= ", until)]
        given = [(sign + each[0], each[1]) for sign, each in bounds if each is not None]
        params = [value for _, some in given for value in some]
        return " AND ".join(["queue = %s", *(sql for sql, _ in given)]), [queue, *params]

    def _fence(
        self,
        connection: BaseDatabaseWrapper,
        me: str,
        kind: LeaseKind = LeaseKind.ROW,
        attempts: int | None = None,
        *,
        of: str = "",
    ) -> tuple[str, list[Any]]:
        """Return the condition that ``me`` owns an unsettled row, and its parameters.

        A worker that has lost the lease changes nothing. With ``attempts``, a thread whose call was
        given up changes nothing either. ``of`` is the event table's alias.
        """
        event = of or self._event(connection)
        fence = f"{event}.status IN (0, 2) AND {event}.locked_by = %s"
        if (
            kind is LeaseKind.STREAM
        ):  # EXISTS, because a join would wait for streams that writers lock
            fence = (
                f"{event}.status IN (0, 2) AND EXISTS (SELECT 1 FROM {self._stream(connection)} "
                f"owned WHERE owned.stream = {event}.stream AND owned.locked_by = %s"
                f"{self.owned_by_key})"
            )
        if attempts is None:
            return fence, [me]
        return f"{fence} AND {event}.attempts = %s", [me, attempts]
