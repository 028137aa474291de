"""SQLite: upkeep, and the settings of the engine's connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import OperationalError

from ...clocks import monotonic
from ..base.upkeep import Upkeep

KEPT = 32  # compiled statements to cache; each list length needs one, and 500 ids take 0.1 MB
STEPS = 10_000  # of SQLite's machine, under a millisecond, between two looks at the clock


class SQLiteUpkeep(Upkeep):
    def _estimate(self) -> tuple[str, list[Any]]:
        table = self._event  # rowids are consecutive; deleted rows are before the first
        return f"SELECT (SELECT MAX(rowid) FROM {table}) - (SELECT MIN(rowid) FROM {table}) + 1", []

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        self.connection.ensure_connection()
        end, database = monotonic() + seconds, self.connection.connection
        database.set_progress_handler(lambda: monotonic() > end, STEPS)
        try:
            yield
        finally:
            database.set_progress_handler(None, STEPS)

    def is_lock_wait(self, error: BaseException) -> bool:
        return isinstance(error, OperationalError) and "locked" in str(error)

    def is_missing_table(self, error: BaseException) -> bool:
        return isinstance(error, OperationalError) and "no such table" in str(error)

    def version_text(self) -> str:
        return ""

    def prepare_engine(self, settings: dict[str, Any], *, lock_wait: float) -> None:
        mine = {"timeout": lock_wait, "transaction_mode": "IMMEDIATE", "cached_statements": KEPT}
        settings["OPTIONS"] = {**settings.get("OPTIONS", {}), **mine}
