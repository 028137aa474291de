"""Limited index queries about streams and dead events, for the admin and commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from .statements import Statements

# SQLite uses a partial index only if a query repeats its condition word for word.
INDEXED = "status IN (0, 2, 3)"
TOGETHER = 48  # UNION branches per statement


class InspectionQueries(Statements):
    def heads(
        self, connection: BaseDatabaseWrapper, *, keys: Sequence[str], statuses: Sequence[int]
    ) -> dict[str, str]:
        """Return the id of each stream's first event that has one of these statuses."""
        _, key = self._streams(connection)
        conditions = self._conditions(statuses)
        look = (
            f"SELECT * FROM (SELECT {key}, seq, event_id FROM {self._table(connection)} "
            f"WHERE {key} = %s AND {{}} ORDER BY seq LIMIT 1) head"
        )
        first: dict[str, tuple[int, str]] = {}
        for found, seq, event_id in self._look_at_each(
            connection, keys, [look.format(each) for each in conditions]
        ):
            first[found] = min(first.get(found, (seq, event_id)), (seq, event_id))
        return {found: event_id for found, (_, event_id) in first.items()}

    def backlogs(
        self, connection: BaseDatabaseWrapper, *, keys: Sequence[str], most: int
    ) -> dict[str, int]:
        """Count each stream's unsettled events, up to ``most``."""
        _, key = self._streams(connection)
        look = (
            f"SELECT MAX({key}), COUNT(*) FROM (SELECT {key} FROM {self._table(connection)} "
            f"WHERE {key} = %s AND status IN (0, 2) AND {INDEXED} LIMIT {int(most)}) backlog"
        )
        found = dict(self._look_at_each(connection, keys, [look]))
        return {each: found.get(each, 0) for each in keys}

    def waiting(
        self, connection: BaseDatabaseWrapper, *, keys: Sequence[str], most: int
    ) -> list[str]:
        """Return the ids of the first unsettled events of each stream, at most ``most`` of each."""
        _, key = self._streams(connection)
        looks = [
            f"SELECT * FROM (SELECT seq, event_id FROM {self._table(connection)} WHERE {key} = %s "
            f"AND {each} ORDER BY seq LIMIT {int(most)}) waiting"
            for each in self._conditions([0, 2])
        ]
        return [event_id for _, event_id in self._look_at_each(connection, keys, looks)]

    def dead(
        self, connection: BaseDatabaseWrapper, *, span: tuple[str | None, str | None], most: int
    ) -> list[str]:
        """Return the ids of the newest dead events within a span of ids, both ends included."""
        bounds = zip((">=", "<="), span, strict=True)
        given = [(f"event_id {sign} %s", each) for sign, each in bounds if each is not None]
        looks = [
            f"SELECT * FROM (SELECT event_id FROM {self._by_death(connection)} "
            f"WHERE {' AND '.join([each, *(sql for sql, _ in given)])} "
            f"ORDER BY event_id DESC LIMIT {int(most)}) dead"
            for each in self._deaths(connection)
        ]
        with connection.cursor() as cursor:
            cursor.execute(" UNION ALL ".join(looks), [each for _, each in given] * len(looks))
            return sorted((each for (each,) in cursor.fetchall()), reverse=True)[:most]

    def lately_dead(
        self, connection: BaseDatabaseWrapper, *, most: int, among: int
    ) -> tuple[list[str], bool]:
        """Return the ids of the newest dead events, and whether all events were searched.

        If no index finds those with a key, search only the newest ``among`` of all events.
        """
        return self.dead(connection, span=(None, None), most=most), True

    def backlog_by_type(
        self, connection: BaseDatabaseWrapper, *, most: int
    ) -> list[tuple[str, str, int, Any]]:
        """Count the ``most`` events due first: return type, state, count and oldest due time."""
        state = (
            f"CASE WHEN available_at <= {self.now} THEN 'due' WHEN locked_by IS NOT NULL "
            "THEN 'held' WHEN status = 2 THEN 'retrying' ELSE 'scheduled' END"
        )
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT event_type, {state} AS state, COUNT(*), MIN(available_at) FROM "
                f"(SELECT event_type, available_at, locked_by, status "
                f"FROM {self._table(connection)} WHERE available_at IS NOT NULL "
                f"ORDER BY available_at LIMIT {int(most)}) waiting GROUP BY event_type, state",
                [],
            )
            return list(cursor.fetchall())

    def _by_death(self, connection: BaseDatabaseWrapper) -> str:
        """Return the table, with any index hint, for a SELECT of dead events by their index."""
        return self._table(connection)

    def _deaths(self, connection: BaseDatabaseWrapper) -> Sequence[str]:
        return ["status = 3"]

    def estimated_rows(self, connection: BaseDatabaseWrapper) -> int:
        """Return the approximate number of events by the database's statistics; 0: unknown."""
        return 0

    def _estimate(self, connection: BaseDatabaseWrapper, sql: str, params: Sequence[Any]) -> int:
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            row = cursor.fetchone()
        return max(int(row[0] or 0), 0) if row else 0

    def delete_streams(self, connection: BaseDatabaseWrapper, *, keys: Sequence[str]) -> int:
        """Delete streams that the caller has locked; return how many.

        Delete key by key: with a list, MariaDB scans a small table and waits for all its rows.
        """
        streams, key = self._streams(connection)
        sql = f"DELETE FROM {streams} WHERE {key} = %s"
        return sum(self._run(connection, sql, [each]) for each in keys)

    def _conditions(self, statuses: Sequence[int]) -> list[str]:
        return [f"status IN ({', '.join(str(int(each)) for each in statuses)}) AND {INDEXED}"]

    def _look_at_each(
        self, connection: BaseDatabaseWrapper, keys: Sequence[str], looks: Sequence[str]
    ) -> Iterator[tuple[Any, ...]]:
        at_once = max(TOGETHER // len(looks), 1)
        for start in range(0, len(keys), at_once):
            some = keys[start : start + at_once]
            with connection.cursor() as cursor:
                cursor.execute(
                    " UNION ALL ".join([*looks] * len(some)), [key for key in some for _ in looks]
                )
                yield from cursor.fetchall()
