"""SQL that inserts events in the caller's transaction, and numbers those with a key.

The upsert of a key's row blocks other writers of the key until commit. So the order of ``seq`` is
the order of commits, whatever the clocks say. ``seq`` is also the stream's version: every change
that makes an event pending raises it in the same transaction.

It inserts received messages in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import current
from ..events import Event, slot_of, split_stream, stream_of
from ..listeners.queues import UNROUTED, Route, receipt_of, routes_of_new, row_id
from ..listeners.registry import until_registered
from ..queue_settings import DEFAULT_QUEUE, PARKED
from .statements import Statements
from .values import SQL, in_parts, to_database, to_text

# A stream, how many numbers it needs, and the queue of its first new event; None: it gets none.
Place = tuple[str, int, str | None]
Places = Sequence[Place]

STREAMS_AT_ONCE = (
    190  # per statement: with five parameters each, below the 999 that Django knows of SQLite
)

# New due time of a stream that gets an event. Here a head that waits for its retry blocks it:
UNLESS_SET = "COALESCE({row}due_at, {now})"
# Here it does not, and only the due time of a lease is kept:
UNLESS_LEASED = "CASE WHEN {row}locked_by IS NULL THEN {now} ELSE {row}due_at END"

# When its queue changes: if nothing was pending in it, or if it is parked, too.
IDLE = "{row}due_at IS NULL"
IDLE_OR_PARKED = f"({IDLE} OR {{row}}queue LIKE '{PARKED}%%')"


class SequenceNumbers(Statements):
    on_conflict = "ON CONFLICT (stream) DO UPDATE SET"
    noted = "{}"  # SQL for a number that the response to the statement is to have

    def number(self, places: Places) -> dict[str, int]:
        """Take numbers in each stream and make it due; return the last number of each.

        A new stream starts at the clock, so that a key's numbers never go back after a purge.
        """
        return {
            name: seq for some in _sorted_parts(places) for name, seq in self._number(some).items()
        }

    def touch(self, places: Places) -> None:
        """Give streams that get events a new version, and make them due."""
        for some in _sorted_parts(places):
            self._run(*self._upsert(some, due=due_of_followers()))

    def wake_streams(self, streams: Sequence[str], *, queue: str = DEFAULT_QUEUE) -> None:
        """Give streams a new version and make them due, even if purged or waiting for a retry.

        ``queue`` is that of streams in which nothing was pending, and of those that are parked,
        as another event may be the first one now.
        """
        for places in _sorted_parts([(stream, 1, queue) for stream in dict.fromkeys(streams)]):
            self._run(*self._upsert(places, due=UNLESS_LEASED, moved=IDLE_OR_PARKED))

    def _number(self, places: Places) -> Mapping[str, int]:
        upsert, params = self._upsert(places, due=due_of_followers())
        return dict(self._rows(f"{upsert} RETURNING stream, seq", params))

    def _upsert(self, places: Places, *, due: str, moved: str = IDLE) -> SQL:
        """Return the statement and its parameters. It locks rows in the order of ``places``."""
        row, (alias, new) = f"{self._stream}.", self._new_row
        seq = self.noted.format(f"{self.now_micros} + %s")
        rows = ", ".join(
            f"(%s, %s, %s, {seq}, {'NULL' if queue is None else self.now}, %s)"
            for _, _, queue in places
        )
        if any(queue is None for _, _, queue in places):  # some get no event
            due = f"CASE WHEN {new.format('due_at')} IS NULL THEN {{row}}due_at ELSE {due} END"
        # The clock is constant within a statement, so it cancels out: the count remains.
        next_seq = self.noted.format(f"{row}seq + 1 + {new.format('seq')} - {self.now_micros}")
        sql = f"""INSERT INTO {self._stream} (stream, {self.key}, lane, seq, due_at, queue)
            VALUES {rows}{alias} {self.on_conflict}
            queue = CASE WHEN {moved.format(row=row)} THEN {new.format("queue")}
                ELSE {row}queue END,
            seq = {next_seq}, due_at = {due.format(row=row, now=self.now)}"""
        return sql, [
            value
            for name, count, queue in places
            for value in (name, *reversed(split_stream(name)), count - 1, queue or DEFAULT_QUEUE)
        ]

    @property
    def _new_row(self) -> tuple[str, str]:
        """Return the alias of the row that was to be inserted, and the SQL of its columns."""
        return "", "EXCLUDED.{}"


def due_of_followers() -> str:
    settings = current()
    if settings.MODE == "writer_only":  # no worker leases; the purge needs the last write's time
        return UNLESS_LEASED
    return UNLESS_SET if settings.STOP_ON_FIRST_FAILURE else UNLESS_LEASED


def _sorted_parts(places: Places) -> Iterator[Places]:
    """Split by statement. Streams are sorted: writers of the same ones wait and do not deadlock.

    The keys' own come first, as in a write: other lanes may have names that sort before ":".
    """
    return in_parts(sorted(places, key=lambda each: (each[0][0] != ":", each)), STREAMS_AT_ONCE)


STATEMENT_BYTES = 4 * 1024 * 1024  # above max_allowed_packet, MariaDB drops the connection
PARAMS_PER_ROW = 19
STATEMENT_PARAMS = 60_000  # PostgreSQL's protocol allows 65,535

Written = tuple[Event, str, str | None]  # event, payload text, headers text
New = tuple[Written, Route, SQL]  # a row: its event, its listener, and its seq
NULL: SQL = ("NULL", [])
Cells = tuple[str | None, ...]  # the SQL of each column of a row; None: its default
Values = Sequence[Any]
# Columns with a value of each row, with one that recurs, and whose SQL is more than a value.
OWN = (
    *("id", "event_id", "payload", "headers", "occurred_at"),
    *("aggregate_id", "tenant_id", "unique_key", "key", "stream"),
)
RECURRING = ("event_type", "aggregate_type", "listener", "routes", "queue")
FURTHER = (
    *("first_due_at", "created_at", "available_at", "seq", "deliver_at"),
    *("status", "attempts", "rescues"),
)
COLUMNS = (*RECURRING, *OWN, *FURTHER)
# Text that is the same in quotes, for every database and driver.
is_plain = re.compile(r"[\w.:/* -]*", re.ASCII).fullmatch


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
        own, in_lanes = places_of(rows)
        last, seqs = self.number(own) if own else {}, list[SQL]()
        if in_lanes:
            self.touch(in_lanes)
        next_of = {stream: last[stream] - count + 1 for stream, count, _ in own}
        for place, (event, *_) in enumerate(rows):
            if event.key is not None:
                stream = stream_of("", event.key)
                seqs.append(("%s", [next_of[stream]]))
                next_of[stream] += 1
            elif event.coalesce is not None:  # in a slot, the clock and its place here
                seqs.append((f"{self.now_micros} + %s", [place]))
            else:
                seqs.append(NULL)
        return ("", []), seqs

    def _insert_of(self, rows: Sequence[New]) -> SQL:
        cells, params = list[Cells](), list[Any]()
        for each in rows:
            (recurring, given), values, (further, further_params) = self._row(*each)
            own = ["%s" if value is not None else None for value in values]
            cells.append((*recurring, *own, *further))
            params += [*given, *[value for value in values if value is not None], *further_params]
        into, texts = _texts(frozenset(cells), self.key)
        sql = "), (".join([texts[each] for each in cells])
        return f"INSERT INTO {self._event} ({into}) VALUES ({sql})", params

    def _row(
        self, written: Written, route: Route, seq: SQL
    ) -> tuple[tuple[Cells, Values], Values, tuple[Cells, Values]]:
        """Return SQL and parameters of what recurs, the ``OWN`` values, SQL and more parameters."""
        event, payload, headers = written
        is_first = route is routes_of_new(event)[0]
        own = (
            event.event_id if is_first else row_id(event.event_id, route.digest),
            event.event_id,
            payload,
            headers,
            to_text(event.occurred_at, self.connection),
            event.aggregate_id,
            event.tenant_id,
            event.unique_key if is_first else None,
            event.key,
            _stream_of(event, route),
        )
        due, due_params = self._due_time(event)
        in_stream = event.key is not None and route != UNROUTED  # and due by it
        further = (
            *(due, self.now, None if in_stream else due, None if seq is NULL else seq[0]),
            *(due if event.is_delayed else None, "0", "0", "0"),
        )
        times = 1 if in_stream else 2
        params = due_params * times + seq[1] + due_params * event.is_delayed
        return _recurring(event.event_type, event.aggregate_type, route), own, (further, params)

    def receive(self, *, source: str, message_id: str) -> bool:
        """Record a received message; return whether it is new. Wait for a concurrent receiver."""
        table = self._table("outbox_inbox")
        sql = f"INSERT INTO {table} (source, message_id, received_at) VALUES (%s, %s, {self.now})"
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


@until_registered
def _recurring(event_type: str, aggregate_type: str, route: Route) -> tuple[Cells, Values]:
    """Return the SQL of the ``RECURRING`` columns of a row, and its parameters.

    Plain names are literals: drivers take as long for a parameter as for the rest of its row.
    """
    receipt = route.title and receipt_of(aggregate_type, event_type)
    queue = None if route.queue == DEFAULT_QUEUE else route.queue
    values = (event_type, aggregate_type, route.title, receipt, queue)
    cells = [each if each is None else f"'{each}'" if is_plain(each) else "%s" for each in values]
    return (*cells,), [each for each in values if each is not None and not is_plain(each)]


@lru_cache(maxsize=256)  # nearly all rows of an app have one of a few texts
def _texts(rows: frozenset[Cells], key: str) -> tuple[str, dict[Cells, str]]:
    """Return the columns of an INSERT of these rows, and the text of each row.

    Without columns that are NULL in all rows: most events leave half of the columns NULL, and each
    would cost the server time.
    """
    places = [at for at in range(len(COLUMNS)) if any(row[at] for row in rows)]
    into = ", ".join(key if COLUMNS[at] == "key" else COLUMNS[at] for at in places)
    other = {"queue": f"'{DEFAULT_QUEUE}'"}
    return into, {
        row: ", ".join([row[at] or other.get(COLUMNS[at], "NULL") for at in places]) for row in rows
    }


def places_of(rows: Sequence[Written]) -> tuple[list[Place], list[Place]]:
    """Return the places that events take in the streams of their keys, and in those of lanes."""
    counts, queues = dict[str, int](), dict[str, str]()
    for event, *_ in rows:
        if event.key is None:
            continue
        stream = stream_of("", event.key)
        counts[stream] = counts.get(stream, 0) + 1
        for route in routes_of_new(event):
            if route != UNROUTED:
                queues.setdefault(stream_of(route.lane, event.key), route.queue)
    own = [(stream, count, queues.pop(stream, None)) for stream, count in counts.items()]
    return own, [(stream, 1, queue) for stream, queue in queues.items()]


def _parts(connection: BaseDatabaseWrapper, rows: list[New]) -> Iterator[list[New]]:
    """Split rows into statements below 4 MB and the database's limit of parameters."""
    most = connection.features.max_query_params or STATEMENT_PARAMS
    most = min(most, STATEMENT_PARAMS) // PARAMS_PER_ROW
    part, size = list[New](), 0
    for row in rows:
        (_, payload, headers), *_ = row
        length = 4 * (len(payload) + len(headers or "")) + 1000
        if part and (len(part) >= most or size + length > STATEMENT_BYTES):
            yield part
            part, size = [], 0
        part.append(row)
        size += length
    yield part
