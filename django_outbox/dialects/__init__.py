"""All that differs between databases, side by side; the only place with ``vendor`` and raw SQL."""

from __future__ import annotations

import copy
from functools import cache

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import load_backend

from .mysql import MySQL
from .optimistic import Optimistic
from .postgresql import PostgreSQL
from .sqlite import SQLite

DIALECTS: dict[str, type[Optimistic]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,  # and MariaDB
    "sqlite": SQLite,
}


def of(connection: BaseDatabaseWrapper) -> Optimistic:
    """Return the dialect of this connection's database; an unknown one claims optimistically."""
    return _dialect(connection.vendor)


@cache
def _dialect(vendor: str) -> Optimistic:
    return DIALECTS.get(vendor, Optimistic)()


def engine_connection(alias: str, *, lock_wait: float) -> BaseDatabaseWrapper:
    """Make a connection of the engine's own, so that none of its settings reach a listener.

    It is the alias's in all but pool, isolation (READ COMMITTED) and how long it waits for locks.
    """
    settings = copy.deepcopy(connections.settings[alias])
    settings.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False, AUTOCOMMIT=True)
    connection = load_backend(settings["ENGINE"]).DatabaseWrapper(settings, alias)
    of(connection).prepare_engine(settings, lock_wait=lock_wait)
    return connection  # type: ignore[no-any-return]


def is_in_memory(connection: BaseDatabaseWrapper) -> bool:
    """Say whether the database lives in this one connection, where no thread can reach it."""
    return connection.vendor == "sqlite" and bool(connection.is_in_memory_db())  # type: ignore[attr-defined]
