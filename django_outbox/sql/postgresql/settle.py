"""PostgreSQL: settling of events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..base.routes import Routing


class PostgresSettling(Routing):
    def __init__(self) -> None:
        self._read_committed: WeakSet[Any] = WeakSet()  # driver connections at this level

    @contextmanager
    def read_committed(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        outermost = not connection.in_atomic_block
        with transaction.atomic(using=connection.alias):
            if outermost and connection.connection not in self._read_committed:
                self._make_read_committed(connection)
            yield

    def _make_read_committed(self, connection: BaseDatabaseWrapper) -> None:
        """Set the level before the transaction reads; remember connections that begin with it."""
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            if cursor.fetchone()[0] == "read committed":
                self._read_committed.add(connection.connection)
            else:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
