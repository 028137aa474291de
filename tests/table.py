"""Functions with which tests insert, read, lock and steal rows of the event table."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.db import connection, connections, transaction
from django.db.models import F, Model
from django.db.models.functions import Coalesce

import django_outbox as outbox
from django_outbox.delivery.lease import Lease, columns_of, lease_from_row, row_run
from django_outbox.events import least_id, new_id, stream_of
from django_outbox.listeners import registry
from django_outbox.listeners.history import Entry, entries, normalised, with_entries
from django_outbox.listeners.outcomes import Decision, Status
from django_outbox.listeners.queues import row_id
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of, engine_connection
from django_outbox.sql.values import (
    FULL,
    LIGHT,
    STREAMS,
    TAIL,
    Branch,
    Claim,
    Claimed,
    Ending,
    Release,
    Row,
    Unclaimed,
)
from django_outbox.worker.effects import perform
from django_outbox.worker.housekeeper import Purger
from tests.sessions import processes

T = TypeVar("T")

PLACED = "order.placed"


def now() -> datetime:
    """Return the time of the database's clock."""
    return dialect_of(connection).clock()


def insert(
    count: int = 1,
    *,
    due: float | None = 0.0,
    counted: str = "",
    made: float | None = None,
    **columns: Any,
) -> list[str]:
    """Insert rows, due that many seconds from now (None: not at all); return their ids.

    All rows are equal except for the column ``counted``, which counts up from the first row.
    Their ids date from ``made`` seconds ago.
    """
    clock = now()
    made_at = least_id(clock - timedelta(seconds=made or 0))[:10]

    def next_id() -> str:
        return new_id() if made is None else made_at + new_id()[10:]

    at = None if due is None else clock + timedelta(seconds=due)
    if columns.get("last_error") is not None:  # as a settle does
        columns = {"cause": normalised(columns["last_error"]), **columns}
    given = {
        "event_type": PLACED,
        "payload": "{}",
        "occurred_at": clock,
        "created_at": clock,
        "first_due_at": at,
        "available_at": at,
        **columns,
    }
    if not count:
        return []
    first_id = given.pop("event_id", None) or next_id()
    first = OutboxEvent(id=first_id, event_id=first_id, **with_stream(given))
    others = [next_id() for _ in range(count - 1)]
    multiply(first, others, counted=counted)
    return [first.event_id, *others]


def dead(
    count: int = 1, error: str | None = "ValueError: no", *, ago: float = 0, **columns: Any
) -> list[str]:
    """Insert rows that died that many seconds ago; return their ids."""
    at = now() - timedelta(seconds=ago)
    given = {"status": Status.DEAD, "done_at": at, "attempts": 3, "last_error": error, **columns}
    return insert(count, due=None, **given)


# A JSON list as rows of a value and its number, from 1.
LISTED = {
    "sqlite": "(SELECT value, key + 1 AS n FROM json_each(%s)) AS given",
    "postgresql": "json_array_elements_text(CAST(%s AS json)) WITH ORDINALITY AS given(value, n)",
    "mysql": "JSON_TABLE(%s, '$[*]' "
    "COLUMNS (n FOR ORDINALITY, value VARCHAR(255) PATH '$')) AS given",
}


def multiply(row: Model, others: Sequence[str], *, counted: str = "") -> None:
    """Insert a row, and copies under these primary keys; the ORM would need seconds for thousands.

    One transaction, because a worker could claim the first row and its lease would be copied.
    """
    meta, quote = row._meta, connection.ops.quote_name
    columns = {each.column: f"model.{quote(each.column)}" for each in meta.concrete_fields}
    columns[meta.pk.column] = "given.value"
    if "event_id" in columns:
        columns["event_id"] = "given.value"
    if counted:
        columns[counted] += " + given.n"
    with transaction.atomic(), connection.cursor() as cursor:
        row.save(force_insert=True)
        if not others:
            return
        cursor.execute(
            f"INSERT INTO {quote(meta.db_table)} ({', '.join(map(quote, columns))}) "
            f"SELECT {', '.join(columns.values())} "
            f"FROM {LISTED[connection.vendor]}, {quote(meta.db_table)} AS model "
            f"WHERE model.{quote(meta.pk.column)} = %s",
            [json.dumps(others), row.pk],
        )


def keyed(key: str, count: int = 1, *, due: float | None = 0.0, **columns: Any) -> list[str]:
    """Insert events of a key as a write would; an idle stream is due that many seconds from now."""
    streams = OutboxStream.objects
    with transaction.atomic():
        stream, _ = streams.select_for_update().get_or_create(
            stream=stream_of("", key), defaults={"key": key, "seq": 0}
        )
        ids = insert(
            count,
            due=None,
            key=key,
            seq=stream.seq + 1,
            counted="seq",
            first_due_at=now(),
            **columns,
        )
        at = None if due is None else now() + timedelta(seconds=due)
        streams.filter(pk=stream.pk).update(seq=F("seq") + count, due_at=Coalesce("due_at", at))
    return ids


