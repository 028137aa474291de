"""Who is rung: news of a commit for workers in other processes. A ring carries no event."""

from __future__ import annotations

import logging
import os
import time
from functools import cache
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import dialects
from ..conf import current, resolve
from .ends import QUIET, Doorbell, Ear
from .local import Local
from .postgres import Postgres
from .redis import Redis

logger = logging.getLogger("django_outbox")

KINDS: dict[str, Any] = {"postgres": Postgres, "local": Local, "redis": Redis}

SLOW = 0.1  # of DOORBELL_INTERVAL: what a ring takes that is slow
SHARE = 0.05  # of a writer's time that slow rings may take
BACKOFF = (1.0, 60.0)  # seconds without a ring after a failed one, and at most


def ring(connection: BaseDatabaseWrapper) -> None:
    """Wake the workers of this database, once in ``DOORBELL_INTERVAL`` at most; never raises.

    Where a ring waits long for its answer, more seldom: see ``SHARE``.
    """
    if (button := _button(connection.alias)) is not None:
        button.press(connection)


def ear(alias: str) -> Ear | None:
    """Return a new ear for a worker, None if ``DOORBELL`` is None."""
    button = _button(alias)
    return None if button is None else button.doorbell.ear()


class _Button:
    """One doorbell of this process: coalesces rings and rests after a failed one."""

    def __init__(self, doorbell: Doorbell, interval: float) -> None:
        self.doorbell = doorbell
        self._interval = interval
        self._not_before = 0.0  # monotonic
        self._failures = 0  # in a row

    def press(self, connection: BaseDatabaseWrapper) -> None:
        if connection.in_atomic_block:
            return  # a test case holds it open: nothing was committed
        now = time.monotonic()
        if now < self._not_before:
            return  # a worker looks again when who rang may ring again
        self._not_before = now + self._interval
        try:
            self.doorbell.ring(connection)
        except Exception as error:  # noqa: BLE001 - the commit is done; only latency is lost
            self._rest(now, error)
        else:
            self._failures = 0
            took = time.monotonic() - now
            if getattr(self.doorbell, "waits", False) and took > SLOW * self._interval:
                self._not_before = now + min(took / SHARE, QUIET * self._interval)

    def _rest(self, now: float, error: Exception) -> None:
        if not self._failures:
            reason = str(error).partition("\n")[0]
            logger.warning("doorbell failed; events arrive by polling error=%s", reason)
        first, most = BACKOFF
        self._not_before = now + min(first * 2.0 ** min(self._failures, 10), most)
        self._failures += 1


@cache
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
