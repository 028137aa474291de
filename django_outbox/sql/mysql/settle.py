"""MySQL and MariaDB: settling of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import OperationalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ...listeners.outcomes import Decision
from ..base.routes import Routing
from ..values import LeaseKind, marks, plain


class MySQLSettling(Routing):
    rows_per_settle = 100  # a CASE with a branch per row makes the cost quadratic
    deleted_by_id = "{0} FROM {0} FORCE INDEX (PRIMARY)"
    joined = "CONCAT({}, {})"
    skip_known = " ON DUPLICATE KEY UPDATE id = VALUES(id)"

    # FORCE INDEX: the optimizer would scan a small table, and so wait for all locked rows.

    def settle(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        decisions: Sequence[tuple[str, Decision]],
        kind: LeaseKind = LeaseKind.ROW,
        attempts: int | None = None,
    ) -> int:
        fence, params = self._fence(connection, me, kind, attempts)
        ids = [row_id for row_id, _ in decisions]
        case = "CASE id " + "WHEN %s THEN %s " * len(ids) + "END"
        times = "CASE id " + f"WHEN %s THEN {self.now_plus} " * len(ids) + "END"
        # By id: MariaDB's sql_mode decides if another assigned column has its old or new value.
        ended = [row_id for row_id, decision in decisions if decision.delay is None]
        end = f"CASE WHEN id IN ({marks(ended)}) THEN {self.now} END" if ended else "NULL"

        def each(*names: str) -> list[Any]:
            return [
                value
                for name in names
                for row_id, decision in decisions
                for value in (row_id, plain(getattr(decision, name)))
            ]

        return self._run(
            connection,
            f"""UPDATE {self._event_by_id(connection)} SET
                status = {case}, attempts = attempts + {case}, rescues = 0,
                {kind.value} = {times}, done_at = {end},
                last_error = COALESCE({case}, last_error), cause = COALESCE({case}, cause),
                history = COALESCE({case}, history), queue = COALESCE({case}, queue),
                locked_by = NULL, locked_at = NULL
            WHERE id IN ({marks(ids)}) AND attempts = COALESCE({case}, attempts)
            AND {fence}""",
            [
                *each("status", "spent", "delay"),
                *ended,
                *each("error", "cause", "history", "queue"),
                *ids,
                *each("attempts"),
                *params,
            ],
        )

    @contextmanager
    def read_committed(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._begin_read_committed(connection))
            except OperationalError:  # the session ended while idle: nothing was run
                if connection.in_atomic_block:
                    raise
                connection.close()
                stack.enter_context(self._begin_read_committed(connection))
            yield

    @contextmanager
    def _begin_read_committed(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        if not connection.in_atomic_block:  # for the next transaction only
            self._run(connection, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", [])
        with transaction.atomic(using=connection.alias):
            yield