def with_stream(columns: dict[str, Any]) -> dict[str, Any]:
    """Return these columns of an event, and the stream of its key."""
    key = columns.get("key")
    return columns if key is None else {"stream": stream_of("", key), **columns}


def stream_row(key: str, **columns: Any) -> OutboxStream:
    """Return a new stream, not yet stored."""
    return OutboxStream(stream=stream_of("", key), key=key, **{"seq": 1, **columns})


def names(*keys: str) -> list[str]:
    """Return the names of the streams of these keys."""
    return [stream_of("", each) for each in keys]


def stream(key: str, lane: str = "") -> OutboxStream:
    """Return the stream of a key in one lane; by default, that of the unnamed listeners."""
    return OutboxStream.objects.get(pk=stream_of(lane, key))


def stream_due_in(key: str, lane: str = "") -> float:
    """Return the seconds from the database's now to the due time, or lease end, of a stream."""
    due = stream(key, lane).due_at
    assert due is not None
    return (due - now()).total_seconds()


def leases(ids: Iterable[str]) -> dict[str, Any]:
    """Return rows, each with when it, or its stream, was leased; for one that is not, now."""
    clock, rows = now(), OutboxEvent.objects.in_bulk([*ids])
    streams = OutboxStream.objects.in_bulk([each.stream for each in rows.values()])
    held = {each.pk: streams.get(each.stream, each).locked_at for each in rows.values()}
    return {each: held.get(each) or clock for each in ids}


def stream_leases(names: Iterable[str]) -> dict[str, Any]:
    """Return streams, each with when it was leased; for one that is not, now."""
    found, clock = OutboxStream.objects.in_bulk([*names]), now()
    return {each: (found[each].locked_at if each in found else None) or clock for each in names}


def endings(decisions: Iterable[tuple[str, Decision]]) -> list[Ending]:
    """Return decisions on rows as they are leased now."""
    pairs = [*decisions]
    held = leases([each for each, _ in pairs])
    attempts = dict(OutboxEvent.objects.filter(pk__in=held).values_list("pk", "attempts"))
    return [Ending(each, held[each], attempts.get(each, 0), decision) for each, decision in pairs]


def unclaimed(due: Iterable[tuple[str, datetime | None, str]]) -> list[Unclaimed]:
    """Return rows to be put back as they are leased now, with due times and queues."""
    given = [*due]
    held = leases([each for each, _, _ in given])
    return [Unclaimed(each, held[each], at, queue) for each, at, queue in given if at]


def releases(*given: tuple[Any, ...]) -> list[Release]:
    """Return how to release streams as they are leased now: name, version, delay, queue."""
    held = stream_leases([each[0] for each in given])
    return [Release(name, held[name], *more) for name, *more in given]


def end_stream_leases(*keys: str) -> None:
    """End the leases of these streams now, as if their time had passed."""
    OutboxStream.objects.filter(pk__in=names(*keys)).update(due_at=now() - timedelta(seconds=1))


def siblings(event_id: str, *titles: str, **columns: Any) -> list[str]:
    """Insert copies of an event's first row for further listeners; return the ids of all rows."""
    ids = [event_id]
    for title in titles:
        each = row(event_id)
        each.pk, each.listener = row_id(event_id, registry.digest(title)), title
        for name, value in columns.items():
            setattr(each, name, value)
        each.save(force_insert=True)
        ids.append(each.pk)
    return ids


@contextmanager
def undone() -> Iterator[None]:
    """Undo what is written inside, such as by one of the cases that a test goes through."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def by_api(sid: str) -> None:
    """Roll a savepoint back, as Django knows of it."""
    connection.savepoint_rollback(sid)


def by_sql(sid: str) -> None:
    """Roll a savepoint back, unknown to Django."""
    with connection.cursor() as cursor:
        cursor.execute(connection.ops.savepoint_rollback_sql(sid))


def row(event_id: str) -> OutboxEvent:
    return OutboxEvent.objects.get(pk=event_id)


def history(event_id: str) -> list[Entry]:
    """Return the history of an event, the oldest entry first."""
    return entries(row(event_id).history)


def histories() -> list[Entry]:
    """Return the histories of all events, in the order of their ids."""
    texts = OutboxEvent.objects.order_by("pk").values_list("history", flat=True)
    return [entry for text in texts for entry in entries(text)]


def note(event_id: str, *new: Entry) -> None:
    """Add entries to the history of an event."""
    text = with_entries(row(event_id).history, new)
    OutboxEvent.objects.filter(pk=event_id).update(history=text)


def statuses() -> dict[str, int]:
    """Return the number of rows by status, without statuses that no row has."""
    return {name: n for name, n in OutboxEvent.objects.counts_by_status().items() if n}


def lease_ends_in(event_id: str) -> float:
    """Return the seconds from the database's now to the due time, or lease end, of a row."""
    due = row(event_id).available_at
    assert due is not None
    return (due - now()).total_seconds()


