"""One INSERT, in the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..events import Event
from .fields import to_database
from .statements import Statements
from .vocabulary import marks


class Inserting(Statements):
    def insert(self, connection: BaseDatabaseWrapper, rows: Sequence[tuple[Event, str, str | None]],
               *, may_clash: bool) -> int:  # fmt: skip
        """Insert (event, payload text, headers text) rows; return how many went in.

        With ``may_clash`` a row whose id or unique key exists is left out instead of an error that
        would poison the caller's transaction.
        """
        name = connection.ops.quote_name
        columns = (
            "event_id event_type aggregate_type aggregate_id tenant_id payload headers unique_key "
            "occurred_at deliver_at first_due_at available_at created_at status attempts rescues"
        ).split()
        values, params = [], []
        for event, payload, headers in rows:
            due, due_params = self._due(event, connection)
            deliver = due if event.is_delayed else "NULL"
            values.append(f"({marks(columns[:9])}, {deliver}, {due}, {due}, {self.now}, 0, 0, 0)")
            params += [
                event.event_id, event.event_type, event.aggregate_type, event.aggregate_id,
                event.tenant_id, payload, headers, event.unique_key,
                to_database(event.occurred_at, connection),
                *(due_params * (3 if deliver is due else 2)),
            ]  # fmt: skip
        sql = (
            f"INSERT INTO {self._table(connection)} ({', '.join(map(name, columns))}) "
            f"VALUES {', '.join(values)}"
        )
        return self._insert(connection, sql, params, may_clash=may_clash)

    def _insert(
        self, connection: BaseDatabaseWrapper, sql: str, params: list[Any], *, may_clash: bool
    ) -> int:
        with connection.cursor() as cursor:
            cursor.execute(sql + " ON CONFLICT DO NOTHING" * may_clash, params)
            return int(cursor.rowcount)

    def _due(self, event: Event, connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
        if event.available_at is not None:
            return "%s", [to_database(event.available_at, connection)]
        return (self.now, []) if event._delay is None else (self.plus, [event._delay])
