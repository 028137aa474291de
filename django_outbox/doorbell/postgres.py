"""Doorbell for PostgreSQL: LISTEN and NOTIFY."""

from __future__ import annotations

import time

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import current
from ..sql import engine_connection
from ..sql.postgresql_server import listen, notify, wait_for_notification
from .base import Ear, table_identity

PROBE_AFTER = 5.0  # seconds without a notification, after which a worker tests its connection
PROBE_TIMEOUT = 2.0  # seconds within which it must receive its own notification


class Postgres:
    """NOTIFY after the commit; inside it, its global lock cost half to five sixths of the writes.

    ``database`` names an alias with a direct connection, because LISTEN receives nothing through
    a transaction pooler.
    """

    waits = True

    def __init__(self, alias: str, *, database: str | None = None) -> None:
        self.alias, self.direct = alias, database or alias
        self.channel = f"django_outbox_{table_identity()}"

    def ring(self, connection: BaseDatabaseWrapper) -> None:
        notify(connection, self.channel)

    def ear(self) -> Ear:
        return PostgresEar(self)


class PostgresEar:
    """LISTEN on a connection of its own; tests it by a NOTIFY to itself if it receives nothing."""

    def __init__(self, doorbell: Postgres) -> None:
        self._doorbell = doorbell
        self._listening: BaseDatabaseWrapper | None = None
        self._received_at = 0.0  # monotonic
        self._probed_at: float | None = None  # monotonic; when it last notified itself
        self.sure = False

    def listen(self) -> None:
        self.close()
        self._listening = engine_connection(self._doorbell.direct, lock_wait=current().LOCK_WAIT)
        listen(self._listening, self._doorbell.channel)
        self._received_at, self._probed_at = 0.0, None  # tests the connection at once

    def wait(self, timeout: float) -> bool:
        assert self._listening is not None
        received = wait_for_notification(self._listening, timeout)
        now = time.monotonic()
        if received:
            self._received_at, self._probed_at, self.sure = now, None, True
        elif self._probed_at is not None and now - self._probed_at > PROBE_TIMEOUT:
            raise ConnectionError(
                "LISTEN receives nothing; is there a transaction pooler in between?"
            )
        elif self._probed_at is None and now - self._received_at > PROBE_AFTER:
            self._probed_at = now
            probing = connections[self._doorbell.alias]
            notify(probing, self._doorbell.channel)
        return received

    def close(self) -> None:
        self.sure = False
        if self._listening is not None:
            self._listening.close()
            self._listening = None
