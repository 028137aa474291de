"""PostgreSQL: settling of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..base.routes import Routing
from ..values import SETTLED, Ending, LeaseKind, settle_values

# Of ``SETTLED``.
TYPES = (*("text", "timestamptz", "int"), *("smallint", "int", "float8"), *["text"] * 4)


class PostgresSettling(Routing):
    def __init__(self) -> None:
        self._read_committed: WeakSet[Any] = WeakSet()  # driver connections at this level

    def settle(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        endings: Sequence[Ending],
        kind: LeaseKind = LeaseKind.ROW,
    ) -> int:
        fence, params = self._fence(connection, me, ("= v.locked_at", []), kind, of="e")
        rows = ", ".join([f"({', '.join(f'%s::{each}' for each in TYPES)})"] * len(endings))
        return self._run(
            connection,
            f"""WITH v ({", ".join(SETTLED)}) AS (VALUES {rows})
            UPDATE {self._event(connection)} e SET
                status = v.status, attempts = e.attempts + v.spent, rescues = 0,
                {kind.value} = {self.now} + v.delay * interval '1 second',
                done_at = CASE WHEN v.delay IS NULL THEN {self.now} END,
                last_error = COALESCE(v.error, e.last_error), cause = COALESCE(v.cause, e.cause),
                history = COALESCE(v.history, e.history), queue = COALESCE(v.queue, e.queue),
                locked_by = NULL, locked_at = NULL
            FROM v WHERE e.id = v.id AND e.attempts = v.attempts AND {fence}""",
            [value for each in endings for value in settle_values(each, connection)] + params,
        )

    @contextmanager
    def read_committed(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        outermost = not connection.in_atomic_block
        with transaction.atomic(using=connection.alias):
            if outermost and connection.connection not in self._read_committed:
                self._make_read_committed(connection)
            yield

    def _make_read_committed(self, connection: BaseDatabaseWrapper) -> None:
        """Set the level before the transaction reads; remember connections that begin with it."""
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            if cursor.fetchone()[0] == "read committed":
                self._read_committed.add(connection.connection)
            else:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
