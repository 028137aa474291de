"""SQLite: leases of streams. No row is ever locked, because there is one writer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ...events import stored_instant, unrouted
from ..base.streams import StreamLeases
from ..values import (
    KEYED,
    Claimed,
    LeaseKind,
    Release,
    Row,
    StreamClaim,
    StreamQuery,
    StreamRows,
    claimed,
    marks,
    released_of,
    renewed_of,
    to_database,
)
from .claim import union

SELECTS = 50  # in a UNION: with more, each costs twice as much to plan
STREAMS = 100  # per release: a CASE with a branch per stream makes the cost quadratic


class SQLiteStreams(StreamLeases):
    def claim_streams(self, connection: BaseDatabaseWrapper, claim: StreamClaim) -> Claimed:
        stream = self._stream(connection)
        select = f"SELECT stream, locked_by, queue, due_at, {self.now} FROM {stream}"
        branches = self._branches_of_streams(connection, claim)
        sql, params = union([(f"{select} WHERE {where}", given) for where, given in branches])
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            rows: list[Row] = [*cursor.fetchall()]
        if not rows:
            return Claimed([])
        rows.sort(key=lambda row: row[3])
        keys, newest = [row[0] for row in rows], stored_instant(rows[-1][3])
        assert newest is not None
        taken = self._run(
            connection,
            # A stream that was claimed since the SELECT is due later. The plus as for events.
            f"""UPDATE {stream} SET due_at = {self.now_plus}, locked_by = %s, locked_at = {self.now}
            WHERE stream IN ({marks(keys)}) AND +due_at <= %s""",
            [claim.lease, claim.me, *keys, to_database(newest, connection)],
        )
        mine = set(keys)
        if taken < len(rows):
            with connection.cursor() as cursor:
                cursor.execute(
                    f"""SELECT stream FROM {stream} WHERE stream IN ({marks(keys)})
                    AND locked_by = %s AND due_at > {self.now}""",
                    [*keys, claim.me],
                )
                mine = {row[0] for row in cursor.fetchall()}
        found = [row[:3] for row in rows if row[0] in mine]
        return claimed(found, seen=rows, branches=claim.branches, due=3, queue=2)

    def read_streams(self, connection: BaseDatabaseWrapper, read: StreamQuery) -> list[StreamRows]:
        with connection.cursor() as cursor:
            cursor.execute(
                f"""SELECT stream, seq, +locked_at, {self.now} FROM {self._stream(connection)}
                WHERE stream IN ({marks(read.keys)}) AND locked_by = %s""",
                [*read.keys, read.me],
            )
            found = [StreamRows(*row) for row in cursor.fetchall()]
        statuses = "status IN (0, 2) AND " * (not read.dead_too)
        due = f" AND (status <> 2 OR deliver_at <= {self.now})" if read.only_due_retries else ""
        # The index is partial: a query has to repeat its condition.
        select = (
            f"SELECT * FROM (SELECT {', '.join(KEYED)}, {self._routed_until(connection, '%s')} "
            f"FROM {self._event(connection)} "
            f"WHERE stream = %s AND {statuses}status IN (0, 2, 3){due} ORDER BY seq LIMIT %s)"
        )
        for start in range(0, len(found), SELECTS):
            some = {each.name: each for each in found[start : start + SELECTS]}
            with connection.cursor() as cursor:
                cursor.execute(
                    " UNION ALL ".join([select] * len(some)),
                    [each for key in some for each in (unrouted(key), key, read.limit)],
                )
                for row in sorted(cursor.fetchall(), key=lambda row: row[KEYED.index("seq")]):
                    some[row[KEYED.index("stream")]].rows.append(row)
        return found

    def next_retries(
        self, connection: BaseDatabaseWrapper, read: StreamQuery
    ) -> dict[str, datetime]:
        event = self._event(connection)
        # The index is partial: a query has to repeat its condition.
        reachable = (
            f"""AND NOT EXISTS (SELECT 1 FROM {event} dead WHERE dead.stream = e.stream
                AND dead.seq < e.seq AND dead.status = 3 AND dead.status IN (0, 2, 3))"""
        ) * read.dead_too
        with connection.cursor() as cursor:
            cursor.execute(
                f"""SELECT stream, MIN(deliver_at) FROM {event} e
                WHERE stream IN ({marks(read.keys)}) AND status = 2 AND status IN (0, 2, 3)
                {reachable} GROUP BY stream""",
                [*read.keys],
            )
            found = {row[0]: stored_instant(row[1]) for row in cursor.fetchall()}
        return {key: instant for key, instant in found.items() if instant is not None}

    def note_starts(self, connection: BaseDatabaseWrapper, *, me: str, ids: Sequence[str]) -> int:
        fence, params = self._fence(connection, me, LeaseKind.STREAM)
        return self._run(
            connection,
            f"""UPDATE {self._event(connection)} SET rescues = rescues + 1
            WHERE id IN ({marks(ids)}) AND {fence}""",
            [*ids, *params],
        )

    def take_back_starts(
        self, connection: BaseDatabaseWrapper, *, me: str, ids: Sequence[str]
    ) -> int:
        fence, params = self._fence(connection, me, LeaseKind.STREAM)
        return self._run(
            connection,
            f"""UPDATE {self._event(connection)} SET rescues = rescues - 1
            WHERE id IN ({marks(ids)}) AND rescues > 0 AND {fence}""",
            [*ids, *params],
        )

    def renew_streams(
        self, connection: BaseDatabaseWrapper, *, me: str, keys: Sequence[str], lease: float
    ) -> tuple[set[str], set[str]]:
        stream = self._stream(connection)
        mine, params = f"stream IN ({marks(keys)}) AND locked_by = %s", [*keys, me]
        taken = self._run(
            connection,
            f"UPDATE {stream} SET due_at = {self.now_plus} WHERE {mine}",
            [lease, *params],
        )
        if taken == len(keys):
            return set(keys), set(keys)
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT stream, due_at FROM {stream} WHERE {mine}", params)
            return renewed_of(cursor.fetchall(), taken)

    def release_streams(
        self, connection: BaseDatabaseWrapper, *, me: str, streams: Sequence[Release]
    ) -> set[str]:
        released: set[str] = set()
        for start in range(0, len(streams), STREAMS):
            released |= self._release_streams(connection, me, streams[start : start + STREAMS])
        return released

    def _release_streams(
        self, connection: BaseDatabaseWrapper, me: str, streams: Sequence[Release]
    ) -> set[str]:
        stream, keys = self._stream(connection), [each.name for each in streams]
        params: list[Any] = [value for each in streams for value in (each.name, each.delay)]
        queue, same = "", ""
        if moved := [each for each in streams if each.queue is not None]:
            queue = f"queue = CASE stream {'WHEN %s THEN %s ' * len(moved)}ELSE queue END, "
            params += [value for each in moved for value in (each.name, each.queue)]
        params += [*keys, me]
        if read := [each for each in streams if each.seq is not None]:
            same = f"AND seq = CASE stream {'WHEN %s THEN %s ' * len(read)}ELSE seq END"
            params += [value for each in read for value in (each.name, each.seq)]
        if read := [each for each in streams if each.locked_at is not None]:
            same += (
                f" AND locked_at = CASE stream {'WHEN %s THEN %s ' * len(read)}ELSE locked_at END"
            )
            params += [value for each in read for value in (each.name, each.locked_at)]
        taken = self._run(
            connection,
            f"""UPDATE {stream} SET
                due_at = CASE stream {f"WHEN %s THEN {self.now_plus} " * len(keys)}END,
                {queue}locked_by = NULL, locked_at = {self.now}
            WHERE stream IN ({marks(keys)}) AND locked_by = %s {same}""",
            params,
        )
        if taken in (0, len(keys)):
            return set(keys) if taken else set()
        with connection.cursor() as cursor:
            sql = f"SELECT stream, locked_by FROM {stream} WHERE stream IN ({marks(keys)})"
            cursor.execute(sql, keys)
            return released_of(cursor.fetchall(), me, taken)

    def hand_back_streams(
        self, connection: BaseDatabaseWrapper, *, me: str, keys: Sequence[str], after: float | None
    ) -> int:
        due, seconds = ("", []) if after is None else (f"due_at = {self.now_plus},", [after])
        return self._run(
            connection,
            f"""UPDATE {self._stream(connection)} SET {due}
                locked_by = NULL, locked_at = {self.now}
            WHERE stream IN ({marks(keys)}) AND locked_by = %s""",
            [*seconds, *keys, me],
        )

    def move_streams(
        self, connection: BaseDatabaseWrapper, *, of: str, queue: str, limit: int
    ) -> int:
        stream = self._stream(connection)
        due, params = self._in_queue(of, column="due_at", until=(self.now, []))
        return self._run(
            connection,
            f"""UPDATE {stream} SET queue = %s WHERE stream IN (
                SELECT stream FROM {stream} WHERE {due}
                ORDER BY queue, due_at LIMIT %s)""",
            [queue, *params, limit],
        )
