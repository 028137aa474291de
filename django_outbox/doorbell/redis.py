"""Doorbell across hosts for databases without NOTIFY: Redis pub/sub."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.base import BaseDatabaseWrapper

from .base import Ear, database_identity


class Redis:
    """Pub/sub; needs the extra ``redis``. Setting: ``{"kind": "redis", "url": "redis://…"}``."""

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
