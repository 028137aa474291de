"""What people ask of streams, by limited looks into the index: a backlog may be of any length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from .statements import Statements

# SQLite uses a partial index only where its condition stands word for word.
INDEXED = "status IN (0, 2, 3)"
TOGETHER = 48  # branches of one statement


class StreamLooks(Statements):
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

    def delete_streams(self, connection: BaseDatabaseWrapper, *, keys: Sequence[str]) -> int:
        """Delete streams that the caller has locked; return how many.

        Key by key: a list of them has MariaDB scan a small table, and wait for all its rows.
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
