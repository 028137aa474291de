"""PostgreSQL: leases of events. Each operation is one statement, which skips locked rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ...conf import CENTURY
from ..base.claim import EventLeases
from ..values import INSTANTS, QUEUE, SQL, Claim, Claimed, Unclaimed, claimed, renewed_of

MOST_BYTES = 2**31 - 1  # of payload text, where a claim has no limit


class PostgresEventLeases(EventLeases):
    def claim(self, connection: BaseDatabaseWrapper, claim: Claim) -> Claimed:
        event = self._event(connection)
        chosen, chosen_params = self._chosen(connection, claim)
        columns = ", ".join(utc(f"e.{name}") if name in INSTANTS else f"e.{name}"
                            for name in claim.columns)  # fmt: skip
        is_cut = any(each.most_bytes for each in claim.branches)
        table, count = ("cut", ", due.count") if is_cut else ("due", "")
        # A claim does not wait for the disk. If the server crashes and loses it, the rows are due
        # again. A settle does wait, and flushes every claim before it.
        unflushed = "" if connection.in_atomic_block else (
            ", (SELECT set_config('synchronous_commit', 'off', true)) unflushed"
        )  # fmt: skip
        with connection.cursor() as cursor:
            # MATERIALIZED makes the planner obey the LIMIT.
            cursor.execute(
                f"""WITH {chosen}
                UPDATE {event} e SET
                    rescues = rescues + CASE
                        WHEN locked_by IS NULL OR locked_by = %s THEN 0 ELSE 1 END,
                    locked_by = %s, locked_at = {self.now}, available_at = {self.now_plus}
                FROM {table} due{unflushed} WHERE e.event_id = due.event_id
                RETURNING {columns}, {utc("due.due_at")}, due.previous_owner,
                    {utc("e.locked_at")}{count}""",
                [*chosen_params, claim.me, claim.me, claim.lease],
            )
            rows = cursor.fetchall()
        cut: set[str] = set()
        if is_cut and rows:  # the last column counts the rows that were due in the queue
            due = {row[QUEUE]: row[-1] for row in rows}
            if sum(due.values()) > len(rows):
                taken = Counter(row[QUEUE] for row in rows)
                cut = {queue for queue, number in due.items() if number > taken[queue]}
            rows = [row[:-1] for row in rows]
        rows.sort(key=lambda row: (row[-3], row[0]))
        return claimed(rows, seen=rows, branches=claim.branches, due=-3, queue=QUEUE, cut=cut)

    def _chosen(self, connection: BaseDatabaseWrapper, claim: Claim) -> SQL:
        """Return the subqueries that lock the rows to claim: ``due``, or those ``cut`` to size."""
        event, until = self._event(connection), self._until(connection, claim.at)
        wanted, params = self._wanted(claim)
        if claim.ids is not None:
            sql = f"""due AS MATERIALIZED (
                SELECT event_id, available_at AS due_at, locked_by AS previous_owner
                FROM {event} WHERE available_at <= {until[0]} AND {wanted}
                ORDER BY available_at, event_id FOR UPDATE SKIP LOCKED)"""
            return sql, [*until[1], *params]
        is_cut = any(each.most_bytes for each in claim.branches)
        size = ", octet_length(payload) AS size, b.most_bytes" if is_cut else ""
        # Rows are compared, never due times alone, and ordered by queue: an older index is by due
        # time alone, and a plan that reads all queues there is as slow as the longest of them.
        due = f"""due AS MATERIALIZED (
            SELECT chosen.* FROM
                unnest(%s::text[], %s::int[], %s::float8[], %s::int[])
                    b (queue, n, age, most_bytes),
                LATERAL (
                    SELECT event_id, available_at AS due_at, locked_by AS previous_owner,
                        queue{size}
                    FROM {event}
                    WHERE (queue, available_at) >=
                        (b.queue, {self.now} - b.age * interval '1 second')
                    AND (queue, available_at) <= (b.queue, {until[0]})
                    AND available_at IS NOT NULL AND {wanted}
                    ORDER BY queue, available_at, event_id LIMIT b.n
                    FOR UPDATE SKIP LOCKED) chosen)"""
        given = [
            [each.queue for each in claim.branches], [each.limit for each in claim.branches],
            [CENTURY if each.since is None else each.since for each in claim.branches],
            [min(each.most_bytes or MOST_BYTES, MOST_BYTES) for each in claim.branches],
        ]  # fmt: skip
        if is_cut:  # include a row while those before it have fewer bytes
            due += """, cut AS MATERIALIZED (
                SELECT event_id, due_at, previous_owner, count FROM (
                    SELECT *, count(*) OVER (PARTITION BY queue) AS count,
                        sum(size) OVER (PARTITION BY queue ORDER BY due_at, event_id
                            ROWS UNBOUNDED PRECEDING) - size AS before
                    FROM due) sized
                WHERE before < most_bytes)"""
        return due, [*given, *until[1], *params]

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

    def unclaim(self, connection: BaseDatabaseWrapper, *, me: str, due: Sequence[Unclaimed]) -> int:
        event = self._event(connection)
        fence, params = self._fence(connection, me)
        ids = [each.event_id for each in due]
        return self._run(
            connection,
            f"""WITH unlocked AS MATERIALIZED (
                SELECT event_id FROM {event} WHERE event_id = ANY(%s) AND {fence}
                FOR UPDATE SKIP LOCKED)
            UPDATE {event} e SET
                available_at = v.due_at, queue = v.queue, locked_by = NULL, locked_at = NULL
            FROM unlocked,
                unnest(%s::text[], %s::timestamptz[], %s::text[]) v (event_id, due_at, queue)
            WHERE e.event_id = unlocked.event_id AND v.event_id = unlocked.event_id""",
            [ids, *params, ids, [each.due_at for each in due], [each.queue for each in due]],
        )

    def move(
        self, connection: BaseDatabaseWrapper, *, ids: Sequence[str], queue: str, newest: datetime
    ) -> int:
        event = self._event(connection)
        return self._run(
            connection,
            f"""WITH unlocked AS MATERIALIZED (
                SELECT event_id FROM {event} WHERE event_id = ANY(%s) AND available_at <= %s
                FOR UPDATE SKIP LOCKED)
            UPDATE {event} e SET queue = %s
            FROM unlocked WHERE e.event_id = unlocked.event_id""",
            [[*ids], newest, queue],
        )

    def _in_queue(
        self, queue: str, *, column: str, after: SQL | None = None, until: SQL | None = None,
    ) -> SQL:  # fmt: skip
        sql, params = [], []
        low, low_params = after or ("'-infinity'", [])
        sql.append(f"(queue, {column}) >= (%s, {low})")
        params += [queue, *low_params]
        high, high_params = until or ("'infinity'", [])
        sql.append(f"(queue, {column}) <= (%s, {high})")
        params += [queue, *high_params]
        return " AND ".join([*sql, f"{column} IS NOT NULL"]), params

    def _in_utc(self, instant: str) -> str:
        return utc(instant)

    def _one_of(self, ids: Collection[str]) -> SQL:
        return "event_id = ANY(%s)", [[*ids]]  # one parameter: parsing 500 took a tenth of a drain


def utc(column: str) -> str:
    """Return SQL for an instant without time zone: with USE_TZ=False drivers return local time."""
    return f"{column} AT TIME ZONE 'UTC'"
