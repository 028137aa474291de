"""Doorbell for PostgreSQL: LISTEN and NOTIFY."""

from __future__ import annotations

import time

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import current
from ..sql import engine_connection
from ..sql.postgresql.notify import listen, notify, wait_for_notification
from .ends import Ear, table_identity

CHECK_AFTER = 5.0  # seconds without a notification, after which a worker tests its connection
ANSWER_WITHIN = 2.0  # seconds within which it must receive its own notification


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

    def __init__(self, bell: Postgres) -> None:
        self._bell = bell
        self._listening: BaseDatabaseWrapper | None = None
        self._heard_at = 0.0  # monotonic
        self._asked_at: float | None = None  # monotonic; when it last notified itself
        self.sure = False

    def listen(self) -> None:
        self.close()
        self._listening = engine_connection(self._bell.direct, lock_wait=current().LOCK_WAIT)
        listen(self._listening, self._bell.channel)
        self._heard_at, self._asked_at = 0.0, None  # tests the connection at once

    def wait(self, timeout: float) -> bool:
        assert self._listening is not None
        heard = wait_for_notification(self._listening, timeout)
        now = time.monotonic()
        if heard:
            self._heard_at, self._asked_at, self.sure = now, None, True
        elif self._asked_at is not None and now - self._asked_at > ANSWER_WITHIN:
            raise ConnectionError(
                "LISTEN receives nothing; is there a transaction pooler in between?"
            )
        elif self._asked_at is None and now - self._heard_at > CHECK_AFTER:
            self._asked_at = now
            asking = connections[self._bell.alias]
            notify(asking, self._bell.channel)
        return heard

    def close(self) -> None:
        self.sure = False
        if self._listening is not None:
            self._listening.close()
            self._listening = None
