"""PostgreSQL: sequence numbers and leases of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django.db.backends.base.base import BaseDatabaseWrapper

from ...conf import CENTURY
from ...events import UNROUTED_LANE
from ..base.insert import Inserting, Written, lane_places, own_places
from ..base.sequence_numbers import Places, due_of_followers
from ..base.streams import StreamLeases
from ..values import INSTANTS, KEYED, SQL, Claimed, StreamClaim, StreamQuery, StreamRows, claimed
from .claim import as_table, lease_chosen, utc


class PostgresStreams(StreamLeases, Inserting):
    def _places(
        self, connection: BaseDatabaseWrapper, rows: Sequence[Written]
    ) -> tuple[SQL, list[SQL]]:
        """Number a single event in the statement that inserts it."""
        event = rows[0][0]
        if event.key is None or len(rows) > 1 or lane_places([event]):
            return super()._places(connection, rows)
        upsert, params = self._upsert(connection, own_places([event]), due=due_of_followers())
        return (f"WITH s AS ({upsert} RETURNING seq) ", params), [("(SELECT seq FROM s)", [])]

    def _number(self, connection: BaseDatabaseWrapper, places: Places) -> Mapping[str, int]:
        upsert, params = self._upsert(connection, places, due=due_of_followers())
        with connection.cursor() as cursor:
            cursor.execute(f"{upsert} RETURNING stream, seq", params)
            return dict(cursor.fetchall())

    def claim_streams(self, connection: BaseDatabaseWrapper, claim: StreamClaim) -> Claimed:
        stream = self._stream(connection)
        until = self._until(connection, claim.at)
        branches, given = as_table(
            connection,
            ("text", "int", "float8"),
            [
                (each.queue, each.limit, CENTURY if each.since is None else each.since)
                for each in claim.branches
            ],
        )
        # As in the claim of events.
        chosen = f"""SELECT chosen.* FROM {branches} b (queue, n, age), LATERAL (
            SELECT stream, due_at, locked_by FROM {stream}
            WHERE (queue, due_at) >= (b.queue, {self.now} - b.age * interval '1 second')
            AND (queue, due_at) <= (b.queue, {until[0]})
            AND due_at IS NOT NULL AND stream <> ALL(%s)
            ORDER BY queue, due_at LIMIT b.n FOR UPDATE SKIP LOCKED) chosen"""
        rows = lease_chosen(
            connection,
            table=stream,
            primary_key="stream",
            chosen=(chosen, [*given, *until[1], [*claim.exclude]]),
            changes=(
                f"due_at = {self.now_plus}, locked_by = %s, locked_at = {self.now}",
                [claim.lease, claim.me],
            ),
            returning=f"""e.stream, before.locked_by, e.queue, {utc("before.due_at")},
                {utc("e.locked_at")}""",
        )
        rows.sort(key=lambda row: row[3])
        found = [(*row[:3], row[4]) for row in rows]
        return claimed(found, seen=rows, branches=claim.branches, due=3, queue=2)

    def read_streams(self, connection: BaseDatabaseWrapper, read: StreamQuery) -> list[StreamRows]:
        # In one snapshot, but never in the claim's, which is older than its locks.
        statuses = "(0, 2, 3)" if read.dead_too else "(0, 2)"
        due = f" AND (status <> 2 OR deliver_at <= {self.now})" if read.only_due_retries else ""
        columns = ", ".join(utc(f"e.{name}") if name in INSTANTS else f"e.{name}" for name in KEYED)
        until = self._routed_until(connection, f"'{UNROUTED_LANE}:' || s.key")
        leased_at, instants = self._any_of(connection, read.streams)
        with connection.cursor() as cursor:
            cursor.execute(
                f"""SELECT s.stream, s.seq, {utc(self.now)}, {columns}, e.routed_until
                FROM {self._stream(connection)} s LEFT JOIN LATERAL (
                    SELECT {", ".join(KEYED)}, {until} AS routed_until
                    FROM {self._event(connection)} e
                    WHERE e.stream = s.stream AND status IN {statuses}{due} ORDER BY e.seq LIMIT %s
                ) e ON true
                WHERE s.stream = ANY(%s) AND s.locked_by = %s AND s.locked_at {leased_at}
                ORDER BY s.stream, e.seq""",
                [read.limit, [*read.streams], read.me, *instants],
            )
            rows = cursor.fetchall()
        found: dict[str, StreamRows] = {}
        for name, seq, now, *row in rows:
            stream = found.setdefault(name, StreamRows(name, seq, now))
            if row[0] is not None:
                stream.rows.append(tuple(row))
        return [*found.values()]

    def _released(
        self, connection: BaseDatabaseWrapper, statement: SQL, me: str, streams: Sequence[str]
    ) -> set[str]:
        rows = self._rows(connection, f"{statement[0]} RETURNING e.stream", statement[1])
        return {row[0] for row in rows}
