"""The references of a drain: statements on the bare driver, one connection, no listener.

``same`` are the worker's own statements, ``best`` the best known ones (see ``best``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from django.db import connection

from django_outbox.models import OutboxEvent
from django_outbox.sql import DIALECTS
from django_outbox.sql.values import Branch, Claim

from .best import BATCH, BEST, LEASE, ME

# Claims some events and returns their ids; settles these and returns how many.
Steps = tuple[Callable[[], list[str]], Callable[[list[str]], int]]

REFERENCES = {"same": "the same statements on the bare driver", "best": "the best known statements"}


def drain(count: int, reference: str = "same") -> float:
    """Claim and settle ``count`` due events in batches; return events a second after the first."""
    driver = connect()
    claim, settle = STEPS[reference](driver)
    done, started = 0, 0.0
    try:
        while done < count:
            ids = claim()
            if not ids:
                raise RuntimeError(f"{done} of {count} events were due")
            done += settle(ids)
            started = started or time.perf_counter()
        rate = (count - BATCH) / (time.perf_counter() - started)
    finally:
        driver.close()
    ended = OutboxEvent.objects.filter(status=1, available_at=None, done_at__isnull=False).count()
    if ended != count:
        raise RuntimeError(f"{ended} of {count} events are done")
    return rate


def same(driver: Any) -> Steps:
    """Return how the worker claims and settles."""
    dialect = DIALECTS[connection.vendor](Bare(driver))  # type: ignore[arg-type]
    wanted = Claim(me=ME, lease=LEASE, branches=[Branch("default", BATCH)])
    return (
        lambda: [row[0] for row in dialect.claim(wanted).rows],
        lambda ids: dialect.settle_done(me=ME, ids=ids),
    )


def best(driver: Any) -> Steps:
    """Return how a drain is fastest, as far as we know."""
    cursor, statements = driver.cursor(), BEST[connection.vendor]
    return (
        lambda: [row[0] for row in statements.claim(cursor)],
        lambda ids: statements.settle(cursor, ids),
    )


STEPS = {"same": same, "best": best}


def connect() -> Any:
    """Open a connection of the driver's own, set up as a worker's."""
    if connection.vendor == "sqlite":
        import sqlite3

        opened = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)
        opened.executescript(connection.settings_dict["OPTIONS"]["init_command"])
        return opened
    parameters = connection.get_connection_params()
    if connection.vendor == "postgresql":
        import psycopg

        fitting = {
            name: parameters[name]
            for name in ("host", "port", "user", "password", "dbname")
            if parameters.get(name)
        }
        return psycopg.connect(**fitting, autocommit=True)
    import MySQLdb

    opened = MySQLdb.connect(**parameters)
    opened.autocommit(True)
    opened.cursor().execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    return opened


class Bare:
    """Stands where a dialect expects Django's connection; nothing but the driver's cursor."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._cursor = driver.cursor()
        self.ops, self.vendor = connection.ops, connection.vendor
        self.features, self.in_atomic_block = connection.features, False
        self.pg_version = getattr(connection, "pg_version", None)

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

    def fetchmany(self, size: int) -> Any:
        return self._cursor.fetchmany(size)

    def fetchall(self) -> Any:
        return self._cursor.fetchall()

    @property
    def rowcount(self) -> int:
        return int(self._cursor.rowcount)
