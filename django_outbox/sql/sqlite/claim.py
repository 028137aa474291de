"""SQLite: updates of leased rows. No row is ever locked, because there is one writer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..base.claim import EventLeases
from ..values import DUE, EVENTS, INSTANTS, SQL, Column, Row, Table, marks


class SQLiteEventLeases(EventLeases):
    unindexed = "+"  # otherwise it reads the rows of all queues by an index of due times
    united, first_united = " UNION ALL SELECT * FROM ", "SELECT * FROM "

    def _column(self, name: str, of: str) -> str:
        # The plus keeps the driver from parsing times, most of which are never read.
        return f"+{name}" if name in (*INSTANTS, *DUE) else super()._column(name, of)

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

    def _update_unlocked(self, table: str, *, changes: SQL, where: SQL) -> int:
        sql = f"UPDATE {self._table(table)} AS e SET {changes[0]} WHERE {where[0]}"
        return self._run(sql, [*changes[1], *where[1]])

    def _update_each(
        self,
        table: str,
        *,
        given: Sequence[Column],
        changes: str,
        where: SQL,
        skip_locked: bool = False,
    ) -> SQL:
        rows = [*zip(*[each.values for each in given], strict=True)]
        columns = ", ".join(f"column{n} AS {each.name}" for n, each in enumerate(given, 1))
        key = given[0].name
        # Not WITH v AS (…): the driver counts rows only if a statement begins with UPDATE.
        values = ", ".join([f"({marks(given)})"] * len(rows))
        sql = f"""UPDATE {self._table(table)} AS e SET {changes}
            FROM (SELECT {columns} FROM (VALUES {values})) AS v
            WHERE e.{key} = v.{key} AND {where[0]}"""
        return sql, [*chain.from_iterable(rows), *where[1]]
