"""Leases that are kept, and given back: those of events, and the one of ``single_node``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from django.db.backends.base.base import BaseDatabaseWrapper

from ..events import ACTIVE
from .inserting import Inserting
from .vocabulary import Hold, renewed_of


class Keeping(Inserting):
    def renew(
        self, connection: BaseDatabaseWrapper, *, me: str, ids: Sequence[str], lease: float
    ) -> tuple[set[str], set[str]]:
        """Prolong my leases of these rows; return (renewed, still mine).

        Rows that somebody has locked are passed over: they are just being settled.
        """
        among, params = self._among(ids)
        taken = self._update_unlocked(
            connection, "outbox_event", f"available_at = {self.plus}", [lease],
            f"{among} AND locked_by = %s AND available_at IS NOT NULL", [*params, me],
        )  # fmt: skip
        if taken == len(ids):
            return set(ids), set(ids)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT event_id, available_at FROM {self._table(connection)} "
                f"WHERE {among} AND locked_by = %s",
                [*params, me],
            )
            return renewed_of(cursor.fetchall(), taken)

    def release(self, connection: BaseDatabaseWrapper, *, me: str, ids: Collection[str]) -> int:
        """Give leases back unstarted: due now, nothing counted; return how many were mine."""
        among, params = self._among(ids)
        return self._update_unlocked(
            connection, "outbox_event",
            f"available_at = {self.now}, locked_by = NULL, locked_at = NULL", [],
            f"{among} AND {self._fence(connection, Hold.ROW)}", [*params, me],
        )  # fmt: skip

    def hold_active(self, connection: BaseDatabaseWrapper, *, me: str, lease: float) -> bool:
        """Take or keep the lease of ``single_node``; say whether it is ours."""
        stream, key = self._streams(connection)
        taken = self._run(
            connection,
            f"UPDATE {stream} SET locked_by = %s, locked_at = {self.now}, due_at = {self.plus} "
            f"WHERE {key} = %s AND (locked_by = %s OR locked_by IS NULL OR due_at <= {self.now})",
            [me, lease, ACTIVE, me],
        )
        if taken:
            return True
        sql = f"INSERT INTO {stream} ({key}, seq) VALUES (%s, 0)"
        made = self._insert(connection, sql, [ACTIVE], may_clash=True)
        return made == 1 and self.hold_active(connection, me=me, lease=lease)

    def release_active(self, connection: BaseDatabaseWrapper, *, me: str) -> None:
        stream, key = self._streams(connection)
        self._run(
            connection,
            f"UPDATE {stream} SET locked_by = NULL, due_at = NULL WHERE {key} = %s "
            "AND locked_by = %s",
            [ACTIVE, me],
        )
