"""The reference of a drain: the same statements on the bare driver, one connection, no listener."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from django.db import connection

from django_outbox import dialects
from django_outbox.dialects.vocabulary import Claim

BATCH = 500


def drain(count: int) -> float:
    """Claim and settle ``count`` due events in batches; return events per second."""
    connection.ensure_connection()
    dialect, bare = dialects.of(connection), Bare(connection.connection.cursor())
    claim = Claim(me="reference", lease=30, limit=BATCH)
    started, done = time.perf_counter(), 0
    while done < count:
        ids = [row[0] for row in dialect.claim(bare, claim)]  # type: ignore[arg-type]
        if not ids:
            break
        done += dialect.settle_done(bare, me="reference", ids=ids)  # type: ignore[arg-type]
    return done / (time.perf_counter() - started)


class Bare:
    """Stands where a dialect expects Django's connection; nothing but the driver's cursor."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
        self.ops, self.vendor = connection.ops, connection.vendor

    def cursor(self) -> Bare:
        return self

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def execute(self, sql: str, params: Sequence[Any]) -> None:
        if self.vendor == "sqlite":
            sql = sql.replace("%s", "?").replace("%%", "%")
        self._cursor.execute(sql, params)

    def fetchall(self) -> Any:
        return self._cursor.fetchall()

    @property
    def rowcount(self) -> int:
        return int(self._cursor.rowcount)
