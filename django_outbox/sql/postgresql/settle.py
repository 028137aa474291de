"""PostgreSQL: settling of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ...listeners.outcomes import Decision
from ..base.settle import Settling
from ..values import SETTLED, AsRead, Attempt, LeaseKind, settle_values


class PostgresSettling(Settling):
    def __init__(self) -> None:
        self._read_committed: WeakSet[Any] = WeakSet()  # driver connections at this level

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
            WHERE event_id = ANY(%s) AND {fence}""",
            [[*ids], *params],
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
            WHERE event_id = ANY(%s) AND {fence} AND unique_key IS NULL""",
            [[*ids], *params],
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
        rows = ", ".join(
            ["(%s, %s::smallint, %s::int, %s::float8, %s::text, %s::text, %s::text, %s::int)"]
            * len(decisions)
        )
        return self._run(
            connection,
            f"""WITH v ({", ".join(SETTLED)}) AS (VALUES {rows})
            UPDATE {self._event(connection)} e SET
                status = v.status, attempts = e.attempts + v.spent, rescues = 0,
                {kind.value} = {self.now} + v.delay * interval '1 second',
                done_at = CASE WHEN v.delay IS NULL THEN {self.now} END,
                last_error = COALESCE(v.error, e.last_error),
                progress = COALESCE(v.progress, e.progress), queue = COALESCE(v.queue, e.queue),
                locked_by = NULL, locked_at = NULL
            FROM v WHERE e.event_id = v.event_id
            AND e.attempts = COALESCE(v.attempts, e.attempts) AND {fence}""",
            [value for each in decisions for value in settle_values(*each)] + params,
        )

    def note_attempts(self, connection: BaseDatabaseWrapper, attempts: Sequence[Attempt]) -> None:
        if not attempts:
            return
        columns = ", ".join(map(connection.ops.quote_name, (*Attempt._fields, "at")))
        # As arrays, which cost half of what a parameter for each value does. There is no NULL in
        # them: with array_nulls off, it would be the text "NULL".
        self._run(
            connection,
            f"""INSERT INTO {self._table(connection, "outbox_attempt")} ({columns})
            SELECT event_id, kind, number, by, listener, NULLIF(milliseconds, -1), error, {self.now}
            FROM unnest(%s::text[], %s::text[], %s::int[], %s::text[],
                %s::text[], %s::int[], %s::text[]) given ({", ".join(Attempt._fields)})""",
            [
                [-1 if each is None else each for each in values]
                for values in zip(*attempts, strict=True)
            ],
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
