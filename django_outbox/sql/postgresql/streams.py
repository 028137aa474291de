"""PostgreSQL: sequence numbers and leases of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...events import UNROUTED_LANE
from ..base.insert import Inserting, Written, lane_places, own_places
from ..base.sequence_numbers import Places, due_of_followers
from ..base.streams import StreamLeases
from ..values import KEYED, SQL, StreamQuery, StreamRows
from .claim import utc


class PostgresStreams(StreamLeases, Inserting):
    def _places(self, rows: Sequence[Written]) -> tuple[SQL, list[SQL]]:
        """Number a single event in the statement that inserts it."""
        event = rows[0][0]
        if event.key is None or len(rows) > 1 or lane_places([event]):
            return super()._places(rows)
        upsert, params = self._upsert(own_places([event]), due=due_of_followers())
        return (f"WITH s AS ({upsert} RETURNING seq) ", params), [("(SELECT seq FROM s)", [])]

    def _number(self, places: Places) -> Mapping[str, int]:
        upsert, params = self._upsert(places, due=due_of_followers())
        return dict(self._rows(f"{upsert} RETURNING stream, seq", params))

    def read_streams(self, read: StreamQuery) -> list[StreamRows]:
        # In one snapshot, but never in the claim's, which is older than its locks.
        statuses = "(0, 2, 3)" if read.dead_too else "(0, 2)"
        due = f" AND (status <> 2 OR deliver_at <= {self.now})" if read.only_due_retries else ""
        until = self._routed_until(f"'{UNROUTED_LANE}:' || s.key")
        leased_at, instants = self._any_of(read.streams)
        rows = self._rows(
            f"""SELECT s.stream, s.seq, {utc(self.now)}, {self._columns(KEYED, "e.")},
                e.routed_until
            FROM {self._stream} s LEFT JOIN LATERAL (
                SELECT {", ".join(KEYED)}, {until} AS routed_until FROM {self._event} e
                WHERE e.stream = s.stream AND status IN {statuses}{due} ORDER BY e.seq LIMIT %s
            ) e ON true
            WHERE s.stream = ANY(%s) AND s.locked_by = %s AND s.locked_at {leased_at}
            ORDER BY s.stream, e.seq""",
            [read.limit, [*read.streams], read.me, *instants],
        )
        found: dict[str, StreamRows] = {}
        for name, seq, now, *row in rows:
            stream = found.setdefault(name, StreamRows(name, seq, now))
            if row[0] is not None:
                stream.rows.append(tuple(row))
        return [*found.values()]

    def _released(self, statement: SQL, me: str, streams: Sequence[str]) -> set[str]:
        rows = self._rows(f"{statement[0]} RETURNING e.stream", statement[1])
        return {row[0] for row in rows}
