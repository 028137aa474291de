"""SQLite: settling of events."""

from __future__ import annotations

from collections.abc import Sequence

from django.db.backends.base.base import BaseDatabaseWrapper

from ...listeners.outcomes import Decision
from ..base.settle import Settling
from ..values import SETTLED, AsRead, LeaseKind, marks, settle_values


class SQLiteSettling(Settling):
    reads_what_it_claims = False

    def settle_done(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        ids: Sequence[str],
        kind: LeaseKind = LeaseKind.ROW,
        as_read: AsRead | None = None,
    ) -> int:
        fence, params = self._fence(connection, me, kind, as_read)
        return self._run(
            connection,
            f"""UPDATE {self._event(connection)} SET status = 1, done_at = {self.now},
                available_at = NULL, locked_by = NULL, locked_at = NULL
            WHERE event_id IN ({marks(ids)}) AND {fence}""",
            [*ids, *params],
        )

    def delete_done(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        ids: Sequence[str],
        kind: LeaseKind = LeaseKind.ROW,
        as_read: AsRead | None = None,
    ) -> int:
        fence, params = self._fence(connection, me, kind, as_read)
        return self._run(
            connection,
            f"""DELETE FROM {self._event(connection)}
            WHERE event_id IN ({marks(ids)}) AND {fence} AND unique_key IS NULL""",
            [*ids, *params],
        )

    def settle(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        decisions: Sequence[tuple[str, Decision]],
        kind: LeaseKind = LeaseKind.ROW,
        as_read: AsRead | None = None,
    ) -> int:
        fence, params = self._fence(connection, me, kind, as_read, of="e")
        rows = ", ".join([f"({marks(SETTLED)})"] * len(decisions))
        columns = ", ".join(f"column{n} AS {name}" for n, name in enumerate(SETTLED, 1))
        due = self.now_plus.replace("%s", "v.delay")
        return self._run(
            connection,
            # Not WITH v AS (…), because the driver counts rows only if a statement begins with
            # UPDATE.
            f"""UPDATE {self._event(connection)} AS e SET
                status = v.status, attempts = e.attempts + v.spent, rescues = 0,
                {kind.value} = {due}, done_at = CASE WHEN v.delay IS NULL THEN {self.now} END,
                last_error = COALESCE(v.error, e.last_error),
                progress = COALESCE(v.progress, e.progress), queue = COALESCE(v.queue, e.queue),
                locked_by = NULL, locked_at = NULL
            FROM (
                SELECT {columns} FROM (VALUES {rows})) AS v
            WHERE e.event_id = v.event_id
            AND e.attempts = COALESCE(v.attempts, e.attempts) AND {fence}""",
            [value for each in decisions for value in settle_values(*each)] + params,
        )

    def keep_progress(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        event_id: str,
        progress: str,
        as_read: AsRead,
        kind: LeaseKind = LeaseKind.ROW,
    ) -> bool:
        fence, params = self._fence(connection, me, kind, as_read)
        written = self._run(
            connection,
            f"UPDATE {self._event(connection)} SET progress = %s WHERE event_id = %s AND {fence}",
            [progress, event_id, *params],
        )
        return written == 1
