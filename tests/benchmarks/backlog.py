"""Rows by the hundred thousand, made by the database itself, as ``write_many`` leaves them."""

from __future__ import annotations

import json
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections

from django_outbox import dialects
from django_outbox.models import OutboxEvent

from .payload import PAYLOAD

TABLE = OutboxEvent._meta.db_table
IDS = {  # 26 characters, in order
    "postgresql": "lpad(CAST(n AS text), 25, '0')",
    "mysql": "LPAD(n, 25, '0')",
    "sqlite": "printf('%%025d', n)",
}
EMPTY = {"sqlite": f"DELETE FROM {TABLE}"}
ANALYZE = {"postgresql": "VACUUM ANALYZE {}", "sqlite": "ANALYZE {}", "mysql": "ANALYZE TABLE {}"}
AGO = 36_000  # seconds since the first of a backlog fell due; the others followed by the ms
TEXT = json.dumps(PAYLOAD)


def fill(events: int, *, event_type: str = "benchmark.count", text: str = TEXT) -> None:
    """Make the table hold that many due events, and nothing else."""
    empty()
    insert(events, due=f"n * 0.001 - {AGO}", event_type=event_type, text=text)
    analyze()


def empty(alias: str = DEFAULT_DB_ALIAS) -> None:
    execute(EMPTY.get(connections[alias].vendor, f"TRUNCATE {TABLE}"), alias=alias)


def analyze(alias: str = DEFAULT_DB_ALIAS) -> None:
    execute(ANALYZE[connections[alias].vendor].format(TABLE), alias=alias)


def insert(
    count: int,
    *,
    due: str | None,
    letter: str = "A",
    status: int = 0,
    owner: str | None = None,
    event_type: str = "benchmark.count",
    text: str = "{}",
    alias: str = DEFAULT_DB_ALIAS,
) -> None:
    """Insert rows numbered by n, due that many seconds from now; ``letter`` begins their ids."""
    connection = connections[alias]
    dialect = dialects.of(connection)
    at = "NULL" if due is None else dialect.plus.replace("%s", f"({due})")
    values = {
        "event_id": f"{concatenated(connection.vendor, letter)}",
        "event_type": "%s", "aggregate_type": "'__GLOBAL__'", "payload": "%s",
        "status": str(status), "attempts": "0", "rescues": "0",
        "occurred_at": dialect.now, "created_at": dialect.now, "first_due_at": dialect.now,
        "available_at": at, "done_at": dialect.now if status == 1 else "NULL",
        "locked_by": "%s", "locked_at": "NULL" if owner is None else dialect.now,
    }  # fmt: skip
    execute(
        f"INSERT INTO {TABLE} ({', '.join(values)}) {numbers(count)} "
        f"SELECT {', '.join(values.values())} FROM numbers WHERE n < {count} ORDER BY n",
        [event_type, text, owner], alias=alias,
    )  # fmt: skip


def concatenated(vendor: str, letter: str) -> str:
    ids = IDS[vendor]
    return f"CONCAT('{letter}', {ids})" if vendor == "mysql" else f"'{letter}' || {ids}"


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