def end_leases(ids: Sequence[str]) -> None:
    """End the leases of these rows now, as if their time had passed."""
    OutboxEvent.objects.filter(pk__in=ids).update(available_at=now() - timedelta(seconds=1))


def steal(event_id: str, *, owner: str = "thief") -> None:
    """Give a lease to another owner, as a claim after the lease's end would."""
    OutboxEvent.objects.filter(pk=event_id).update(locked_by=owner)


def due_claim(
    me: str = "me",
    *,
    lease: float = 30.0,
    limit: int = 100,
    queue: str = "default",
    since: float | None = None,
    most_bytes: int | None = None,
    branches: Sequence[Branch] | None = None,
    **more: Any,
) -> Claim:
    """Return a claim of one queue, or of ``branches``; with ``ids``, of these alone."""
    if branches is None:
        branches = [Branch(queue, limit, since, most_bytes)] * (more.get("ids") is None)
    return Claim(me=me, lease=lease, branches=branches, **more)


def events_of(rows: Iterable[Row], me: str = "me") -> list[Lease]:
    """Return the events of claimed rows, each leased for long."""
    runs = [row_run(each, deadline=1e12, me=me) for each in rows]
    pairs = zip(rows, runs, strict=True)
    return [lease_from_row(each, columns_of(FULL), run=run, me=me) for each, run in pairs]


def claimed(me: str = "me", **more: Any) -> Claimed:
    """Claim on this thread's connection."""
    return dialect_of(connection).claim(due_claim(me, **more))


def claim(me: str = "me", **more: Any) -> list[Any]:
    """Claim on this thread's connection; return one dict per row."""
    names = (*(FULL if more.get("ids") is None else LIGHT), *TAIL)
    return [dict(zip(names, each, strict=True)) for each in claimed(me, **more).rows]


def ids_claimed_by_an_engine(me: str = "me", **more: Any) -> list[str]:
    """Claim as a worker does, on a connection that waits a second at most for a lock."""
    own = engine_connection("default", lock_wait=1)
    try:
        return sorted(each[0] for each in dialect_of(own).claim(due_claim(me, **more)).rows)
    finally:
        own.close()


def stream_claim(
    me: str = "me",
    *,
    lease: float = 30.0,
    limit: int = 100,
    queue: str = "default",
    since: float | None = None,
    branches: Sequence[Branch] | None = None,
    **more: Any,
) -> Claim:
    """Return a claim of one queue's streams, or of those of ``branches``."""
    branches = [Branch(queue, limit, since)] if branches is None else branches
    return Claim(table=STREAMS, me=me, lease=lease, branches=branches, **more)


def ids_of(rows: Sequence[Any]) -> list[str]:
    return [each["id"] for each in rows]


def write(count: int = 1, event_type: str = PLACED, **fields: Any) -> list[str]:
    """Write events in a transaction of their own; return their ids."""
    with transaction.atomic():
        return outbox.write_many(
            [
                outbox.Event(event_type=event_type, **{"payload": {"n": n}, **fields})
                for n in range(count)
            ]
        )


@contextmanager
def listening(call: Callable[..., Any], event_type: str = PLACED, **options: Any) -> Iterator[None]:
    """Register a listener for the duration of a block."""
    registry.listener(event_type, **options)(call)
    try:
        yield
    finally:
        registry.remove(call)


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a thread with database connections of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)
        finally:
            connections.close_all()

    threading.Thread(target=run, name="test-session").start()
    return future


@contextmanager
def elsewhere(work: Callable[[], object]) -> Iterator[None]:
    """Keep a transaction that has done ``work`` open in another session during a block."""
    begun, end = threading.Event(), threading.Event()

    def transact() -> None:
        try:
            with transaction.atomic():
                work()
                begun.set()
                end.wait(60)
        finally:
            begun.set()

    future = in_thread(transact)
    begun.wait(30)
    try:
        yield
    finally:
        end.set()
        future.result(30)


def sessions() -> int:
    """Return the number of sessions on this database; on SQLite, of its open files."""
    return len(_sessions())


def _sessions() -> list[Any]:
    if connection.vendor == "sqlite":
        import psutil

        name = str(connection.settings_dict["NAME"])
        return [each for each in psutil.Process().open_files() if each.path == name]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pid, state, query FROM pg_stat_activity "
                "WHERE datname = current_database() AND backend_type = 'client backend'"
            )
        else:
            cursor.execute(f"SELECT id, command, info FROM {processes()} p WHERE db = database()")
        return list(cursor.fetchall())


class Purging(Purger):
    """A purger of the database of this thread's connection."""

    def run(self) -> float:
        return perform(connection, self.step())

    def end(self) -> None:
        perform(connection, self.close())


def rest_of(purger: Purging) -> float:
    """Run a purger until it has nothing left to do; return the seconds until its next run."""
    pause = purger.run()
    while purger._leader.holds:
        pause = purger.run()
    return pause


def purging(interval: float, *, me: str = "me", lease: float = 30.0) -> Purging:
    return Purging(me=me, lease=lease, interval=interval)
