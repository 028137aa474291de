"""SQLite: leases of streams. No row is ever locked, because there is one writer at a time."""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper

from ...events import unrouted
from ..base.streams import StreamLeases
from ..values import (
    KEYED,
    Claimed,
    Row,
    StreamClaim,
    StreamQuery,
    StreamRows,
    claimed,
    instant,
    marks,
)
from .claim import union

SELECTS = 50  # in a UNION: with more, each costs twice as much to plan


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
        keys, newest = [row[0] for row in rows], instant(rows[-1][3], connection)
        leased_at = rows[0][-1]
        taken = self._run(
            connection,
            # A stream that was claimed since the SELECT is due later. The plus as for events.
            f"""UPDATE {stream} SET due_at = {self.now_plus}, locked_by = %s, locked_at = %s
            WHERE stream IN ({marks(keys)}) AND +due_at <= %s""",
            [claim.lease, claim.me, leased_at, *keys, newest],
        )
        mine = set(keys)
        if taken < len(rows):
            with connection.cursor() as cursor:
                cursor.execute(
                    f"""SELECT stream FROM {stream} WHERE stream IN ({marks(keys)})
                    AND locked_by = %s AND locked_at = %s""",
                    [*keys, claim.me, leased_at],
                )
                mine = {row[0] for row in cursor.fetchall()}
        found = [(*row[:3], leased_at) for row in rows if row[0] in mine]
        return claimed(found, seen=rows, branches=claim.branches, due=3, queue=2)

    def read_streams(self, connection: BaseDatabaseWrapper, read: StreamQuery) -> list[StreamRows]:
        mine, params = self._leased(connection, "outbox_stream", read.me, read.streams)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT stream, seq, {self.now} FROM {self._stream(connection)} WHERE {mine}",
                params,
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
