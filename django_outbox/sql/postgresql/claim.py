"""PostgreSQL: leases of events. Each operation is one statement, which skips locked rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..base.claim import EventLeases
from ..values import INSTANTS, Claim, Claimed, claimed, renewed_of


class PostgresEventLeases(EventLeases):
    def claim(self, connection: BaseDatabaseWrapper, claim: Claim) -> Claimed:
        event = self._event(connection)
        due, due_params = self._due(connection, claim)
        columns = ", ".join(utc(f"e.{name}") if name in INSTANTS else f"e.{name}"
                            for name in claim.columns)  # fmt: skip
        size, cut, chosen, count, most = "", "", "due", "", []
        if claim.most_bytes:  # include a row while those before it have fewer bytes
            size, most = ", octet_length(payload) AS size", [claim.most_bytes]
            chosen, count = "cut", ", (SELECT count(*) FROM due)"
            cut = """, cut AS MATERIALIZED (
                SELECT event_id, due_at, previous_owner FROM (
                    SELECT *, sum(size) OVER (
                        ORDER BY due_at, event_id ROWS UNBOUNDED PRECEDING) - size AS before
                    FROM due) sized
                WHERE before < %s)"""
        with connection.cursor() as cursor:
            # MATERIALIZED makes the planner obey the LIMIT.
            cursor.execute(
                f"""WITH due AS MATERIALIZED (
                    SELECT event_id, available_at AS due_at, locked_by AS previous_owner{size}
                    FROM {event} WHERE {due}
                    ORDER BY available_at, event_id LIMIT %s FOR UPDATE SKIP LOCKED){cut}
                UPDATE {event} e SET
                    rescues = rescues + CASE
                        WHEN locked_by IS NULL OR locked_by = %s THEN 0 ELSE 1 END,
                    locked_by = %s, locked_at = {self.now}, available_at = {self.now_plus}
                FROM {chosen} due WHERE e.event_id = due.event_id
                RETURNING {columns}, {utc("due.due_at")}, due.previous_owner,
                    {utc("e.locked_at")}{count}""",
                [*due_params, claim.limit, *most, claim.me, claim.me, claim.lease],
            )
            rows = cursor.fetchall()
        limit = claim.limit
        if most and rows:  # the last column counts the rows that were due
            limit = len(rows) if rows[0][-1] > len(rows) else limit
            rows = [row[:-1] for row in rows]
        rows.sort(key=lambda row: (row[-3], row[0]))
        return claimed(rows, seen=rows, limit=limit, due=-3)

    def renew(
        self, connection: BaseDatabaseWrapper, *, me: str, ids: Sequence[str], lease: float
    ) -> tuple[set[str], set[str]]:
        event = self._event(connection)
        mine = "event_id = ANY(%s) AND locked_by = %s"
        params: list[Any] = [[*ids], me]
        taken = self._run(
            connection,
            f"""WITH unlocked AS MATERIALIZED (
                SELECT event_id FROM {event} WHERE {mine} AND available_at IS NOT NULL
                FOR UPDATE SKIP LOCKED)
            UPDATE {event} e SET available_at = {self.now_plus}
            FROM unlocked WHERE e.event_id = unlocked.event_id""",
            [*params, lease],
        )
        if taken == len(ids):
            return set(ids), set(ids)
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT event_id, available_at FROM {event} WHERE {mine}", params)
            return renewed_of(cursor.fetchall(), taken)

    def release(
        self, connection: BaseDatabaseWrapper, *, me: str, ids: Collection[str],
        after: float | None = 0.0,
    ) -> int:  # fmt: skip
        event = self._event(connection)
        fence, params = self._fence(connection, me)
        due, seconds = ("", []) if after is None else (f"available_at = {self.now_plus},", [after])
        return self._run(
            connection,
            f"""WITH unlocked AS MATERIALIZED (
                SELECT event_id FROM {event} WHERE event_id = ANY(%s) AND {fence}
                FOR UPDATE SKIP LOCKED)
            UPDATE {event} e SET {due} locked_by = NULL, locked_at = NULL
            FROM unlocked WHERE e.event_id = unlocked.event_id""",
            [[*ids], *params, *seconds],
        )

    def unclaim(
        self, connection: BaseDatabaseWrapper, *, me: str, due: Sequence[tuple[str, datetime]]
    ) -> int:
        event = self._event(connection)
        fence, params = self._fence(connection, me)
        return self._run(
            connection,
            f"""WITH unlocked AS MATERIALIZED (
                SELECT event_id FROM {event} WHERE event_id = ANY(%s) AND {fence}
                FOR UPDATE SKIP LOCKED)
            UPDATE {event} e SET available_at = v.due_at, locked_by = NULL, locked_at = NULL
            FROM unlocked, unnest(%s::text[], %s::timestamptz[]) v (event_id, due_at)
            WHERE e.event_id = unlocked.event_id AND v.event_id = unlocked.event_id""",
            [[each for each, _ in due], *params, [each for each, _ in due], [at for _, at in due]],
        )

    def _one_of(self, ids: Collection[str]) -> tuple[str, list[Any]]:
        return "event_id = ANY(%s)", [[*ids]]  # one parameter: parsing 500 took a tenth of a drain


def utc(column: str) -> str:
    """Return SQL for an instant without time zone: with USE_TZ=False drivers return local time."""
    return f"{column} AT TIME ZONE 'UTC'"
