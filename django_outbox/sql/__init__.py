"""The SQL of each database, and everything else that differs between databases."""

from __future__ import annotations

import copy

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import load_backend

from .dialect import Dialect
from .mysql import MySQL
from .postgresql import PostgreSQL
from .sqlite import SQLite

SUPPORTED = "PostgreSQL, MySQL, MariaDB or SQLite"

DIALECTS: dict[str, type[Dialect]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,  # and MariaDB
    "sqlite": SQLite,
}


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """Return the SQL of this connection's database.

    Raises ``ImproperlyConfigured`` for a database that is not supported.
    """
    try:
        return DIALECTS[connection.vendor](connection)
    except KeyError:
        raise ImproperlyConfigured(
            f"The database {connection.alias!r} is {connection.display_name}, for which the "
            f"outbox has no SQL. Route django_outbox to {SUPPORTED}."
        ) from None


def can_notify(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the database itself can notify workers of a commit."""
    return connection.vendor == "postgresql"


def engine_connection(alias: str, *, lock_wait: float) -> BaseDatabaseWrapper:
    """Make a connection for the worker's own threads, so that its settings never reach a listener.

    Unlike the alias's, it has no pool, is READ COMMITTED and waits ``lock_wait`` seconds for locks.
    """
    settings = copy.deepcopy(connections.settings[alias])
    settings.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False, AUTOCOMMIT=True)
    backend = load_backend(settings["ENGINE"]).DatabaseWrapper

    class Engine(backend):  # type: ignore[misc, valid-type]
        queries_logged = False  # with DEBUG, Django would keep them for the life of the thread
        is_clustered = False  # whether other nodes take writes, too

        def init_connection_state(self) -> None:
            super().init_connection_state()
            self.is_clustered = dialect_of(self).begin_session()

    connection: BaseDatabaseWrapper = Engine(settings, alias)
    dialect_of(connection).prepare_engine(settings, lock_wait=lock_wait)
    dialect_of(connection).guard_engine()
    return connection


def begin_session(connection: BaseDatabaseWrapper) -> None:
    """Have a listener's new session see what other nodes have committed, as the worker's do.

    Else an atomic listener would not find its own lease, nor any listener what its event is about.
    """
    if connection.vendor in DIALECTS:
        dialect_of(connection).begin_session()


def is_in_memory(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the database is inside this connection, where no other thread reaches it."""
    return connection.vendor == "sqlite" and bool(connection.is_in_memory_db())  # type: ignore[attr-defined]
