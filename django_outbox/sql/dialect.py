"""Upkeep: pauses, named leases and deletions; and limited index queries for people."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from django.db import DatabaseError

from ..conf import table_name
from .insert import Inserting
from .settle import Settling
from .streams import INDEXED
from .values import EVENTS, STREAMS, PauseTimes, key_of, seconds_between


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


class Dialect(Inserting, Settling):
    """Every operation on the tables, in the SQL of one database."""

    always: Mapping[str, str] = {}  # by table, a condition that a DELETE by primary key needs

    # -- pauses ------------------------------------------------------------------------------------

    def pauses(self) -> dict[tuple[str, str], PauseTimes]:
        """Return every pause by its kind and name; of kind "operation" too, if one is open.

        A worker asks for both together, because it asks about once a second.
        """
        now = self.in_utc.format(self.now)
        sql = f"""SELECT id, kind, name, {now}, {self.in_utc.format("until")}, pause_seconds
            FROM {self._table("outbox_pause")}
            UNION ALL SELECT id, 'operation', '', {now}, NULL, NULL
            FROM {self._table("outbox_operation")} WHERE state = 'open'"""
        return {
            (kind, name): PauseTimes(pause, seconds_between(now, until), length or 0.0)
            for pause, kind, name, now, until, length in self._rows(sql)
        }

    # -- circuit breakers --------------------------------------------------------------------------

    def open_breaker(self, *, queue: str, pause: float, reason: str) -> bool:
        """Open a queue's circuit breaker for ``pause`` seconds; return False if it is open."""
        sql = f"""INSERT INTO {self._table("outbox_pause")}
                (kind, name, reason, paused_at, paused_by, until, pause_seconds)
            VALUES ('breaker', %s, %s, {self.now}, '', {self.now_plus}, %s)"""
        return self._insert(sql, [queue, reason, pause, pause], may_clash=True) == 1

    def probe_breaker(self, *, queue: str, lease: float) -> bool:
        """Win the probe of a breaker whose pause is over, for ``lease`` seconds; or lose it."""
        sql = f"""UPDATE {self._table("outbox_pause")} SET until = {self.now_plus}
            WHERE kind = 'breaker' AND name = %s AND until <= {self.now}"""
        return self._run(sql, [lease, queue]) == 1

    def extend_breaker(self, *, queue: str, pause: float, kept: float) -> None:
        """End a probe: pause for another ``pause`` seconds; remember ``kept`` as its length."""
        sql = f"""UPDATE {self._table("outbox_pause")} SET until = {self.now_plus},
            pause_seconds = %s WHERE kind = 'breaker' AND name = %s"""
        self._run(sql, [pause, kept, queue])

    def close_breaker(self, *, queue: str) -> bool:
        """Close a queue's circuit breaker; return whether it was open."""
        sql = f"DELETE FROM {self._table('outbox_pause')} WHERE kind = 'breaker' AND name = %s"
        return self._run(sql, [queue]) == 1

    # -- named leases ------------------------------------------------------------------------------

    def take_lease(self, *, name: str, me: str, lease: float) -> bool:
        """Claim or renew the named lease for ``lease`` seconds; return whether ``me`` holds it."""
        table = self._table("outbox_lease")
        sql = f"""UPDATE {table} SET locked_by = %s, locked_until = {self.now_plus}
            WHERE name = %s
            AND (locked_by = %s OR locked_by IS NULL OR locked_until <= {self.now})"""
        if self._run(sql, [me, lease, name, me]):
            return True
        made = self._insert(f"INSERT INTO {table} (name) VALUES (%s)", [name], may_clash=True)
        return made == 1 and self.take_lease(name=name, me=me, lease=lease)

    def note_lease(self, *, name: str, me: str, lease: float | None, state: str) -> bool:
        """Save the state of a named lease; renew it for ``lease`` seconds, or with None release it.

        Return whether ``me`` held it.
        """
        held, given = ("%s", self.now_plus), [me, lease]
        if lease is None:
            held, given = ("NULL", "NULL"), []
        sql = f"""UPDATE {self._table("outbox_lease")} SET state = %s, locked_by = {held[0]},
            locked_until = {held[1]} WHERE name = %s AND locked_by = %s"""
        return self._run(sql, [state, *given, name, me]) == 1

    # -- deletions ---------------------------------------------------------------------------------

    def delete(self, table: str, *, ids: Sequence[Any]) -> int:
        """Delete rows that the caller has locked, by primary key; return how many."""
        if not ids:
            return 0
        where, given = self._one_of(ids, key_of(table))
        from_table = self.deleted_by_id.format(self._table(table))
        return self._run(f"DELETE {from_table} WHERE {where}{self.always.get(table, '')}", given)

    # -- questions to the server -------------------------------------------------------------------

    def failing_isolation(self) -> str | None:
        """Return the isolation level if writers that waited for a key fail at it, else None."""
        return None

    def unstorable(self, texts: Iterable[str]) -> str | None:
        """Return a character that this connection cannot send unchanged; None: it can send all.

        Costs no statement. Here, every character can be sent or is refused.
        """
        return None

    def weak_charset(self) -> str | None:
        """Return the connection's charset if it does not have every character."""
        return None

    def variables(self, *names: str) -> dict[str, str]:
        """Return settings of a MySQL server by name; none of a server that has no such settings."""
        return {}

    def missing_table(self) -> str | None:
        """Return the first table that workers need and that does not exist; None if all do."""
        for name in ("event", "pause", "operation", "lease", "worker"):
            try:
                self._rows(f"SELECT 1 FROM {self._table(f'outbox_{name}')} WHERE 1 = 0")
            except DatabaseError as error:
                if self.is_missing_table(error):
                    return table_name(f"outbox_{name}")
                raise
        return None

    def estimated_rows(self) -> int:
        """Return the approximate number of events by the database's statistics; 0: unknown."""
        return max([int(row[0] or 0) for row in self._rows(*self._estimate())], default=0)

    @abstractmethod
    def _estimate(self) -> tuple[str, list[Any]]:
        """Return the SELECT of the approximate number of events, and its parameters."""

    # -- connections of the engine -----------------------------------------------------------------

    @abstractmethod
    def prepare_engine(self, settings: dict[str, Any], *, lock_wait: float) -> None:
        """Change an engine thread's copied settings before it connects; ``lock_wait``: seconds."""

    def cluster(self) -> str | None:
        """Return the kind of cluster in which several nodes take writes; None if it is in none."""
        return None

    def begin_session(self) -> bool:
        """Set up a session of a worker; return whether other nodes take writes, too."""
        return False

    def guard_engine(self) -> None:
        """Set up what an engine thread's connection needs and settings cannot express."""

    # -- what the admin and commands ask ----------------------------------------------------------

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
                columns = f"queue, {kind} AS kind, {name} AS name, {table.due}"
                due, given = self._now_due(table, queue, columns)
                sql = f"""SELECT MIN(queue), kind, name, COUNT(*), MIN({table.due}), {self.now}
                    FROM ({due} LIMIT {int(most)}) due GROUP BY kind, name"""
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
            due, given = self._now_due(EVENTS, queue, "queue")
            sql = f"SELECT MIN(queue), COUNT(*), NULL, NULL FROM ({due} LIMIT {int(most) * 20}) due"
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
