"""Rows by the hundred thousand, made by the database itself, as ``write_many`` leaves them."""

from __future__ import annotations

import json
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections

from django_outbox.events import GLOBAL
from django_outbox.listeners.queues import routes_of
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of

from .payload import PAYLOAD

TABLE, STREAMS = OutboxEvent._meta.db_table, OutboxStream._meta.db_table
IDS = {  # 26 characters, in order
    "postgresql": "lpad(CAST(n AS text), 25, '0')",
    "mysql": "LPAD(n, 25, '0')",
    "sqlite": "printf('%%025d', n)",
}
ANALYZE = {"postgresql": "VACUUM ANALYZE {}", "sqlite": "ANALYZE {}", "mysql": "ANALYZE TABLE {}"}
AGO = 36_000  # seconds since the first of a backlog fell due; the others followed by the ms
DUE = f"n * 0.001 - {AGO}"
TEXT = json.dumps(PAYLOAD)


def fill(events: int, *, event_type: str = "benchmark.count", per_key: int = 0) -> None:
    """Make the table hold that many due events, so many of each key (0: no keys), and no others."""
    empty()
    insert(events, due=DUE, event_type=event_type, text=TEXT, per_key=per_key)
    analyze()


def empty(alias: str = DEFAULT_DB_ALIAS) -> None:
    for table in (TABLE, STREAMS):
        how = "DELETE FROM" if connections[alias].vendor == "sqlite" else "TRUNCATE"
        execute(f"{how} {table}", alias=alias)


def analyze(alias: str = DEFAULT_DB_ALIAS) -> None:
    for table in (TABLE, STREAMS):
        execute(ANALYZE[connections[alias].vendor].format(table), alias=alias)


def insert(
    count: int,
    *,
    due: str | None,
    letter: str = "A",
    status: int = 0,
    owner: str | None = None,
    event_type: str = "benchmark.count",
    text: str = "{}",
    per_key: int = 0,
    queue: str = "default",
    alias: str = DEFAULT_DB_ALIAS,
) -> None:
    """Insert rows numbered by n, due that many seconds from now; ``letter`` begins their ids."""
    connection = connections[alias]
    dialect, (route, *_) = dialect_of(connection), routes_of(GLOBAL, event_type)
    at = "NULL" if due is None else after(due, alias)
    key = connection.ops.quote_name("key")
    values = {
        "id": concatenated(connection.vendor, letter, IDS[connection.vendor]),
        "event_id": concatenated(connection.vendor, letter, IDS[connection.vendor]),
        "listener": "%s",
        "routes": "%s",
        "event_type": "%s",
        "aggregate_type": "'__GLOBAL__'",
        "payload": "%s",
        "status": str(status),
        "attempts": "0",
        "rescues": "0",
        "occurred_at": dialect.now,
        "created_at": dialect.now,
        "first_due_at": at,
        "available_at": "NULL" if per_key else at,
        "done_at": dialect.now if status == 1 else "NULL",
        "queue": f"'{queue}'",
        "locked_by": "%s",
        "locked_at": "NULL" if owner is None else dialect.now,
    }
    if per_key:
        first = f"(n - n %% {per_key})"
        values[key] = concatenated(connection.vendor, letter, first)
        values["stream"] = concatenated(connection.vendor, f":{letter}", first)
        values["seq"] = f"n %% {per_key} + 1"
    execute(
        f"INSERT INTO {TABLE} ({', '.join(values)}) {numbers(count)} "
        f"SELECT {', '.join(values.values())} FROM numbers WHERE n < {count} ORDER BY n",
        [route.title, route.digest, event_type, text, owner],
        alias=alias,
    )
    if per_key:
        execute(
            f"INSERT INTO {STREAMS} (stream, {key}, seq, due_at) "
            f"SELECT stream, {key}, max(seq), min(first_due_at) "
            f"FROM {TABLE} WHERE {key} LIKE '{letter}%' GROUP BY stream, {key}",
            alias=alias,
        )


def after(seconds: object, alias: str = DEFAULT_DB_ALIAS) -> str:
    """Return the SQL of so many seconds from now."""
    return dialect_of(connections[alias]).now_plus.replace("%s", f"({seconds})")


def concatenated(vendor: str, letter: str, more: str) -> str:
    return f"CONCAT('{letter}', {more})" if vendor == "mysql" else f"'{letter}' || {more}"


def numbers(count: int) -> str:
    """Return a WITH of ``numbers`` (n), at least ``count`` of them, that every database knows."""
    places = len(str(count - 1))
    sums = " + ".join(f"{10**place} * d{place}.n" for place in range(places))
    digits = " UNION ALL ".join(f"SELECT {digit}{' AS n' * (digit == 0)}" for digit in range(10))
    tables = ", ".join(f"digits d{place}" for place in range(places))
    return f"WITH digits AS ({digits}), numbers AS (SELECT {sums} AS n FROM {tables})"


def execute(sql: str, params: list[Any] | None = None, *, alias: str = DEFAULT_DB_ALIAS) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params)
