"""SQLite: leases of events. No row is ever locked, because there is one writer at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain

from django.db.backends.base.base import BaseDatabaseWrapper

from ..base.claim import EventLeases
from ..values import INSTANTS, QUEUE, SQL, Claim, Claimed, Column, Row, claimed, instant, marks

logger = logging.getLogger("django_outbox")

AT_ONCE = 25  # rows to fetch before their payload size is checked


class SQLiteEventLeases(EventLeases):
    def claim(self, connection: BaseDatabaseWrapper, claim: Claim) -> Claimed:
        # A SELECT, then a conditional UPDATE by key, because RETURNING cannot return the due time
        # that it overwrote. If several workers select the same rows, the first UPDATE leases them.
        seen, cut = self._select_due(connection, claim)
        rows = self._lease(connection, claim, seen)
        if seen and not rows:  # others leased them: more may be due behind
            seen, cut = self._select_due(connection, claim)
            rows = self._lease(connection, claim, seen)
        return claimed(rows, seen=seen, branches=claim.branches, due=-3, queue=QUEUE, cut=cut)

    def _select_due(
        self, connection: BaseDatabaseWrapper, claim: Claim
    ) -> tuple[list[Row], set[str]]:
        """Return the due rows, and of which queues only some."""
        # The plus keeps the driver from parsing times, most of which are never read.
        columns = ", ".join(f"+{name}" if name in INSTANTS else name for name in claim.columns)
        sql, params = union(
            [
                (
                    f"""SELECT {columns}, +available_at AS due_at, locked_by, {self.now}
            FROM {self._event(connection)} WHERE {where}""",
                    given,
                )
                for where, given in self._branches(connection, claim)
            ]
        )
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            batches = iter(lambda: cursor.fetchmany(AT_ONCE), [])
            kept, cut = claim.cut(chain.from_iterable(batches))
        return sorted(kept, key=lambda row: (row[-3], row[0])), cut

    def _lease(self, connection: BaseDatabaseWrapper, claim: Claim, rows: list[Row]) -> list[Row]:
        """Lease the selected rows; return those that the worker owns now, as they are now."""
        if not rows:
            return []
        event, ids, me = self._event(connection), [row[0] for row in rows], claim.me
        by_attempts: dict[int, list[str]] = {}
        for row in rows:
            by_attempts.setdefault(row[1], []).append(row[0])
        as_seen = [f"id IN ({marks(each)}) AND attempts = %s" for each in by_attempts.values()]
        seen = [value for spent, each in by_attempts.items() for value in (*each, spent)]
        newest, leased_at = instant(max(row[-3] for row in rows), connection), rows[0][-1]
        taken = self._run(
            connection,
            # A row that was settled since the SELECT has a later due time, or none; or another
            # attempt, if it is retried within the same millisecond. The plus keeps it from reading
            # the rows of all queues by an index of due times.
            f"""UPDATE {event} SET
                rescues = rescues + CASE WHEN locked_by IS NULL OR locked_by = %s THEN 0 ELSE 1 END,
                locked_by = %s, locked_at = %s, available_at = {self.now_plus}
            WHERE ({" OR ".join(as_seen)}) AND +available_at <= %s AND {claim.state.value}""",
            [me, me, leased_at, claim.lease, *seen, newest, me],
        )
        if taken < len(rows):
            logger.debug("others were faster rows=%d taken=%d", len(rows), taken)
            with connection.cursor() as cursor:
                cursor.execute(
                    f"""SELECT id FROM {event} WHERE id IN ({marks(ids)})
                    AND locked_by = %s AND locked_at = %s""",
                    [*ids, me, leased_at],
                )
                mine = {row[0] for row in cursor.fetchall()}
            rows = [row for row in rows if row[0] in mine]
        # Each with the rescue that the UPDATE counted, and the instant of its lease.
        return [
            (*row[:2], row[2] + (row[-2] not in (None, me)), *row[3:-1], leased_at) for row in rows
        ]

    def _update_unlocked(
        self, connection: BaseDatabaseWrapper, table: str, *, changes: SQL, where: SQL
    ) -> int:
        sql = f"UPDATE {self._table(connection, table)} AS e SET {changes[0]} WHERE {where[0]}"
        return self._run(connection, sql, [*changes[1], *where[1]])

    def _update_each(
        self,
        connection: BaseDatabaseWrapper,
        table: str,
        *,
        given: Sequence[Column],
        changes: str,
        where: SQL,
        skip_locked: bool = False,
    ) -> SQL:
        rows = [*zip(*[each.values for each in given], strict=True)]
        columns = ", ".join(f"column{n} AS {each.name}" for n, each in enumerate(given, 1))
        key = given[0].name
        # Not WITH v AS (…): the driver counts rows only if a statement begins with UPDATE.
        values = ", ".join([f"({marks(given)})"] * len(rows))
        sql = f"""UPDATE {self._table(connection, table)} AS e SET {changes}
            FROM (SELECT {columns} FROM (VALUES {values})) AS v
            WHERE e.{key} = v.{key} AND {where[0]}"""
        return sql, [*chain.from_iterable(rows), *where[1]]


def union(selects: Sequence[SQL]) -> SQL:
    """Return one statement with the rows of all these."""
    if len(selects) == 1:
        return selects[0]
    sql = " UNION ALL ".join([f"SELECT * FROM ({sql})" for sql, _ in selects])
    return sql, [value for _, params in selects for value in params]
