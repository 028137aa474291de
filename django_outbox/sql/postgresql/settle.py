"""PostgreSQL: settling of events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakSet

from django.db import transaction

from ..base.routes import Routing


class PostgresSettling(Routing):
    _read_committed: ClassVar[WeakSet[Any]] = WeakSet()  # driver connections at this level

    @contextmanager
    def read_committed(self) -> Iterator[None]:
        outermost = not self.connection.in_atomic_block
        with transaction.atomic(using=self.connection.alias):
            if outermost and self.connection.connection not in self._read_committed:
                self._make_read_committed()
            yield

    def _make_read_committed(self) -> None:
        """Set the level before the transaction reads; remember connections that begin with it."""
        if self._rows("SHOW transaction_isolation")[0][0] == "read committed":
            self._read_committed.add(self.connection.connection)
        else:
            self._run("SET TRANSACTION ISOLATION LEVEL READ COMMITTED", [])
