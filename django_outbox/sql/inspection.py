"""Limited index queries about queues, streams and dead events, for the admin and commands."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from .claim import EventLeases
from .values import EVENTS, STREAMS, seconds_between

# SQLite uses a partial index only if a query repeats its condition word for word.
INDEXED = "status IN (0, 2, 3)"


class Waiting(NamedTuple):
    """What is due in a queue, of one listener or lane; each count stops at a limit."""

    queue: str
    kind: str  # "listener", "type" (not routed yet) or "lane" (of streams)
    name: str  # title of the listener, event type, or lane
    number: int  # of deliveries without a key; of a lane, streams
    age: float  # seconds that the first of them has been due


class Flow(NamedTuple):
    """What was written lately, and what is due."""

    written: dict[str, int]  # rows by queue, of the newest ones
    seconds: float  # since the oldest of these was written; 0: there are none
    due: dict[str, int]  # rows without a key, by queue


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

    def summaries(
        self, *, streams: Sequence[str], statuses: Sequence[int], most: int
    ) -> dict[str, tuple[str | None, int]]:
        """Return of each stream the id that ``heads`` returns, and its unsettled events.

        These are counted up to ``most``.
        """
        selects = [
            f"""SELECT stream, seq, id, NULL FROM {self._event} WHERE stream = %s AND {each}
                ORDER BY seq LIMIT 1"""
            for each in self._conditions(statuses)
        ]
        backlog = f"""SELECT MAX(stream), NULL, NULL, COUNT(*) FROM (SELECT stream
            FROM {self._event} WHERE stream = %s AND status IN (0, 2) AND {INDEXED}
            LIMIT {int(most)}) backlog"""
        rows = self._rows_of_each(
            [(sql, [each]) for each in streams for sql in (*selects, backlog)]
        )
        heads = {row[0]: row[2] for row in sorted(r for r in rows if r[3] is None)[::-1]}
        counts = {stream: count for stream, _, _, count in rows if count is not None}
        return {each: (heads.get(each), counts.get(each, 0)) for each in streams}

    def neighbours(
        self, *, stream: str, seq: int, row_id: str, most: int, near: int
    ) -> list[tuple[int, str]]:
        """Return number and id of up to ``most`` rows of a stream on each side of one, in order.

        No index has those that are done: they are among the ``near`` rows written before or after.
        """
        sides = (("<", "DESC", ">", "''"), (">", "ASC", "<", "'~'"))
        selects = []
        for side, order, other, end in sides:
            last = f"""COALESCE((SELECT id FROM {self._event} WHERE id {side} %s
                ORDER BY id {order} LIMIT 1 OFFSET {int(near)}), {end})"""
            done = f"status = 1 AND id {side} %s AND id {other} {last}"
            for where, given in ((INDEXED, []), (done, [row_id, row_id])):
                sql = f"""SELECT seq, id FROM {self._event} WHERE stream = %s AND seq {side} %s
                    AND {where} ORDER BY seq {order} LIMIT {int(most)}"""
                selects.append((sql, [stream, seq, *given]))
        found = sorted((number, found_id) for number, found_id in self._rows_of_each(selects))
        before, after = ([e for e in found if (e[0] < seq) is is_it] for is_it in (True, False))
        return [*before[-most:], *after[:most]]

    def queue_backlogs(self, *, queues: Sequence[str], most: int) -> list[Waiting]:
        """Count what is due in these queues, at most ``most`` events and as many streams of each.

        Queues in which nothing is due are left out.
        """
        kinds = {
            EVENTS: (
                "CASE WHEN listener IS NULL THEN 'type' ELSE 'listener' END",
                "COALESCE(listener, event_type)",
            ),
            STREAMS: ("'lane'", "lane"),
        }
        selects = []
        for queue in queues:
            for table, (kind, name) in kinds.items():
                due, given = self._in_queue(queue, column=table.due, until=(self.now, []))
                sql = f"""SELECT MIN(queue), kind, name, COUNT(*), MIN({table.due}), {self.now}
                    FROM (SELECT queue, {kind} AS kind, {name} AS name, {table.due}
                        FROM {self._by_due(table)} WHERE {due}
                        ORDER BY {self.by_queue}{table.due} LIMIT {int(most)}) due
                    GROUP BY kind, name"""
                selects.append((sql, given))
        return [
            Waiting(queue, kind, name, number, seconds_between(first, now) or 0.0)
            for queue, kind, name, number, first, now in self._rows_of_each(selects)
        ]

    def flow(self, *, queues: Sequence[str], since: str, most: int) -> Flow:
        """Count the newest rows from the id ``since``, and what is due in these queues.

        At most ``most`` of the newest rows, and twenty times as many due ones of each queue.
        """
        selects = [
            (
                f"""SELECT queue, COUNT(*), MIN(created_at), {self.now} FROM (
                    SELECT queue, created_at FROM {self._event} WHERE id >= %s
                    ORDER BY id DESC LIMIT {int(most)}) newest GROUP BY queue""",
                [since],
            )
        ]
        for queue in queues:
            due, given = self._in_queue(queue, column=EVENTS.due, until=(self.now, []))
            sql = f"""SELECT MIN(queue), COUNT(*), NULL, NULL FROM (SELECT queue
                FROM {self._by_due(EVENTS)} WHERE {due} LIMIT {int(most) * 20}) due"""
            selects.append((sql, given))
        rows = self._rows_of_each(selects)
        written = [row for row in rows if row[3] is not None]
        return Flow(
            written={queue: count for queue, count, *_ in written},
            seconds=max((seconds_between(*row[2:]) or 0.0 for row in written), default=0.0),
            due={queue: count for queue, count, _, now in rows if now is None and queue},
        )

    @abstractmethod
    def time_limit(self, seconds: float) -> AbstractContextManager[None]:
        """Have each statement of the block fail with ``OperationalError`` after these seconds."""

    def _conditions(self, statuses: Sequence[int]) -> list[str]:
        return [f"status IN ({', '.join(str(int(each)) for each in statuses)}) AND {INDEXED}"]
