"""SQL that postpones paused events, so that no claim finds them, and makes them due on resume.

Only a postponed row has a ``locked_at`` but no owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime

from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper

from .stream_leases import StreamLeases
from .values import POSTPONED_FOR, Pauses, Row, to_database


class Pausing(StreamLeases):
    shared = ""  # SQL that locks selected rows against changes, but not against each other

    def pauses(self, connection: BaseDatabaseWrapper, *, lock: str = "") -> Pauses:
        """Return the kind and name of every pause."""
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
        """Postpone rows that were due until ``newest``; return how many, and all pauses.

        Postpone none if one of ``pauses`` has ended. No pause can end before the commit, so a
        resume finds every row that was postponed for it.
        """
        with single_transaction(connection):
            found = self.pauses(connection, lock=self.shared)
            if not pauses <= found:
                return 0, found
            among, params = self._among(ids)
            count = self._update_unlocked(
                connection, "outbox_event",
                f"available_at = {self.plus}, locked_by = NULL, "
                f"locked_at = COALESCE(locked_at, {self.now})", [POSTPONED_FOR],
                # A row that was claimed meanwhile is due later.
                f"{among} AND available_at <= %s", [*params, to_database(newest, connection)],
            )  # fmt: skip
        return count, found

    def bring_back(self, connection: BaseDatabaseWrapper, *, ids: Sequence[str]) -> int:
        """Make postponed rows due now, as if for the first time; return how many."""
        among, params = self._among(ids)
        return self._run(
            connection,
            f"UPDATE {self._by_key(connection)} SET available_at = {self.now}, "
            f"first_due_at = {self.now}, locked_at = NULL "
            f"WHERE {among} AND available_at > {self.now} AND locked_by IS NULL "
            "AND locked_at IS NOT NULL",
            params,
        )


@contextmanager
def single_transaction(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Run the block in a transaction of this connection, unless one is open.

    ``atomic()`` finds a connection by its alias, where an engine's connection need not be.
    """
    if connection.in_atomic_block:
        yield
        return
    connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
    try:
        yield
        connection.commit()
    except BaseException:
        with suppress(DatabaseError):  # the first error is more useful
            connection.rollback()
        raise
    finally:
        connection.set_autocommit(True)
