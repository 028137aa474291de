"""The reference of a drain: the same statements on the bare driver, one connection, no listener."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from django.db import connection

from django_outbox.sql import dialect_of
from django_outbox.sql.values import Branch, Claim

BATCH = 500


def drain(count: int) -> float:
    """Claim and settle ``count`` due events in batches; return events a second after the first."""
    bare, dialect = Bare(connect()), dialect_of(connection)
    claim = Claim(me="reference", lease=30, branches=[Branch("default", BATCH)])
    done, started = 0, 0.0
    try:
        while done < count:
            ids = [row[0] for row in dialect.claim(bare, claim).rows]  # type: ignore[arg-type]
            if not ids:
                raise RuntimeError(f"{done} of {count} events were due")
            done += dialect.settle_done(bare, me="reference", ids=ids)  # type: ignore[arg-type]
            started = started or time.perf_counter()
        return (count - BATCH) / (time.perf_counter() - started)
    finally:
        bare.driver.close()


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

        fitting = {name: parameters[name] for name in ("host", "port", "user", "password", "dbname")
                   if parameters.get(name)}  # fmt: skip
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
