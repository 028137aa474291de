"""SQL for SQLite: one writer at a time; times are UTC text of 26 characters, by the host clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..listeners.outcomes import Decision
from .dialect import Dialect
from .values import AsRead, Hold, settle_values

KEPT = 32  # compiled statements to cache; each list length needs one, and 500 ids take 0.1 MB


class SQLite(Dialect):
    """Uses the optimistic claim unchanged: each of its statements takes the one write lock itself.

    RETURNING would not save the SELECT, because here it cannot return the due time it overwrote.
    The clock is SQLite's own, so that all processes share it. It has a resolution of 1 ms.
    """

    now = "strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')"
    plus = "strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')"
    micros = (
        "(CAST(strftime('%%s', 'now') AS INTEGER) * 1000000 "
        "+ CAST(substr(strftime('%%f', 'now'), 4) AS INTEGER) * 1000)"
    )
    bound = 500

    def version_text(self, connection: BaseDatabaseWrapper) -> str:
        return ""

    def _settle(
        self,
        connection: BaseDatabaseWrapper,
        me: str,
        decisions: Sequence[tuple[str, Decision]],
        hold: Hold,
        as_read: AsRead | None,
    ) -> int:
        same, read = self._same(as_read, of="e.")
        rows = ", ".join(["(%s, %s, %s, %s, %s, %s)"] * len(decisions))
        due = self.plus.replace("%s", "v.delay")
        # Not WITH v AS (…), because the driver counts rows only if a statement begins with UPDATE.
        return self._run(
            connection,
            f"UPDATE {self._table(connection)} AS e SET status = v.status, "
            f"attempts = e.attempts + v.spent, rescues = 0, {hold.value} = {due}, "
            f"done_at = CASE WHEN v.delay IS NULL THEN {self.now} END, "
            "last_error = COALESCE(v.error, e.last_error), "
            "progress = COALESCE(v.progress, e.progress), locked_by = NULL, locked_at = NULL "
            "FROM (SELECT column1 AS event_id, column2 AS status, column3 AS spent, "
            "column4 AS delay, column5 AS error, column6 AS progress "
            f"FROM (VALUES {rows})) AS v WHERE e.event_id = v.event_id "
            f"AND {self._fence(connection, hold, of='e')}{same}",
            [value for each in decisions for value in settle_values(*each)] + [me, *read],
        )

    def estimated_rows(self, connection: BaseDatabaseWrapper) -> int:
        table = self._table(connection)  # rowids are consecutive; deleted rows are before the first
        sql = f"SELECT (SELECT MAX(rowid) FROM {table}) - (SELECT MIN(rowid) FROM {table}) + 1"
        return self._estimate(connection, sql, [])

    def prepare_engine(self, settings: dict[str, Any], *, lock_wait: float) -> None:
        mine = {
            "timeout": lock_wait,
            "transaction_mode": "IMMEDIATE",
            "cached_statements": KEPT,
        }
        settings["OPTIONS"] = {**settings.get("OPTIONS", {}), **mine}
