"""SQLite: one writer at a time; times are UTC text of 26 characters, by the host's clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from django.db import OperationalError

from ..clocks import monotonic
from ..events import UNROUTED_LANE
from .dialect import Dialect
from .values import DUE, EVENTS, INSTANTS, KEYED, SQL, EachUpdate, Row, StreamQuery, Table, marks

KEPT = 32  # compiled statements to cache; each list length needs one, and 500 ids take 0.1 MB
STEPS = 10_000  # of SQLite's machine, under a millisecond, between two looks at the clock


class SQLite(Dialect):
    """The clock is SQLite's own, so that all processes share it. Its resolution is 1 ms."""

    row_lock = ""
    now = "strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')"
    now_plus = "strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')"
    now_micros = (
        "(CAST(strftime('%%s', 'now') AS INTEGER) * 1000000 "
        "+ CAST(substr(strftime('%%f', 'now'), 4) AS INTEGER) * 1000)"
    )
    unindexed = "+"  # otherwise it reads the rows of all queues by an index of due times
    united, first_united = " UNION ALL SELECT * FROM ", "SELECT * FROM "

    def _column(self, name: str, of: str) -> str:
        # The plus keeps the driver from parsing times, most of which are never read.
        return f"+{of}{name}" if name in (*INSTANTS, *DUE) else super()._column(name, of)

    def _as_selected(self, table: Table, rows: Sequence[Row]) -> SQL:
        if table is not EVENTS:
            return super()._as_selected(table, rows)
        # With their attempts: a row may be retried within the same millisecond.
        by_attempts: dict[int, list[str]] = {}
        for row in rows:
            by_attempts.setdefault(row[1], []).append(row[0])
        sql = [f"id IN ({marks(ids)}) AND attempts = %s" for ids in by_attempts.values()]
        params = [value for spent, ids in by_attempts.items() for value in (*ids, spent)]
        return f"({' OR '.join(sql)})", params

    def _next_events(self, streams: Sequence[str], read: StreamQuery) -> list[Row]:
        # As one SELECT by stream, with fifty in a UNION, it was parsed for longer than it ran.
        due = f" AND (status <> 2 OR deliver_at <= {self.now})" if read.only_due_retries else ""
        one_of, names = self._one_of(streams, "s.stream")
        until = self._routed_until(f"'{UNROUTED_LANE}:' || s.key")
        # The index is partial: a query has to repeat its condition.
        return self._rows(
            f"""SELECT {self._columns(KEYED, "e.")}, {until}
            FROM {self._stream} s CROSS JOIN {self._event} e ON e.rowid IN (
                SELECT rowid FROM {self._event} WHERE stream = s.stream
                {"AND status IN (0, 2)" * (not read.dead_too)}
                AND status IN (0, 2, 3){due} ORDER BY seq LIMIT %s) WHERE {one_of}""",
            [read.limit, *names],
        )

    def _update_unlocked(self, table: str, *, changes: SQL, where: SQL) -> int:
        sql = f"UPDATE {self._table(table)} AS e SET {changes[0]} WHERE {where[0]}"
        return self._run(sql, [*changes[1], *where[1]])

    def _update_each(self, update: EachUpdate) -> SQL:
        (table, given, changes, where), key = update, update.given[0].name
        rows = [*zip(*[each.values for each in given], strict=True)]
        columns = ", ".join(f"column{n} AS {each.name}" for n, each in enumerate(given, 1))
        # Not WITH v AS (…): the driver counts rows only if a statement begins with UPDATE.
        values = ", ".join([f"({marks(given)})"] * len(rows))
        sql = f"""UPDATE {self._table(table)} AS e SET {changes}
            FROM (SELECT {columns} FROM (VALUES {values})) AS v
            WHERE e.{key} = v.{key} AND {where[0]}"""
        return sql, [*chain.from_iterable(rows), *where[1]]

    def _estimate(self) -> tuple[str, list[Any]]:
        table = self._event  # rowids are consecutive; deleted rows are before the first
        return f"SELECT (SELECT MAX(rowid) FROM {table}) - (SELECT MIN(rowid) FROM {table}) + 1", []

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        self.connection.ensure_connection()
        end, database = monotonic() + seconds, self.connection.connection
        database.set_progress_handler(lambda: monotonic() > end, STEPS)
        try:
            yield
        finally:
            database.set_progress_handler(None, STEPS)

    def is_conflict(self, error: BaseException) -> bool:
        return False  # there is one writer at a time

    def is_lock_wait(self, error: BaseException) -> bool:
        return isinstance(error, OperationalError) and "locked" in str(error)

    def is_missing_table(self, error: BaseException) -> bool:
        return isinstance(error, OperationalError) and "no such table" in str(error)

    def version_text(self) -> str:
        return ""

    def prepare_engine(self, settings: dict[str, Any], *, lock_wait: float) -> None:
        mine = {"timeout": lock_wait, "transaction_mode": "IMMEDIATE", "cached_statements": KEPT}
        settings["OPTIONS"] = {**settings.get("OPTIONS", {}), **mine}
