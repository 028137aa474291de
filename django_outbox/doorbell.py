"""Who is rung: news of a commit for workers in other processes. A ring carries no event."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import stat
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from . import dialects
from .conf import current, table_name
from .hooks import resolve

logger = logging.getLogger("django_outbox")

BACKOFF = (1.0, 60.0)  # seconds without a ring after a failed one, and at most
CHECK_AFTER = 5.0  # seconds of silence after which an ear makes sure that it hears
ANSWER_WITHIN = 2.0  # seconds in which its own ring must come back


class Ear(Protocol):
    """The worker's end; used by one thread, which calls ``listen`` again after any error."""

    sure: bool  # hears every ring, so that no probe is needed beside it

    def listen(self) -> None:
        """Open what is needed. What was rung before is for a claim to find."""

    def wait(self, timeout: float) -> bool:
        """Wait for a ring, at most ``timeout`` seconds; return whether one came."""

    def close(self) -> None:
        """Give everything back; may be called twice."""


class Doorbell(Protocol):
    """The writer's end, and the maker of ears."""

    def ring(self, connection: BaseDatabaseWrapper) -> None:
        """Ring every worker of this database. Called after the commit, in autocommit."""

    def ear(self) -> Ear:
        """Return a new ear for a worker of this database."""


def ring(connection: BaseDatabaseWrapper) -> None:
    """Wake the workers of this database, at most once in ``DOORBELL_INTERVAL``; never raises."""
    if (button := _button(connection.alias)) is not None:
        button.press(connection)


def ear(alias: str) -> Ear | None:
    """Return a new ear for a worker, None if ``DOORBELL`` is None."""
    button = _button(alias)
    return button and button.doorbell.ear()


class _Button:
    """One doorbell of this process: coalesces rings and rests after a failed one."""

    def __init__(self, doorbell: Doorbell, interval: float) -> None:
        self.doorbell = doorbell
        self._interval = interval
        self._not_before = 0.0  # monotonic
        self._failures = 0  # in a row

    def press(self, connection: BaseDatabaseWrapper) -> None:
        now = time.monotonic()
        if now < self._not_before:
            return  # a worker looks again one interval after each ring
        self._not_before = now + self._interval
        try:
            self.doorbell.ring(connection)
        except Exception as error:
            self._rest(now, error)
        else:
            self._failures = 0

    def _rest(self, now: float, error: Exception) -> None:
        if not self._failures:
            logger.warning("doorbell failed; events arrive by polling error=%s", error)
        first, most = BACKOFF
        self._not_before = now + min(first * 2.0 ** min(self._failures, 10), most)
        self._failures += 1


@lru_cache(maxsize=None)
def _button(alias: str) -> _Button | None:
    settings = current()
    value = settings.DOORBELL
    options: dict[str, Any] = dict(value) if isinstance(value, dict) else {"kind": value}
    kind = options.pop("kind")
    if kind is None:
        return None
    if kind == "auto":
        kind = "postgres" if dialects.of(connections[alias]).notifies else "local"
    make = KINDS.get(kind) or resolve("DOORBELL")
    try:
        return _Button(make(alias, **options), settings.DOORBELL_INTERVAL)
    except TypeError as error:
        raise ImproperlyConfigured(f'OUTBOX["DOORBELL"] {value!r} does not fit: {error}') from error


def _reset(*, setting: str, **kwargs: Any) -> None:
    if setting in ("OUTBOX", "DATABASES"):
        _button.cache_clear()


setting_changed.connect(_reset, dispatch_uid="django_outbox.doorbell")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_button.cache_clear)


def _identity(alias: str) -> str:
    """Name the table that this alias leads to, alike in all processes that share it."""
    settings = connections.settings[alias]
    place = [settings["ENGINE"], *(str(settings[part]) for part in ("HOST", "PORT", "NAME"))]
    return hashlib.sha256("\0".join([*place, table_name("outbox_event")]).encode()).hexdigest()[:16]


# -- PostgreSQL: LISTEN and NOTIFY -----------------------------------------------------------------


class Postgres:
    """NOTIFY after the commit; inside it, its global lock cost half to five sixths of the writes.

    ``database`` names an alias with a direct connection, for LISTEN hears nothing through a
    transaction pooler.
    """

    def __init__(self, alias: str, *, database: str | None = None) -> None:
        self.alias, self.direct = alias, database or alias
        self.channel = f"django_outbox_{_table_identity()}"

    def ring(self, connection: BaseDatabaseWrapper) -> None:
        if not connection.in_atomic_block:  # a test case holds one open; nothing was committed
            dialects.of(connection).notify(connection, self.channel)

    def ear(self) -> Ear:
        return _PostgresEar(self)


