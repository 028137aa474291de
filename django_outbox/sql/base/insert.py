"""SQL that inserts events in the caller's transaction, and numbers those with a key.

It inserts received messages in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ...events import Event
from ...listeners.queues import first_queue
from ...queue_settings import DEFAULT_QUEUE
from ..values import SQL, to_database, to_text
from .sequence_numbers import SequenceNumbers

STATEMENT_BYTES = 4 * 1024 * 1024  # above max_allowed_packet, MariaDB drops the connection
PARAMS_PER_ROW = 15
STATEMENT_PARAMS = 60_000  # PostgreSQL's protocol allows 65,535

Written = tuple[Event, str, str | None]  # event, payload text, headers text
NULL: SQL = ("NULL", [])
ZERO = ("status", "attempts", "rescues")  # columns that are 0 in every new event


class Inserting(SequenceNumbers):
    def insert(
        self, connection: BaseDatabaseWrapper, rows: Sequence[Written], *, may_clash: bool
    ) -> int:
        """Insert rows; return how many were inserted.

        With ``may_clash``, skip a row whose id or unique key exists. An error would break the
        caller's transaction.
        """
        (before, before_params), seqs = self._places(connection, rows)
        count = 0
        for part in _parts(connection, [*zip(rows, seqs, strict=True)]):
            sql, params = self._insert_of(connection, part)
            count += self._insert(
                connection, before + sql, before_params + params, may_clash=may_clash
            )
        return count

    def _places(
        self, connection: BaseDatabaseWrapper, rows: Sequence[Written]
    ) -> tuple[SQL, list[SQL]]:
        """Return the SQL to put before the INSERT, and that of each row's seq."""
        keyed = [event for event, _, _ in rows if event.key is not None]
        counts = Counter(event.key for event in keyed)
        queues = {event.key: queue_of_new(event) for event in reversed(keyed)}
        places = [(key, count, queues[key]) for key, count in counts.items() if key is not None]
        taken = self.number(connection, places) if places else {}
        seqs: list[SQL] = []
        for event, _, _ in reversed(rows):
            if event.key is None:
                seqs.append(NULL)
            else:
                seqs.append(("%s", [taken[event.key]]))
                taken[event.key] -= 1
        return ("", []), seqs[::-1]

    def _insert_of(
        self, connection: BaseDatabaseWrapper, rows: Sequence[tuple[Written, SQL]]
    ) -> SQL:
        cells = [self._cells(connection, written, seq) for written, seq in rows]
        queues = [queue_of_new(event) for (event, _, _), _ in rows]
        if {*queues} != {DEFAULT_QUEUE}:  # the column's default
            for row, queue in zip(cells, queues, strict=True):
                row["queue"] = ("%s", [queue])
        # Leave out columns that are NULL in all rows: most events leave half of the columns NULL,
        # and each would cost the server time.
        columns = [*dict.fromkeys(chain.from_iterable(cells))]
        values, params = [], []
        for row in cells:
            given = [row.get(each, NULL) for each in columns]
            values.append(", ".join([sql for sql, _ in given]))
            params += [each for _, some in given for each in some]
        into = ", ".join([self.key if each == "key" else each for each in (*columns, *ZERO)])
        sql = ", 0, 0, 0), (".join(values)
        return f"INSERT INTO {self._event(connection)} ({into}) VALUES ({sql}, 0, 0, 0)", params

    def _cells(self, connection: BaseDatabaseWrapper, written: Written, seq: SQL) -> dict[str, SQL]:
        """Return the values of a row by column."""
        event, payload, headers = written
        due = self._due_time(connection, event)
        given = (
            ("event_id", event.event_id), ("event_type", event.event_type),
            ("aggregate_type", event.aggregate_type), ("payload", payload), ("headers", headers),
            ("occurred_at", to_text(event.occurred_at, connection)),
            ("aggregate_id", event.aggregate_id), ("tenant_id", event.tenant_id),
            ("unique_key", event.unique_key), ("key", event.key),
        )  # fmt: skip
        cells: dict[str, SQL] = {name: ("%s", [each]) for name, each in given if each is not None}
        cells["first_due_at"], cells["created_at"] = due, (self.now, [])
        if event.key is None:
            cells["available_at"] = due
        else:  # its stream is due instead
            cells["seq"] = seq
        if event.is_delayed:
            cells["deliver_at"] = due
        return cells

    def receive(self, connection: BaseDatabaseWrapper, *, source: str, message_id: str) -> bool:
        """Record a received message; return whether it is new. Wait for a concurrent receiver."""
        table = self._table(connection, "outbox_inbox")
        columns = ", ".join(map(connection.ops.quote_name, ("source", "message_id", "received_at")))
        sql = f"INSERT INTO {table} ({columns}) VALUES (%s, %s, {self.now})"
        return self._insert(connection, sql, [source, message_id], may_clash=True) == 1

    def _insert(
        self, connection: BaseDatabaseWrapper, sql: str, params: list[Any], *, may_clash: bool
    ) -> int:
        with connection.cursor() as cursor:
            cursor.execute(sql + " ON CONFLICT DO NOTHING" * may_clash, params)
            return int(cursor.rowcount)

    def _due_time(self, connection: BaseDatabaseWrapper, event: Event) -> SQL:
        if event.available_at is not None:
            return "%s", [to_database(event.available_at, connection)]
        return (self.now, []) if event._delay is None else (self.now_plus, [event._delay])


def queue_of_new(event: Event) -> str:
    """Return the queue that a new event waits in, by the listeners of this process."""
    return first_queue(event.aggregate_type, event.event_type)


def _parts(
    connection: BaseDatabaseWrapper, rows: list[tuple[Written, SQL]]
) -> Iterator[list[tuple[Written, SQL]]]:
    """Split rows into statements below 4 MB and the database's limit of parameters."""
    if len(rows) == 1:
        yield rows
        return
    most = connection.features.max_query_params or STATEMENT_PARAMS
    most = min(most, STATEMENT_PARAMS) // PARAMS_PER_ROW
    part: list[tuple[Written, SQL]] = []
    size = 0
    for row in rows:
        (_, payload, headers), _ = row
        length = 4 * (len(payload) + len(headers or "")) + 1000
        if part and (len(part) >= most or size + length > STATEMENT_BYTES):
            yield part
            part, size = [], 0
        part.append(row)
        size += length
    yield part
