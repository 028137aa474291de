"""MySQL and MariaDB: settling of events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from django.db import OperationalError, transaction

from ..base.routes import Routing


class MySQLSettling(Routing):
    deleted_by_id = "e FROM {0} e FORCE INDEX (PRIMARY)"
    joined = "CONCAT({}, {})"
    skip_known = " ON DUPLICATE KEY UPDATE id = VALUES(id)"

    @contextmanager
    def read_committed(self) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._begin_read_committed())
            except OperationalError:  # the session ended while idle: nothing was run
                if self.connection.in_atomic_block:
                    raise
                self.connection.close()
                stack.enter_context(self._begin_read_committed())
            yield

    @contextmanager
    def _begin_read_committed(self) -> Iterator[None]:
        if not self.connection.in_atomic_block:  # for the next transaction only
            self._run("SET TRANSACTION ISOLATION LEVEL READ COMMITTED", [])
        with transaction.atomic(using=self.connection.alias):
            yield
