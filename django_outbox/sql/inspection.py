"""Limited index queries about queues, streams and dead events, for the admin and commands."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, NamedTuple

from .claim import EventLeases
from .values import EVENTS, STREAMS, Row, seconds_between, to_database

# SQLite uses a partial index only if a query repeats its condition word for word.
INDEXED = "status IN (0, 2, 3)"


class QueueBacklog(NamedTuple):
    """What is due in a queue; the counts stop at a limit."""

    events: int  # without a key
    streams: int
    oldest_age: float  # seconds that the first of them has been due


class Inspection(EventLeases):
    def heads(self, *, streams: Sequence[str], statuses: Sequence[int]) -> dict[str, str]:
        """Return the id of each stream's first event that has one of these statuses."""
        selects = [
            f"SELECT stream, seq, id FROM {self._event} WHERE stream = %s AND {each} "
            "ORDER BY seq LIMIT 1"
            for each in self._conditions(statuses)
        ]
        found = self._rows_of_each([(sql, [stream]) for stream in streams for sql in selects])
        return {stream: row_id for stream, _, row_id in sorted(found, reverse=True)}

    def backlogs(self, *, streams: Sequence[str], most: int) -> dict[str, int]:
        """Count each stream's unsettled events, up to ``most``."""
        sql = f"""SELECT MAX(stream), COUNT(*) FROM (SELECT stream FROM {self._event}
            WHERE stream = %s AND status IN (0, 2) AND {INDEXED} LIMIT {int(most)}) backlog"""
        found: dict[str, int] = dict(self._rows_of_each([(sql, [each]) for each in streams]))
        return {each: found.get(each, 0) for each in streams}

    def dead_causes(self, *, since: datetime, most: int) -> list[tuple[Any, ...]]:
        """Group dead deliveries by event type, cause and listener.

        Return these, count, newest id, first and last death, and how many died ``since``, of at
        most ``most`` groups, those with the most deaths since then first. A group may occur twice.
        """
        sql = f"""SELECT event_type, cause, listener, COUNT(*) AS deliveries, MAX(id) AS newest_id,
                MIN(done_at) AS oldest, MAX(done_at) AS newest,
                SUM(CASE WHEN done_at >= %s THEN 1 ELSE 0 END) AS lately
            FROM {self._by_death} WHERE {{}} GROUP BY event_type, cause, listener
            ORDER BY lately DESC, deliveries DESC LIMIT {int(most)}"""
        given = [to_database(since, self.connection)]
        rows = self._rows_of_each([(sql.format(each), given) for each in self._deaths()])
        return sorted(rows, key=lambda row: (row[7], row[3]), reverse=True)[:most]

    def count_dead(self) -> int:
        """Count all dead events."""
        sql = f"SELECT COUNT(*) FROM {self._by_death} WHERE "
        return sum(row[0] for row in self._rows_of_each([(sql + e, []) for e in self._deaths()]))

    def backlog_by_type(self, *, held: Sequence[str], most: int) -> list[Row]:
        """Count the ``most`` events due first: return type, state, count and oldest due time.

        What is due in one of the queues ``held`` is held.
        """
        one_of, params = self._one_of(held or [""], "queue")
        sql = f"""SELECT event_type, CASE WHEN available_at <= {self.now} AND {one_of} THEN 'held'
            WHEN available_at <= {self.now} THEN 'due' WHEN locked_by IS NOT NULL THEN 'leased'
            WHEN status = 2 THEN 'retrying' ELSE 'scheduled' END AS state, COUNT(*),
            MIN(available_at)
            FROM (SELECT event_type, queue, available_at, locked_by, status FROM {self._event}
                WHERE available_at IS NOT NULL ORDER BY available_at LIMIT {int(most)}) waiting
            GROUP BY event_type, state"""
        return self._rows(sql, params)

    def queue_backlogs(self, *, queues: Sequence[str], most: int) -> dict[str, QueueBacklog]:
        """Count what is due in these queues, at most ``most`` events and as many streams of each.

        Queues in which nothing is due are left out.
        """
        selects = []
        for queue in queues:
            for table, counts in ((EVENTS, "COUNT(*), 0"), (STREAMS, "0, COUNT(*)")):
                due, given = self._in_queue(queue, column=table.due, until=(self.now, []))
                sql = f"""SELECT MIN(queue), {counts}, MIN({table.due}), {self.now}
                    FROM (SELECT queue, {table.due} FROM {self._by_due(table)} WHERE {due}
                        ORDER BY {self.by_queue}{table.due} LIMIT {int(most)}) due"""
                selects.append((sql, given))
        found: dict[str, QueueBacklog] = {}
        for queue, events, streams, first, now in self._rows_of_each(selects):
            if (age := seconds_between(first, now)) is not None:
                one = found.get(queue, QueueBacklog(0, 0, 0.0))
                found[queue] = QueueBacklog(
                    one.events + events, one.streams + streams, max(one.oldest_age, age)
                )
        return found

    @abstractmethod
    def time_limit(self, seconds: float) -> AbstractContextManager[None]:
        """Have each statement of the block fail with ``OperationalError`` after these seconds."""

    @property
    def _by_death(self) -> str:
        """Return the table, with any index hint, for a SELECT of dead events by their index."""
        return self._event

    def _deaths(self) -> Sequence[str]:
        return ["status = 3"]

    def _conditions(self, statuses: Sequence[int]) -> list[str]:
        return [f"status IN ({', '.join(str(int(each)) for each in statuses)}) AND {INDEXED}"]
