"""What is paused is postponed, and brought back when it is resumed; nothing of it is claimed.

A row that is postponed has no owner, but a ``locked_at``: nothing else leaves one so.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper

from .fields import to_database
from .stream_leases import StreamLeases
from .vocabulary import POSTPONED_FOR, Pauses, Row


class Pausing(StreamLeases):
    shared = ""  # what makes a SELECT lock its rows against a change, but not against each other

    def pauses(self, connection: BaseDatabaseWrapper, *, lock: str = "") -> Pauses:
        """Return the kind and name of all that is paused."""
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT kind, name FROM {self._table(connection, 'outbox_pause')}{lock}"
            )
            return frozenset(cursor.fetchall())

    def due_first(
        self, connection: BaseDatabaseWrapper, *, limit: int, low: datetime | None
    ) -> list[Row]:
        """Return event type, aggregate type, progress, id and due time of the rows due first."""
        above, params = ("", []) if low is None else (" AND available_at >= %s", [low])
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT event_type, aggregate_type, progress, event_id, available_at "
                f"FROM {self._table(connection)} WHERE available_at <= {self.now}{above} "
                "ORDER BY available_at, event_id LIMIT %s",
                [*(to_database(each, connection) for each in params), limit],
            )
            return list(cursor.fetchall())

    def postpone(
        self, connection: BaseDatabaseWrapper, *, ids: Sequence[str], newest: datetime,
        pauses: Pauses,
    ) -> tuple[int, Pauses]:  # fmt: skip
        """Make rows that were due until ``newest`` due later; return how many, and all pauses.

        None is, if one of ``pauses`` is over. Until the commit none can end, so that who resumes
        finds every row that was postponed for it.
        """
        with self._unwaiting(connection):
            found = self.pauses(connection, lock=self.shared)
            if not pauses <= found:
                return 0, found
            among, params = self._among(ids)
            where = f"{among} AND available_at <= %s"  # who claimed one since made it due later
            params = [*params, to_database(newest, connection)]
            if connection.features.has_select_for_update_skip_locked:
                with connection.cursor() as cursor:
                    cursor.execute(
                        f"SELECT event_id FROM {self._by_key(connection)} WHERE {where} "
                        "FOR UPDATE SKIP LOCKED",
                        params,
                    )
                    free = [row[0] for row in cursor.fetchall()]
                if not free:
                    return 0, found
                where, params = self._among(free)
            count = self._run(
                connection,
                f"UPDATE {self._by_key(connection)} SET available_at = {self.plus}, "
                f"locked_by = NULL, locked_at = COALESCE(locked_at, {self.now}) WHERE {where}",
                [POSTPONED_FOR, *params],
            )
        return count, found

    def bring_back(self, connection: BaseDatabaseWrapper, *, ids: Sequence[str]) -> int:
        """Make rows that were postponed due now, as if for the first time; return how many."""
        among, params = self._among(ids)
        return self._run(
            connection,
            f"UPDATE {self._by_key(connection)} SET available_at = {self.now}, "
            f"first_due_at = {self.now}, locked_at = NULL "
            f"WHERE {among} AND available_at > {self.now} AND locked_by IS NULL "
            "AND locked_at IS NOT NULL",
            params,
        )
