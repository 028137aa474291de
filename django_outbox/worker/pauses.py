"""Caches what is paused, and postpones paused events that are due, so that others get through."""

from __future__ import annotations

from datetime import datetime, timedelta
from math import inf
from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..delivery.paused import is_paused
from ..events import stored_instant
from ..sql import dialect_of
from ..sql.values import Pauses

READ_INTERVAL: Final = 1.0  # seconds after which the table is read again before a claim
# Seconds; the same after a notification, while something is paused.
NOTIFIED_READ_INTERVAL: Final = 0.05
CHECK_BATCH: Final = 500  # due rows that are checked together
LATE_COMMIT_MARGIN: Final = timedelta(seconds=1)  # for rows that commit late, as in a claim


class KnownPauses:
    """What is paused. Only the thread that claims updates it; other threads read ``pauses``."""

    def __init__(self) -> None:
        self.pauses: Pauses = frozenset()
        self._read_at = -inf  # monotonic
        self._watermark: datetime | None = None  # rows due before this are checked already

    def refresh(self, connection: BaseDatabaseWrapper, *, notified: bool = False) -> None:
        """Read the pauses from the table, unless that was done just now."""
        # While nothing is paused, a notification is about events, which must not wait for this.
        interval = NOTIFIED_READ_INTERVAL if notified and self.pauses else READ_INTERVAL
        if monotonic() >= self._read_at + interval:
            self.read(connection)

    def read(self, connection: BaseDatabaseWrapper) -> None:
        self._read_at = monotonic()
        self.pauses = dialect_of(connection).pauses(connection)

    def is_paused_row(self, row: Any, *, key: str | None = None) -> bool:
        """Return whether a row is paused; it begins with event type, aggregate type, progress."""
        return is_paused(self.pauses, row[0], row[1], row[2], key)

    def postpone_due(self, connection: BaseDatabaseWrapper, limit: int) -> int:
        """Postpone paused rows among those due first; return how many rows a claim may ask for.

        So the claim needs no other statement, and never scans paused rows. The result is 0 while
        there may be more paused rows in front.
        """
        if not self.pauses:
            return limit
        dialect = dialect_of(connection)
        rows = dialect.due_first(connection, limit=CHECK_BATCH, since=self._watermark)
        held = [row[3] for row in rows if self.is_paused_row(row)]
        is_full = len(rows) == CHECK_BATCH
        oldest = stored_instant(rows[0][4]) if is_full else None
        self._watermark = oldest - LATE_COMMIT_MARGIN if oldest else None
        if held:
            newest = stored_instant(rows[-1][4])
            assert newest is not None  # it is due
            count, found = dialect.postpone(connection, ids=held, newest=newest, pauses=self.pauses)
            if found != self.pauses:
                self.pauses, self._read_at = found, monotonic()
                return 0
            if not count:  # others have them locked; if a claim gets some, they are deferred
                return limit
        return min(limit, len(rows) - len(held)) if is_full else limit
