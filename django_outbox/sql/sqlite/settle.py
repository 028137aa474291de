"""SQLite: settling of events."""

from __future__ import annotations

from collections.abc import Sequence

from django.db.backends.base.base import BaseDatabaseWrapper

from ..base.routes import Routing
from ..values import SETTLED, Ending, LeaseKind, marks, settle_values


class SQLiteSettling(Routing):
    row_lock = ""

    def settle(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        endings: Sequence[Ending],
        kind: LeaseKind = LeaseKind.ROW,
    ) -> int:
        fence, params = self._fence(connection, me, ("= v.locked_at", []), kind, of="e")
        rows = ", ".join([f"({marks(SETTLED)})"] * len(endings))
        columns = ", ".join(f"column{n} AS {name}" for n, name in enumerate(SETTLED, 1))
        due = self.now_plus.replace("%s", "v.delay")
        return self._run(
            connection,
            # Not WITH v AS (…), because the driver counts rows only if a statement begins with
            # UPDATE.
            f"""UPDATE {self._event(connection)} AS e SET
                status = v.status, attempts = e.attempts + v.spent, rescues = 0,
                {kind.value} = {due}, done_at = CASE WHEN v.delay IS NULL THEN {self.now} END,
                last_error = COALESCE(v.error, e.last_error), cause = COALESCE(v.cause, e.cause),
                history = COALESCE(v.history, e.history), queue = COALESCE(v.queue, e.queue),
                locked_by = NULL, locked_at = NULL
            FROM (
                SELECT {columns} FROM (VALUES {rows})) AS v
            WHERE e.id = v.id AND e.attempts = v.attempts AND {fence}""",
            [value for each in endings for value in settle_values(each, connection)] + params,
        )
