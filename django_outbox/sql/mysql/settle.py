"""MySQL and MariaDB: settling of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import OperationalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..base.routes import Routing
from ..values import SETTLED, Ending, LeaseKind, marks, settle_values


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
        endings: Sequence[Ending],
        kind: LeaseKind = LeaseKind.ROW,
    ) -> int:
        case = "CASE id " + "WHEN %s THEN %s " * len(endings) + "END"
        times = "CASE id " + f"WHEN %s THEN {self.now_plus} " * len(endings) + "END"
        # By id: MariaDB's sql_mode decides if another assigned column has its old or new value.
        ended = [each.id for each in endings if each.decision.delay is None]
        end = f"CASE WHEN id IN ({marks(ended)}) THEN {self.now} END" if ended else "NULL"
        rows = [
            dict(zip(SETTLED, settle_values(each, connection), strict=True)) for each in endings
        ]

        def each_of(*names: str) -> list[Any]:
            return [value for name in names for row in rows for value in (row["id"], row[name])]

        leased_at = f"= CAST({case} AS DATETIME(6))", each_of("locked_at")
        fence, params = self._fence(connection, me, leased_at, kind)
        return self._run(
            connection,
            f"""UPDATE {self._event_by_id(connection)} SET
                status = {case}, attempts = attempts + {case}, rescues = 0,
                {kind.value} = {times}, done_at = {end},
                last_error = COALESCE({case}, last_error), cause = COALESCE({case}, cause),
                history = COALESCE({case}, history), queue = COALESCE({case}, queue),
                locked_by = NULL, locked_at = NULL
            WHERE id IN ({marks(rows)}) AND attempts = {case} AND {fence}""",
            [
                *each_of("status", "spent", "delay"),
                *ended,
                *each_of("error", "cause", "history", "queue"),
                *[row["id"] for row in rows],
                *each_of("attempts"),
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
