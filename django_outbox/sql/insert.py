"""SQL that inserts events in the caller's transaction, and numbers those with a key.

It inserts received messages in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper

from ..events import Event, slot_of, stream_of
from ..listeners.queues import UNROUTED, Route, receipt_of, routes_of_new, row_id
from ..queue_settings import DEFAULT_QUEUE
from .sequence_numbers import Place, SequenceNumbers
from .values import SQL, to_database, to_text

STATEMENT_BYTES = 4 * 1024 * 1024  # above max_allowed_packet, MariaDB drops the connection
PARAMS_PER_ROW = 19
STATEMENT_PARAMS = 60_000  # PostgreSQL's protocol allows 65,535

Written = tuple[Event, str, str | None]  # event, payload text, headers text
New = tuple[Written, Route, SQL]  # a row: its event, its listener, and its seq
NULL: SQL = ("NULL", [])
# Columns with a parameter, or NULL; ``queue`` has a default instead.
GIVEN = (
    "id",
    "event_id",
    "listener",
    "routes",
    "event_type",
    "aggregate_type",
    "payload",
    "headers",
    "occurred_at",
    "aggregate_id",
    "tenant_id",
    "unique_key",
    "key",
    "stream",
    "queue",
)
COLUMNS = (*GIVEN, "first_due_at", "created_at", "available_at", "seq", "deliver_at")
ZERO = ("status", "attempts", "rescues")  # columns that are 0 in every new event


class Shape(NamedTuple):
    """What the SQL of a new row depends on; nearly all rows of an app have one of a few."""

    given: tuple[bool, ...]  # of the columns ``GIVEN``: which have a parameter
    due: str  # the SQL of its due time
    seq: str | None  # that of its place in the order of its key or slot; None: it has neither
    in_stream: bool  # it is due by its stream
    is_delayed: bool


class Inserting(SequenceNumbers):
    def insert(self, rows: Sequence[Written], *, may_clash: bool) -> bool:
        """Insert a row for each listener of each event; return whether all were inserted.

        With ``may_clash``, skip a row whose id or unique key exists. An error would break the
        caller's transaction.
        """
        (before, before_params), seqs = self._places(rows)
        new = [
            (written, route, seq)
            for written, seq in zip(rows, seqs, strict=True)
            for route in routes_of_new(written[0])
        ]
        count = 0
        for part in _parts(self.connection, new):
            sql, params = self._insert_of(part)
            count += self._insert(before + sql, before_params + params, may_clash=may_clash)
        return count == len(new)

    def _places(self, rows: Sequence[Written]) -> tuple[SQL, list[SQL]]:
        """Return the SQL to put before the INSERT, and that of each event's seq.

        The key's own stream is numbered first, whether it gets a row or not: writers of one key
        wait there, so that they cannot lock its streams in different orders.
        """
        keyed = [event for event, _, _ in rows if event.key is not None]
        if not keyed:
            return ("", []), [self._seq_of(*each) for each in enumerate(rows)]
        taken = self.number(own_places(keyed))
        self.touch(lane_places(keyed))
        seqs: list[SQL] = []
        for place, row in reversed([*enumerate(rows)]):
            event = row[0]
            if event.key is None:
                seqs.append(self._seq_of(place, row))
            else:
                stream = stream_of("", event.key)
                seqs.append(("%s", [taken[stream]]))
                taken[stream] -= 1
        return ("", []), seqs[::-1]

    def _seq_of(self, place: int, row: Written) -> SQL:
        """Return the seq of an event without a key: in a slot, the clock and its place here."""
        return NULL if row[0].coalesce is None else (f"{self.now_micros} + %s", [place])

    def _insert_of(self, rows: Sequence[New]) -> SQL:
        shapes, params = [], []
        for each in rows:
            shape, values = self._row(*each)
            shapes.append(shape)
            params += values
        # Leave out columns that are NULL in all rows: most events leave half of the columns NULL,
        # and each would cost the server time.
        columns = _columns(frozenset(shapes))
        into = ", ".join([self.key if each == "key" else each for each in (*columns, *ZERO)])
        cells = "), (".join([_cells(each, columns, self.now) for each in shapes])
        return f"INSERT INTO {self._event} ({into}) VALUES ({cells})", params

    def _row(self, written: Written, route: Route, seq: SQL) -> tuple[Shape, list[Any]]:
        """Return which columns a row has, and its parameters in the order of ``COLUMNS``."""
        event, payload, headers = written
        is_first = route is routes_of_new(event)[0]
        receipt = None
        if route.title is not None:
            receipt = receipt_of(event.aggregate_type, event.event_type)
        given = (
            event.event_id if is_first else row_id(event.event_id, route.digest),
            event.event_id,
            route.title,
            receipt,
            event.event_type,
            event.aggregate_type,
            payload,
            headers,
            to_text(event.occurred_at, self.connection),
            event.aggregate_id,
            event.tenant_id,
            event.unique_key if is_first else None,
            event.key,
            _stream_of(event, route),
            None if route.queue == DEFAULT_QUEUE else route.queue,
        )
        due, due_params = self._due_time(event)
        in_stream = event.key is not None and route != UNROUTED
        shape = Shape(
            tuple([each is not None for each in given]),
            due,
            None if seq is NULL else seq[0],
            in_stream,
            event.is_delayed,
        )
        params = [each for each in given if each is not None]
        params += due_params * (1 if in_stream else 2) + seq[1] + due_params * event.is_delayed
        return shape, params

    def receive(self, *, source: str, message_id: str) -> bool:
        """Record a received message; return whether it is new. Wait for a concurrent receiver."""
        table = self._table("outbox_inbox")
        columns = ", ".join(
            map(self.connection.ops.quote_name, ("source", "message_id", "received_at"))
        )
        sql = f"INSERT INTO {table} ({columns}) VALUES (%s, %s, {self.now})"
        return self._insert(sql, [source, message_id], may_clash=True) == 1

    def _insert(self, sql: str, params: list[Any], *, may_clash: bool) -> int:
        return self._run(sql + " ON CONFLICT DO NOTHING" * may_clash, params)

    def _due_time(self, event: Event) -> SQL:
        if event.available_at is not None:
            return "%s", [to_database(event.available_at, self.connection)]
        return (self.now, []) if event._delay is None else (self.now_plus, [event._delay])


def _stream_of(event: Event, route: Route) -> str | None:
    if event.key is not None:
        return stream_of(route.lane, event.key)
    return None if event.coalesce is None else slot_of(route.digest, event.coalesce)


@lru_cache(maxsize=256)
def _columns(shapes: frozenset[Shape]) -> tuple[str, ...]:
    """Return the columns that rows of these shapes have, in the order of ``COLUMNS``."""
    found = {name for shape in shapes for name in _sql_by_column(shape, "")}
    return tuple(name for name in COLUMNS if name in found)


@lru_cache(maxsize=1024)
def _cells(shape: Shape, columns: tuple[str, ...], now: str) -> str:
    """Return the SQL of a row's values; ``now`` is that of the database's clock."""
    missing = {"queue": f"'{DEFAULT_QUEUE}'"}
    found = _sql_by_column(shape, now)
    cells = [found.get(name, missing.get(name, "NULL")) for name in columns]
    return ", ".join([*cells, *["0"] * len(ZERO)])


def _sql_by_column(shape: Shape, now: str) -> dict[str, str]:
    found = {name: "%s" for name, is_given in zip(GIVEN, shape.given, strict=True) if is_given}
    found |= {"first_due_at": shape.due, "created_at": now}
    if not shape.in_stream:
        found["available_at"] = shape.due
    if shape.seq is not None:
        found["seq"] = shape.seq
    if shape.is_delayed:
        found["deliver_at"] = shape.due
    return found


def own_places(keyed: Sequence[Event]) -> list[Place]:
    """Return the places that events take in the streams of their keys."""
    counts = Counter(each.key for each in keyed)
    queues: dict[str | None, str] = {}
    for event in keyed:
        for route in routes_of_new(event):
            if not route.lane:
                queues.setdefault(event.key, route.queue)
    return [
        (stream_of("", key), count, queues.get(key))
        for key, count in counts.items()
        if key is not None
    ]


def lane_places(keyed: Sequence[Event]) -> list[Place]:
    """Return the further streams that events wait in: those of other lanes than the key's own."""
    found: dict[str, str] = {}
    for event in keyed:
        for route in routes_of_new(event):
            if route.lane and route != UNROUTED and event.key is not None:
                found.setdefault(stream_of(route.lane, event.key), route.queue)
    return [(stream, 1, queue) for stream, queue in found.items()]


def _parts(connection: BaseDatabaseWrapper, rows: list[New]) -> Iterator[list[New]]:
    """Split rows into statements below 4 MB and the database's limit of parameters."""
    if len(rows) == 1:
        yield rows
        return
    most = connection.features.max_query_params or STATEMENT_PARAMS
    most = min(most, STATEMENT_PARAMS) // PARAMS_PER_ROW
    part: list[New] = []
    size = 0
    for row in rows:
        (_, payload, headers), *_ = row
        length = 4 * (len(payload) + len(headers or "")) + 1000
        if part and (len(part) >= most or size + length > STATEMENT_BYTES):
            yield part
            part, size = [], 0
        part.append(row)
        size += length
    yield part
