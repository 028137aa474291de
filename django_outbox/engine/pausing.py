"""What is paused, as this worker last read it; what is due and paused makes way for the rest."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from math import inf
from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import dialects
from ..delivery import is_paused
from ..dialects.vocabulary import Pauses
from ..events import stored_instant

EVERY: Final = 1.0  # seconds after which the table is read again before anything is claimed
AFTER_A_RING: Final = 0.05  # the same, where somebody rang
AT_ONCE: Final = 500  # due rows that are looked through together
MARGIN: Final = timedelta(seconds=1)  # as in a claim: what committed late


class Pausing:
    """Written by the thread that claims; the others read ``pauses``."""

    def __init__(self) -> None:
        self.pauses: Pauses = frozenset()
        self._read_at = -inf  # monotonic
        self._low: datetime | None = None  # due times below are looked through already

    def look(self, connection: BaseDatabaseWrapper, *, rung: bool = False) -> None:
        """Read the table, if that was not done just now."""
        # While nothing is paused a ring tells of events alone, and no event waits for this look.
        every = AFTER_A_RING if rung and self.pauses else EVERY
        if time.monotonic() >= self._read_at + every:
            self.read(connection)

    def read(self, connection: BaseDatabaseWrapper) -> None:
        self._read_at = time.monotonic()
        self.pauses = dialects.of(connection).pauses(connection)

    def holds(self, row: Any, *, key: str | None = None) -> bool:
        """Say whether a row is paused that begins with event type, aggregate type and progress."""
        return is_paused(self.pauses, row[0], row[1], row[2], key)

    def clear(self, connection: BaseDatabaseWrapper, limit: int) -> int:
        """Postpone what is due first and paused; return how many rows a claim may ask for.

        So the claim is the same statement as ever, and never reads through what is paused. It may
        ask for none while more of that waits in front.
        """
        if not self.pauses:
            return limit
        dialect = dialects.of(connection)
        rows = dialect.due_first(connection, limit=AT_ONCE, low=self._low)
        held = [row[3] for row in rows if self.holds(row)]
        is_full = len(rows) == AT_ONCE
        oldest = stored_instant(rows[0][4]) if is_full else None
        self._low = oldest - MARGIN if oldest else None
        if held:
            newest = stored_instant(rows[-1][4])
            assert newest is not None  # it is due
            count, found = dialect.postpone(connection, ids=held, newest=newest, pauses=self.pauses)
            if found != self.pauses:
                self.pauses, self._read_at = found, time.monotonic()
                return 0
            if not count:  # others have them locked; what a claim brings of them is sent back
                return limit
        return min(limit, len(rows) - len(held)) if is_full else limit
