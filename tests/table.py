"""The event table as a test wants it: rows put in, looked at, locked and stolen."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.db import connection, connections, transaction
from django.db.models import F, Model
from django.db.models.functions import Coalesce

import django_outbox as outbox
from django_outbox import dialects, registry
from django_outbox.dialects.vocabulary import FULL, LIGHT, TAIL, Claim
from django_outbox.engine.purger import Purger
from django_outbox.engine.statistics import Statistics
from django_outbox.events import new_id
from django_outbox.models import OutboxEvent, OutboxStream

T = TypeVar("T")

PLACED = "order.placed"


def now() -> datetime:
    """The database's clock."""
    return dialects.of(connection).clock(connection)


def insert(
    count: int = 1, *, due: float | None = 0.0, counted: str = "", **columns: Any
) -> list[str]:
    """Put rows in, due that many seconds from now (None: not at all); return their ids.

    They are alike, but for the column ``counted``, which goes on counting from the first.
    """
    clock = now()
    at = None if due is None else clock + timedelta(seconds=due)
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
    first = OutboxEvent(**{"event_id": new_id(), **given})
    others = [new_id() for _ in range(count - 1)]
    multiply(first, others, counted=counted)
    return [first.event_id, *others]


# A list in JSON as rows of a value and its number, from 1.
LISTED = {
    "sqlite": "(SELECT value, key + 1 AS n FROM json_each(%s)) AS given",
    "postgresql": "json_array_elements_text(CAST(%s AS json)) WITH ORDINALITY AS given(value, n)",
    "mysql": "JSON_TABLE(%s, '$[*]' "
    "COLUMNS (n FOR ORDINALITY, value VARCHAR(255) PATH '$')) AS given",
}


def multiply(row: Model, others: Sequence[str], *, counted: str = "") -> None:
    """Put a row in, and copies under these primary keys; the ORM needs seconds for thousands.

    In one transaction: a worker that claimed the first would have its lease copied.
    """
    meta, quote = row._meta, connection.ops.quote_name
    columns = {each.column: f"model.{quote(each.column)}" for each in meta.concrete_fields}
    columns[meta.pk.column] = "given.value"
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
    """Put events of a key in as a write would; an idle stream is due that many seconds from now."""
    streams = OutboxStream.objects
    with transaction.atomic():
        stream, _ = streams.select_for_update().get_or_create(key=key, defaults={"seq": 0})
        ids = insert(count, due=None, key=key, seq=stream.seq + 1, counted="seq",
                     first_due_at=now(), **columns)  # fmt: skip
        at = None if due is None else now() + timedelta(seconds=due)
        streams.filter(key=key).update(seq=F("seq") + count, due_at=Coalesce("due_at", at))
    return ids


def stream(key: str) -> OutboxStream:
    return OutboxStream.objects.get(key=key)


def stream_due_in(key: str) -> float:
    """Seconds from the database's now to the due time, or lease end, of a stream."""
    due = stream(key).due_at
    assert due is not None
    return (due - now()).total_seconds()


def end_stream_leases(*keys: str) -> None:
    """Let the leases of these streams end now, as if their time had passed."""
    OutboxStream.objects.filter(key__in=keys).update(due_at=now() - timedelta(seconds=1))


def row(event_id: str) -> OutboxEvent:
    return OutboxEvent.objects.get(pk=event_id)


def statuses() -> dict[str, int]:
    """The number of rows by status, without the statuses that none has."""
    return {name: n for name, n in OutboxEvent.objects.counts_by_status().items() if n}


def lease_ends_in(event_id: str) -> float:
    """Seconds from the database's now to the due time, or lease end, of a row."""
    due = row(event_id).available_at
    assert due is not None
    return (due - now()).total_seconds()


def end_leases(ids: Sequence[str]) -> None:
    """Let the leases of these rows end now, as if their time had passed."""
    OutboxEvent.objects.filter(pk__in=ids).update(available_at=now() - timedelta(seconds=1))


def steal(event_id: str, *, owner: str = "thief") -> None:
    """Give a lease to another owner, as a claim after its end would."""
    OutboxEvent.objects.filter(pk=event_id).update(locked_by=owner)


def claim(me: str = "me", *, lease: float = 30.0, limit: int = 100, **more: Any) -> list[Any]:
    """Claim on this thread's connection; return one dict per row."""
    wanted = Claim(me=me, lease=lease, limit=limit, **more)
    names = (*(FULL if wanted.ids is None else LIGHT), *TAIL)
    found = dialects.of(connection).claim(connection, wanted).rows
    return [dict(zip(names, each, strict=True)) for each in found]


def ids_of(rows: Sequence[Any]) -> list[str]:
    return [each["event_id"] for each in rows]


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
    """Have a listener registered for the length of a block."""
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
    """Keep a transaction, which has done ``work``, open in another session during a block."""
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
    """How many sessions the server has on this database; open files of it on SQLite."""
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
            cursor.execute(
                "SELECT id, command, info FROM information_schema.processlist WHERE db = database()"
            )
        return list(cursor.fetchall())


def purging(interval: float) -> Purger:
    """A purger of this database."""
    statistics = Statistics(alias="default", me="me")
    return Purger(alias="default", interval=interval, statistics=statistics)
