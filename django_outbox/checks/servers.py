"""System checks of a database's server and driver: unknown, too old, or not compatible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.checks import CheckMessage, Error, Warning
from django.db.backends.base.base import BaseDatabaseWrapper

from ..sql import DIALECTS, SUPPORTED, dialect_of

Version = tuple[int, ...]

MIN_VERSIONS: dict[str, Version] = {
    "PostgreSQL": (15,),
    "MySQL": (8, 4),
    "MariaDB": (10, 11),
    "SQLite": (3, 35),
}

MIN_PSYCOPG: Version = (3, 2)  # the first whose notifies() takes a timeout

# What VERSION() contains if only the protocol is the same, as each project documents it: TiDB
# "8.0.11-TiDB-v8.5.0", OceanBase "5.7.25-OceanBase-v4.2.1.0", YugabyteDB "PostgreSQL 11.2-YB-2.18",
# CockroachDB "CockroachDB CCL v24.1.0".
PROTOCOL_ONLY = {
    "-TiDB-": "TiDB",
    "-OceanBase-": "OceanBase",
    "-YB-": "YugabyteDB",
    "CockroachDB ": "CockroachDB",
}


def of_server(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if connection.vendor in DIALECTS:
        yield from [*_protocol_only(connection)] or _outdated(connection)
        yield from (*_driver(connection), *_cluster(connection))
        return
    yield Error(
        f"The database {connection.alias!r} is {connection.display_name}, for which the outbox has "
        "no SQL of its own and no tests.",
        hint=f"Route django_outbox to {SUPPORTED}.",
        id="django_outbox.E024",
    )


def _protocol_only(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    """Yield E028: a server that accepts ``SKIP LOCKED`` but locks nothing delivers twice."""
    version_text = dialect_of(connection).version_text()
    for mark, name in PROTOCOL_ONLY.items():
        if mark in version_text:
            yield Error(
                f"The database {connection.alias!r} is {name}, which speaks the protocol of "
                f"{connection.display_name} but does not lock rows in the same way. Workers rely "
                "on these locks; the outbox is not tested there.",
                hint=f"Route django_outbox to {SUPPORTED}.",
                id="django_outbox.E028",
            )


def _cluster(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if (cluster := dialect_of(connection).cluster()) is not None:
        yield Warning(
            f"The database {connection.alias!r} is a {cluster} cluster in which several nodes take "
            "writes. Of two transactions that write events of one key on two nodes, the later "
            'fails with error 1213 ("Deadlock found") or 3101. Workers are prepared for that, but '
            "your own code has to repeat such a transaction.",
            hint="Repeat such transactions, or write on one node only; then silence this check.",
            id="django_outbox.W061",
        )


def _outdated(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    name, version = connection.display_name, connection.get_database_version()
    minimum = MIN_VERSIONS[name]
    if version < minimum:
        yield Warning(
            f"The database {connection.alias!r} is {name} {_format(version)}; expected "
            f"{_format(minimum)} or later.",
            hint="Upgrade the server.",
            id="django_outbox.W025",
        )


def _driver(connection: Any) -> Iterator[CheckMessage]:
    if connection.vendor != "postgresql":
        return
    driver = connection.Database
    version = tuple(int(part) for part in driver.__version__.split()[0].split(".")[:2])
    if version < MIN_PSYCOPG:
        yield Warning(
            f"The database {connection.alias!r} is reached by {driver.__name__} "
            f"{driver.__version__}; expected psycopg {_format(MIN_PSYCOPG)} or later. With "
            "psycopg 3.0 and 3.1 workers receive no notifications and find events by polling; "
            "psycopg2 is not tested.",
            hint="Run pip install 'psycopg[binary]>=3.2'.",
            id="django_outbox.W054",
        )


def _format(version: Version) -> str:
    return ".".join(map(str, version))
