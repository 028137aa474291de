"""Doorbells by way of a server: PostgreSQL's LISTEN and NOTIFY, and Redis pub/sub."""

from __future__ import annotations

import time
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import current
from ..sql import engine_connection
from ..sql.postgresql_server import listen, notify, wait_for_notification
from .base import Ear, database_identity, table_identity

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


class Redis:
    """Pub/sub across hosts, for databases without NOTIFY; needs the extra ``redis``."""

    waits = True

    def __init__(self, alias: str, *, url: str = "redis://127.0.0.1:6379/0") -> None:
        try:
            import redis  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise ImproperlyConfigured(
                'OUTBOX["DOORBELL"] "redis" needs: pip install django-transactional-outbox[redis]'
            ) from error
        self.client: Any = redis.Redis.from_url(
            url, socket_timeout=1, socket_connect_timeout=1, health_check_interval=10
        )
        self.channel = f"django_outbox_{database_identity(alias)}"

    def ring(self, connection: BaseDatabaseWrapper) -> None:
        self.client.publish(self.channel, b"")

    def ear(self) -> Ear:
        return RedisEar(self)


class RedisEar:
    sure = False  # Redis keeps nothing for disconnected workers

    def __init__(self, doorbell: Redis) -> None:
        self._doorbell = doorbell
        self._pubsub: Any = None

    def listen(self) -> None:
        self.close()
        self._pubsub = self._doorbell.client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(self._doorbell.channel)

    def wait(self, timeout: float) -> bool:
        return self._pubsub.get_message(timeout=timeout) is not None

    def close(self) -> None:
        if self._pubsub is not None:
            self._pubsub.close()
            self._pubsub = None
