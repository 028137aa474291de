"""Leasing rows without a transaction: a plain SELECT and a conditional UPDATE by primary keys.

What several workers saw at once goes to the first UPDATE; the others read back what carries their
own name. At READ COMMITTED this was 1.6 to 2.1 times faster on MariaDB than a SELECT … FOR UPDATE
SKIP LOCKED before the UPDATE, without a deadlock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..events import ACTIVE, stored_instant
from .fields import to_database
from .statements import Statements
from .vocabulary import Claim, Claimed, Past, Row, claimed, marks

logger = logging.getLogger("django_outbox")


class Claiming(Statements):
    def claim(self, connection: BaseDatabaseWrapper, claim: Claim) -> Claimed:
        """Lease rows; return ``claim.columns`` + TAIL, oldest due first."""
        seen = self._look(connection, claim)
        rows = self._take(connection, claim, seen)
        if seen and not rows:  # others have them by now, or locked: there may be more behind
            seen = self._look(connection, claim, self._skip(connection))
            rows = self._take(connection, claim, seen)
        found = [self._found(row, claim) for row in rows]
        return claimed(found, seen=seen, limit=claim.limit, due=-3)

    def _look(self, connection: BaseDatabaseWrapper, claim: Claim, lock: str = "") -> list[Row]:
        where, params = self._where(connection, claim)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {', '.join(claim.columns)}, available_at, locked_by, {self.now} "
                f"FROM {self._table(connection)} WHERE {where} "
                f"ORDER BY available_at, event_id LIMIT %s{lock}",
                [*params, claim.limit],
            )
            return list(cursor.fetchall())

    def _take(self, connection: BaseDatabaseWrapper, claim: Claim, rows: list[Row]) -> list[Row]:
        """Lease rows that were seen; return those that are mine now."""
        if not rows:
            return []
        ids = [row[0] for row in rows]
        newest = stored_instant(max(row[-3] for row in rows))
        assert newest is not None
        set_sql, set_params = self._lease(claim)
        taken = self._update_unlocked(
            connection, "outbox_event", set_sql, set_params,
            # Whoever settled a row since our look gave it a later due time, or none.
            f"event_id IN ({marks(ids)}) AND available_at <= %s AND {claim.past.value}",
            [*ids, to_database(newest, connection), claim.me],
        )  # fmt: skip
        if taken < len(rows):
            logger.debug("others were faster rows=%d taken=%d", len(rows), taken)
            mine = self._mine(connection, claim.me, ids)
            rows = [row for row in rows if row[0] in mine]
        return rows

    def _where(self, connection: BaseDatabaseWrapper, claim: Claim) -> tuple[str, list[Any]]:
        parts, params = [f"available_at <= {self.now}"], []
        if claim.at is not None:
            parts, params = ["available_at <= %s"], [to_database(claim.at, connection)]
        if claim.since is not None:
            parts.append(f"available_at >= {self.plus}")
            params.append(-claim.since)
        if claim.ids is not None:
            among, those = self._among(claim.ids)
            parts.append(among)
            params += those
        if claim.skip_recent:
            parts.append(f"created_at <= {self.plus}")
            params.append(-claim.skip_recent)
        if claim.exclude:
            among, those = self._among(claim.exclude)
            parts.append(f"NOT ({among})")
            params += those
        parts.append(claim.past.value)
        params.append(claim.me)
        return " AND ".join(parts), params

    def _lease(self, claim: Claim, *, was: str = "locked_by") -> tuple[str, list[Any]]:
        """The assignments of a lease; ``was`` is the column with the owner before it."""
        rescued = f"CASE WHEN {was} IS NULL OR {was} = %s THEN 0 ELSE 1 END"
        lease = f"locked_by = %s, locked_at = {self.now}, available_at = {self.plus}"
        return f"rescues = rescues + {rescued}, {lease}", [claim.me, claim.me, claim.lease]

    def _mine(self, connection: BaseDatabaseWrapper, me: str, ids: Sequence[str]) -> set[str]:
        """Return which of these rows carry my name and a live lease."""
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT event_id FROM {self._table(connection)} "
                f"WHERE event_id IN ({marks(ids)}) AND locked_by = %s "
                f"AND available_at > {self.now}",
                [*ids, me],
            )
            return {row[0] for row in cursor.fetchall()}

    def _found(self, row: Row, claim: Claim) -> Row:
        """Bring a row that was read before its UPDATE to what the UPDATE made of it."""
        was = row[-2]
        rescued = 0 if was is None or was == claim.me else 1
        return (*row[:2], row[2] + rescued, *row[3:])

    def left_behind(
        self, connection: BaseDatabaseWrapper, *, me: str, among: int
    ) -> tuple[datetime | None, bool, float]:
        """Walk to the ``among`` rows due first, and say what lost workers left among them.

        Return the latest due time of those that were lost once, whether there is a suspect, and
        the seconds that the first of all has been due.
        """
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT MAX(CASE WHEN {Past.LOST.value} THEN available_at END), "
                f"MAX(CASE WHEN {Past.SUSPECT.value} THEN 1 ELSE 0 END), "
                f"MIN(available_at), {self.now} FROM ("
                f"SELECT rescues, locked_by, available_at FROM {self._table(connection)} "
                f"WHERE available_at <= {self.now} ORDER BY available_at, event_id LIMIT %s) due",
                [me, me, among],
            )
            until, suspect, *first_and_now = cursor.fetchone()
        first, now = map(stored_instant, first_and_now)
        waited = (now - first).total_seconds() if first is not None and now is not None else 0.0
        return stored_instant(until), bool(suspect), waited

    def seconds_to_next_due(
        self, connection: BaseDatabaseWrapper, *, since: float = 0.0
    ) -> float | None:
        """Return the seconds until the next row, stream or lease end falls due; None if none does.

        What fell due in the last ``since`` seconds counts too: behind the claim that went before.
        """
        _, key = self._streams(connection)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT (SELECT available_at FROM {self._table(connection)} "
                f"WHERE available_at > {self.plus} ORDER BY available_at LIMIT 1), "
                f"(SELECT due_at FROM {self._stream_by_due(connection)} WHERE due_at > {self.plus} "
                f"AND {key} <> %s ORDER BY due_at LIMIT 1), {self.now}",
                [-since, -since, ACTIVE],
            )
            *found, now = map(stored_instant, cursor.fetchone())
        due = [each for each in found if each is not None]
        return (min(due) - now).total_seconds() if due and now is not None else None
