"""SQL that renews and gives back leases: of events, of named work, and of ``single_node``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper

from ..events import ACTIVE
from .inserting import Inserting
from .values import Hold, renewed_of, to_database


class Leasing(Inserting):
    def renew(
        self, connection: BaseDatabaseWrapper, *, me: str, ids: Sequence[str], lease: float
    ) -> tuple[set[str], set[str]]:
        """Renew ``me``'s leases of these rows for ``lease`` seconds; return (renewed, still held).

        Locked rows are skipped, because they are just being settled.
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
        """Release leases: due now, no attempt counted; return how many ``me`` held."""
        among, params = self._among(ids)
        return self._update_unlocked(
            connection, "outbox_event",
            f"available_at = {self.now}, locked_by = NULL, locked_at = NULL", [],
            f"{among} AND {self._fence(connection, Hold.ROW)}", [*params, me],
        )  # fmt: skip

    def put_back(
        self, connection: BaseDatabaseWrapper, *, me: str, due: Sequence[tuple[str, datetime]]
    ) -> int:
        """Release leases, each with the due time that its event had before the claim.

        Return how many ``me`` held. Locked rows stay leased, and are renewed.
        """
        count = 0
        for start in range(0, len(due), self.bound):
            some = due[start : start + self.bound]
            among, params = self._among([event_id for event_id, _ in some])
            times = [(event_id, to_database(at, connection)) for event_id, at in some]
            count += self._update_unlocked(
                connection, "outbox_event",
                f"available_at = CASE event_id {'WHEN %s THEN %s ' * len(some)}END, "
                "locked_by = NULL, locked_at = NULL", [value for each in times for value in each],
                f"{among} AND {self._fence(connection, Hold.ROW)}", [*params, me],
            )  # fmt: skip
        return count

    def hand_back(
        self, connection: BaseDatabaseWrapper, *, me: str, ids: Collection[str], after: float | None
    ) -> int:
        """Give back leases whose listeners still run; return how many ``me`` held, if not locked.

        The rows are due ``after`` seconds from now; with None, when their leases would have ended.
        """
        due, values = ("", []) if after is None else (f"available_at = {self.plus}, ", [after])
        among, params = self._among(ids)
        return self._update_unlocked(
            connection, "outbox_event", f"{due}locked_by = NULL, locked_at = NULL", values,
            f"{among} AND {self._fence(connection, Hold.ROW)}", [*params, me],
        )  # fmt: skip

    def take_lease(
        self, connection: BaseDatabaseWrapper, *, name: str, me: str, lease: float
    ) -> bool:
        """Claim or renew the named lease for ``lease`` seconds; return whether ``me`` holds it."""
        table = self._table(connection, "outbox_lease")
        taken = self._run(
            connection,
            f"UPDATE {table} SET locked_by = %s, locked_until = {self.plus} WHERE name = %s "
            f"AND (locked_by = %s OR locked_by IS NULL OR locked_until <= {self.now})",
            [me, lease, name, me],
        )
        if taken:
            return True
        sql = f"INSERT INTO {table} (name) VALUES (%s)"
        made = self._insert(connection, sql, [name], may_clash=True)
        return made == 1 and self.take_lease(connection, name=name, me=me, lease=lease)

    def note_lease(
        self, connection: BaseDatabaseWrapper, *, name: str, me: str, lease: float | None,
        state: str,
    ) -> bool:  # fmt: skip
        """Save the state of a named lease; renew it for ``lease`` seconds, or with None release it.

        Return whether ``me`` held it.
        """
        until = "NULL" if lease is None else self.plus
        noted = self._run(
            connection,
            f"UPDATE {self._table(connection, 'outbox_lease')} SET state = %s, locked_by = %s, "
            f"locked_until = {until} WHERE name = %s AND locked_by = %s",
            [state, None if lease is None else me, *([] if lease is None else [lease]), name, me],
        )
        return noted == 1

    def hold_active(self, connection: BaseDatabaseWrapper, *, me: str, lease: float) -> bool:
        """Claim or renew the lease of ``single_node``; return whether ``me`` holds it."""
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
