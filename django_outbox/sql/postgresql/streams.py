"""PostgreSQL: sequence numbers and leases of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django.db.backends.base.base import BaseDatabaseWrapper

from ...events import UNROUTED_LANE
from ..base.insert import Inserting, Written, lane_places, own_places
from ..base.sequence_numbers import Places, due_of_followers
from ..base.streams import StreamLeases
from ..values import INSTANTS, KEYED, SQL, StreamQuery, StreamRows
from .claim import utc


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
