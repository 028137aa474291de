"""SQL that claims due events without a transaction: a SELECT, then a conditional UPDATE by key.

If several workers select the same rows, the first UPDATE leases them, and the others read back
which rows they own. On MariaDB at READ COMMITTED, this was 1.6 to 2.1 times faster than a SELECT …
FOR UPDATE SKIP LOCKED before the UPDATE. It caused no deadlock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..events import ACTIVE, stored_instant
from .statements import Statements
from .values import Claim, Claimed, Past, Row, claimed, marks, to_database

logger = logging.getLogger("django_outbox")

AT_ONCE = 25  # rows to fetch before their payload size is checked


class Claiming(Statements):
    def claim(self, connection: BaseDatabaseWrapper, claim: Claim) -> Claimed:
        """Lease due rows; return their ``claim.columns`` + TAIL, oldest due first."""
        seen = self._look(connection, claim)
        rows = self._take(connection, claim, seen)
        if seen and not rows:  # others leased or locked them: more may be due behind
            seen = self._look(connection, claim, self._skip(connection))
            rows = self._take(connection, claim, seen)
        found = [self._found(row, claim) for row in rows]
        limit = len(seen) if claim.is_cut(seen) else claim.limit
        return claimed(found, seen=seen, limit=limit, due=-3)

    def _look(self, connection: BaseDatabaseWrapper, claim: Claim, lock: str = "") -> list[Row]:
        where, params = self._where(connection, claim)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {', '.join(claim.columns)}, available_at, locked_by, {self.now} "
                f"FROM {self._table(connection)} WHERE {where} "
                f"ORDER BY available_at, event_id LIMIT %s{lock}",
                [*params, claim.limit],
            )
            rows: list[Row] = []
            while not claim.is_cut(rows) and (some := cursor.fetchmany(AT_ONCE)):
                rows += some
            return rows

    def _take(self, connection: BaseDatabaseWrapper, claim: Claim, rows: list[Row]) -> list[Row]:
        """Lease the selected rows; return those that the worker owns now."""
        if not rows:
            return []
        ids = [row[0] for row in rows]
        newest = stored_instant(max(row[-3] for row in rows))
        assert newest is not None
        set_sql, set_params = self._lease(claim)
        taken = self._update_unlocked(
            connection, "outbox_event", set_sql, set_params,
            # A row that was settled since the SELECT has a later due time, or none.
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
        """Return the assignments of a lease; ``was`` is the column with the previous owner."""
        rescued = f"CASE WHEN {was} IS NULL OR {was} = %s THEN 0 ELSE 1 END"
        lease = f"locked_by = %s, locked_at = {self.now}, available_at = {self.plus}"
        return f"rescues = rescues + {rescued}, {lease}", [claim.me, claim.me, claim.lease]

    def _mine(self, connection: BaseDatabaseWrapper, me: str, ids: Sequence[str]) -> set[str]:
        """Return which of these rows ``me`` owns with a lease that has not expired."""
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT event_id FROM {self._table(connection)} "
                f"WHERE event_id IN ({marks(ids)}) AND locked_by = %s "
                f"AND available_at > {self.now}",
                [*ids, me],
            )
            return {row[0] for row in cursor.fetchall()}

    def _found(self, row: Row, claim: Claim) -> Row:
        """Return a row that was read before its UPDATE with the rescue that the UPDATE counted."""
        was = row[-2]
        rescued = 0 if was is None or was == claim.me else 1
        return (*row[:2], row[2] + rescued, *row[3:])

    def left_behind(
        self, connection: BaseDatabaseWrapper, *, me: str, among: int
    ) -> tuple[datetime | None, bool, float]:
        """Scan the ``among`` rows due first for those that lost workers left.

        Return the latest due time of rows that were lost once, whether there is a suspect, and the
        seconds that the first row of all has been due.
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
        """Return the seconds until the next row, stream or lease end is due; None if there is none.

        What became due in the last ``since`` seconds, after the previous claim, counts too.
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
