"""Limited index queries about queues, streams and dead events, for the admin and commands."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import BooleanField
from django.db.models.expressions import RawSQL

from ..events import stored_instant
from .claim import EventLeases
from .values import EVENTS, SQL, STREAMS, to_database

# SQLite uses a partial index only if a query repeats its condition word for word.
INDEXED = "status IN (0, 2, 3)"
TOGETHER = 48  # UNION branches per statement


class QueueBacklog(NamedTuple):
    """What is due in a queue; the counts stop at a limit."""

    events: int  # without a key
    streams: int
    oldest_age: float  # seconds that the first of them has been due


class Inspection(EventLeases):
    def heads(self, *, streams: Sequence[str], statuses: Sequence[int]) -> dict[str, str]:
        """Return the id of each stream's first event that has one of these statuses."""
        conditions = self._conditions(statuses)
        select = (
            f"SELECT * FROM (SELECT stream, seq, id FROM {self._event} "
            f"WHERE stream = %s AND {{}} ORDER BY seq LIMIT 1) head"
        )
        first: dict[str, tuple[int, str]] = {}
        for found, seq, row_id in self._for_each_stream(
            streams, [select.format(each) for each in conditions]
        ):
            first[found] = min(first.get(found, (seq, row_id)), (seq, row_id))
        return {found: row_id for found, (_, row_id) in first.items()}

    def backlogs(self, *, streams: Sequence[str], most: int) -> dict[str, int]:
        """Count each stream's unsettled events, up to ``most``."""
        select = (
            f"SELECT MAX(stream), COUNT(*) FROM (SELECT stream "
            f"FROM {self._event} WHERE stream = %s "
            f"AND status IN (0, 2) AND {INDEXED} LIMIT {int(most)}) backlog"
        )
        found = dict(self._for_each_stream(streams, [select]))
        return {each: found.get(each, 0) for each in streams}

    def waiting(self, *, streams: Sequence[str], most: int) -> list[str]:
        """Return the ids of the first unsettled events of each stream, at most ``most`` of each."""
        selects = [
            f"SELECT * FROM (SELECT seq, id FROM {self._event} "
            f"WHERE stream = %s AND {each} ORDER BY seq LIMIT {int(most)}) waiting"
            for each in self._conditions([0, 2])
        ]
        return [row_id for _, row_id in self._for_each_stream(streams, selects)]

    def dead(self, *, span: tuple[str | None, str | None], most: int) -> list[str]:
        """Return the ids of the newest dead events within a span of ids, both ends included."""
        sql, params = self._dead_select(span, most)
        return sorted((each for (each,) in self._rows(sql, params)), reverse=True)[:most]

    def dead_condition(
        self, *, span: tuple[str | None, str | None], most: int
    ) -> tuple[RawSQL, int, str | None]:
        """Return a condition of the newest dead events within a span, for repeated queries.

        Return with it how many events it covers if there are more, and the next one's id, or None.
        """
        sql, params = self._dead_select(span, most + 1)
        next_id = next(
            (
                each
                for (each,) in self._rows(
                    f"SELECT id FROM ({sql}) found ORDER BY id DESC LIMIT 1 OFFSET {int(most)}",
                    params,
                )
            ),
            None,
        )
        return condition("status = 3", []), most, next_id

    def _dead_select(self, span: tuple[str | None, str | None], most: int) -> SQL:
        """Return the SELECT of the newest dead events, ``most`` from each part of their index."""
        bounds = zip((">=", "<="), span, strict=True)
        given = [(f"id {sign} %s", each) for sign, each in bounds if each is not None]
        selects = [
            f"SELECT * FROM (SELECT id FROM {self._by_death} "
            f"WHERE {' AND '.join([each, *(sql for sql, _ in given)])} "
            f"ORDER BY id DESC LIMIT {int(most)}) dead"
            for each in self._deaths()
        ]
        return " UNION ALL ".join(selects), [each for _, each in given] * len(selects)

    def dead_causes(self, *, since: datetime, most: int) -> list[tuple[Any, ...]]:
        """Group dead deliveries by event type, cause and listener.

        Return these, count, newest id, first and last death, and how many died ``since``, of at
        most ``most`` groups, those with the most deaths since then first. A group may occur twice.
        """
        selects = [
            "SELECT * FROM (SELECT event_type, cause, listener, COUNT(*) AS deliveries, "
            "MAX(id) AS newest_id, MIN(done_at) AS oldest, MAX(done_at) AS newest, "
            "SUM(CASE WHEN done_at >= %s THEN 1 ELSE 0 END) AS lately "
            f"FROM {self._by_death} WHERE {each} "
            "GROUP BY event_type, cause, listener "
            f"ORDER BY lately DESC, deliveries DESC LIMIT {int(most)}) dead"
            for each in self._deaths()
        ]
        given = [to_database(since, self.connection)] * len(selects)
        return sorted(
            self._rows(" UNION ALL ".join(selects), given),
            key=lambda row: (row[7], row[3]),
            reverse=True,
        )[:most]

    def count_dead(self) -> int:
        """Count all dead events."""
        selects = [f"SELECT COUNT(*) FROM {self._by_death} WHERE {each}" for each in self._deaths()]
        return sum(count for (count,) in self._rows(" UNION ALL ".join(selects)))

    def backlog_by_type(self, *, most: int) -> list[tuple[str, str, int, Any]]:
        """Count the ``most`` events due first: return type, state, count and oldest due time."""
        state = (
            f"CASE WHEN available_at <= {self.now} THEN 'due' WHEN locked_by IS NOT NULL "
            "THEN 'held' WHEN status = 2 THEN 'retrying' ELSE 'scheduled' END"
        )
        return list(
            self._rows(
                f"SELECT event_type, {state} AS state, COUNT(*), MIN(available_at) FROM "
                f"(SELECT event_type, available_at, locked_by, status "
                f"FROM {self._event} WHERE available_at IS NOT NULL "
                f"ORDER BY available_at LIMIT {int(most)}) waiting GROUP BY event_type, state",
                [],
            )
        )

    def queue_backlogs(self, *, queues: Sequence[str], most: int) -> dict[str, QueueBacklog]:
        """Count what is due in these queues, at most ``most`` events and as many streams of each.

        Queues in which nothing is due are left out.
        """
        branches = [
            self._queue_backlog(queue, self._by_due(table), table.due, most=most)
            for queue in queues
            for table in (EVENTS, STREAMS)
        ]
        found: dict[str, QueueBacklog] = {}
        for start in range(0, len(branches), TOGETHER):
            some = branches[start : start + TOGETHER]
            for queue, column, count, first, now in self._rows(
                " UNION ALL ".join(sql for sql, _ in some),
                [value for _, params in some for value in params],
            ):
                if queue is not None:
                    of_one = _backlog(column, count, stored_instant(first), stored_instant(now))
                    found[queue] = _sum(found.get(queue), of_one)
        return found

    def _queue_backlog(self, queue: str, table: str, column: str, *, most: int) -> SQL:
        due, given = self._in_queue(queue, column=column, until=(self.now, []))
        sql = (
            f"SELECT MIN(queue), '{column}', COUNT(*), MIN({column}), {self.now} "
            f"FROM (SELECT queue, {column} FROM {table} WHERE {due} "
            f"ORDER BY {self.by_queue}{column} LIMIT {int(most)}) due"
        )
        return sql, given

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

    def _for_each_stream(
        self, streams: Sequence[str], selects: Sequence[str], *further: Any
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of each SELECT for each stream; its parameters are it and ``further``."""
        at_once = max(TOGETHER // len(selects), 1)
        for start in range(0, len(streams), at_once):
            some = streams[start : start + at_once]
            yield from self._rows(
                " UNION ALL ".join([*selects] * len(some)),
                [each for stream in some for _ in selects for each in (stream, *further)],
            )


def condition(sql: str, params: Sequence[Any]) -> RawSQL:
    """Return SQL as a condition for a queryset of events."""
    return RawSQL(sql, params, output_field=BooleanField())  # noqa: S611 - no user's text


def _backlog(column: str, count: int, first: datetime | None, now: datetime | None) -> QueueBacklog:
    assert first is not None and now is not None
    events, streams = (count, 0) if column == "available_at" else (0, count)
    return QueueBacklog(events, streams, max((now - first).total_seconds(), 0.0))


def _sum(one: QueueBacklog | None, other: QueueBacklog) -> QueueBacklog:
    if one is None:
        return other
    oldest = max(one.oldest_age, other.oldest_age)
    return QueueBacklog(one.events + other.events, one.streams + other.streams, oldest)