class _PostgresEar:
    """LISTEN on a connection of its own; in silence it rings itself to know that it hears."""

    def __init__(self, bell: Postgres) -> None:
        self._bell = bell
        self._listening: BaseDatabaseWrapper | None = None
        self._heard_at = 0.0  # monotonic
        self._asked_at: float | None = None  # monotonic; since when our own ring is awaited
        self.sure = False

    def listen(self) -> None:
        self.close()
        self._listening = dialects.engine_connection(
            self._bell.direct, lock_wait=current().LOCK_WAIT
        )
        dialects.of(self._listening).listen(self._listening, self._bell.channel)
        self._heard_at, self._asked_at = 0.0, None  # asks at once

    def wait(self, timeout: float) -> bool:
        assert self._listening is not None
        heard = dialects.of(self._listening).heard(self._listening, timeout)
        now = time.monotonic()
        if heard:
            self._heard_at, self._asked_at, self.sure = now, None, True
        elif self._asked_at is not None and now - self._asked_at > ANSWER_WITHIN:
            raise ConnectionError("LISTEN hears nothing; is there a transaction pooler between?")
        elif self._asked_at is None and now - self._heard_at > CHECK_AFTER:
            self._asked_at = now
            asking = connections[self._bell.alias]
            dialects.of(asking).notify(asking, self._bell.channel)
        return heard

    def close(self) -> None:
        self.sure = False
        if self._listening is not None:
            self._listening.close()
            self._listening = None


def _table_identity() -> str:
    """NOTIFY is private to its database already; the table tells two outboxes in it apart."""
    return hashlib.sha256(table_name("outbox_event").encode()).hexdigest()[:16]


# -- this host: a Unix datagram to every worker ----------------------------------------------------


class Local:
    """A socket per worker in a private directory; who may write there may ring, no more.

    ``directory`` may name one that exists; its mode is respected.
    """

    def __init__(self, alias: str, *, directory: str | None = None) -> None:
        self._given = directory
        self._prefix = f"{_identity(alias)}."
        self._sender: socket.socket | None = None

    def ring(self, connection: BaseDatabaseWrapper) -> None:
        if self._sender is None:
            self._sender = _datagram_socket()
        directory = self.directory()
        for name in os.listdir(directory):
            if name.startswith(self._prefix):
                self._send(directory / name)

    def _send(self, path: Path) -> None:
        assert self._sender is not None
        try:
            self._sender.sendto(b"!", str(path))
        except BlockingIOError:
            pass  # rings enough are waiting there
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)  # its worker was killed

    def ear(self) -> Ear:
        return _LocalEar(self, self._prefix)

    def directory(self) -> Path:
        """Return the directory of the sockets: the one that was given, or a private one of ours."""
        if self._given is not None:
            return Path(self._given)
        path = Path(tempfile.gettempdir()) / f"django_outbox_{os.getuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not a directory of ours alone (mode 0700)")
        return path


class _LocalEar:
    sure = False  # writers on other hosts are not heard

    def __init__(self, bell: Local, prefix: str) -> None:
        self._bell, self._prefix = bell, prefix
        self._socket: socket.socket | None = None
        self._path: Path | None = None

    def listen(self) -> None:
        self.close()
        name = f"{self._prefix}{os.getpid()}.{secrets.token_hex(3)}"
        path = self._bell.directory() / name
        self._socket = _datagram_socket()
        self._socket.bind(str(path))
        self._path = path

    def wait(self, timeout: float) -> bool:
        assert self._socket is not None and self._path is not None
        self._socket.settimeout(timeout)
        try:
            self._socket.recv(16)
        except TimeoutError:
            if not self._path.exists():
                raise ConnectionError(f"{self._path} was removed") from None
            return False
        self._take_what_waits()
        return True

    def _take_what_waits(self) -> None:
        assert self._socket is not None
        self._socket.setblocking(False)
        try:
            while True:
                self._socket.recv(16)
        except BlockingIOError:
            return

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


# -- Redis: across hosts, for MySQL ----------------------------------------------------------------


class Redis:
    """Pub/sub; needs the extra ``redis``. ``{"kind": "redis", "url": "redis://…"}``."""

    def __init__(self, alias: str, *, url: str = "redis://127.0.0.1:6379/0") -> None:
        try:
            import redis
        except ImportError as error:
            raise ImproperlyConfigured(
                'OUTBOX["DOORBELL"] "redis" needs: pip install django-transactional-outbox[redis]'
            ) from error
        self.client: Any = redis.Redis.from_url(
            url, socket_timeout=1, socket_connect_timeout=1, health_check_interval=10
        )
        self.channel = f"django_outbox_{_identity(alias)}"

    def ring(self, connection: BaseDatabaseWrapper) -> None:
        self.client.publish(self.channel, b"")

    def ear(self) -> Ear:
        return _RedisEar(self)


class _RedisEar:
    sure = False  # Redis keeps nothing for who was away

    def __init__(self, bell: Redis) -> None:
        self._bell = bell
        self._pubsub: Any = None

    def listen(self) -> None:
        self.close()
        self._pubsub = self._bell.client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(self._bell.channel)

    def wait(self, timeout: float) -> bool:
        return self._pubsub.get_message(timeout=timeout) is not None

    def close(self) -> None:
        if self._pubsub is not None:
            self._pubsub.close()
            self._pubsub = None


KINDS: dict[str, Any] = {"postgres": Postgres, "local": Local, "redis": Redis}
