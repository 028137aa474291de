"""Places in streams: the upsert of a key's row lets one writer at a time through, until commit.

So the order of ``seq`` is the order of commits, whatever the clocks say. ``seq`` is also the
stream's version: whatever makes an event pending raises it in the same transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import current
from .statements import Statements
from .vocabulary import marks

Places = Sequence[tuple[str, int]]  # keys, sorted, and how many places in each

KEYS = 400  # per statement: two parameters each stay below the 999 of an old SQLite

# When a stream becomes due. A head that waits for its retry keeps its followers waiting …
UNLESS_SET = "COALESCE({row}due_at, {now})"
# … or not: then only a lease is left alone.
UNLESS_LEASED = "CASE WHEN {row}locked_by IS NULL THEN {now} ELSE {row}due_at END"


class Numbering(Statements):
    def number(self, connection: BaseDatabaseWrapper, counts: Mapping[str, int]) -> dict[str, int]:
        """Take ``counts[key]`` places in each stream and make it due; return the last ones.

        A fresh stream starts at the clock, so that a purge never sends a key backwards.
        """
        last: dict[str, int] = {}
        for places in _parts(counts):
            last.update(self._number(connection, places))
        return last

    def wake(self, connection: BaseDatabaseWrapper, keys: Sequence[str]) -> None:
        """Give streams a new version and make them due, be they purged or waiting for a retry."""
        for places in _parts(dict.fromkeys(keys, 1)):
            self._run(connection, *self._upsert(connection, places, due=UNLESS_LEASED))

    def failing_isolation(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return this connection's isolation level if a writer who waited for a key fails at it."""
        return None

    def _number(self, connection: BaseDatabaseWrapper, places: Places) -> Mapping[str, int]:
        self._run(connection, *self._upsert(connection, places, due=due_of_followers()))
        streams, key = self._streams(connection)
        keys = [key for key, _ in places]
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {key}, seq FROM {streams} WHERE {key} IN ({marks(keys)})", keys)
            return dict(cursor.fetchall())

    def _upsert(
        self, connection: BaseDatabaseWrapper, places: Places, *, due: str
    ) -> tuple[str, list[Any]]:
        """One statement, and its parameters; the rows are locked in the order of ``places``."""
        streams, key = self._streams(connection)
        rows = ", ".join([f"(%s, {self.micros} + %s, {self.now})"] * len(places))
        sql = (
            f"INSERT INTO {streams} AS st ({key}, seq, due_at) VALUES {rows} "
            # The clock stands still within a statement: what is left of it is the places taken.
            f"ON CONFLICT ({key}) DO UPDATE SET seq = st.seq + 1 + EXCLUDED.seq - {self.micros}, "
            f"due_at = {due.format(row='st.', now=self.now)}"
        )
        return sql, upsert_values(places)


def upsert_values(places: Places) -> list[Any]:
    return [value for key, count in places for value in (key, count - 1)]


def due_of_followers() -> str:
    settings = current()
    if settings.MODE == "writer_only":  # nobody leases; the purge asks when it was written to last
        return UNLESS_LEASED
    return UNLESS_SET if settings.STOP_ON_FIRST_FAILURE else UNLESS_LEASED


def _parts(counts: Mapping[str, int]) -> Iterator[Places]:
    """Cut into statements. Sorted: writers who take the same keys wait instead of deadlocking."""
    places = sorted(counts.items())
    for start in range(0, len(places), KEYS):
        yield places[start : start + KEYS]
