"""Doorbell: wake workers in other processes after a commit. A notification carries no event."""

from __future__ import annotations

import logging
import os
import time
from functools import cache

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import current
from .base import MAX_INTERVALS, Doorbell, Ear
from .selection import create_doorbell

logger = logging.getLogger("django_outbox")

SLOW_FRACTION = 0.1  # fraction of DOORBELL_INTERVAL; a notification that takes longer is slow
MAX_TIME_SHARE = 0.05  # fraction of a writer's time that slow notifications may take
BACKOFF = (1.0, 60.0)  # seconds without a notification after the first failure, and at most


def ring(connection: BaseDatabaseWrapper) -> None:
    """Wake the workers of this database, at most once per ``DOORBELL_INTERVAL``; never raise.

    If notifications wait long for their answer, send fewer: see ``MAX_TIME_SHARE``.
    """
    if (notifier := _notifier(connection.alias)) is not None:
        notifier.notify(connection)


def ear(alias: str) -> Ear | None:
    """Return a new listener connection for a worker; None if ``DOORBELL`` is None.

    Raises ``ImproperlyConfigured`` if ``DOORBELL`` cannot be used.
    """
    notifier = _notifier(alias)
    return None if notifier is None else notifier.doorbell.ear()


class _Notifier:
    """A doorbell of this process: coalesces notifications, and backs off after failures."""

    def __init__(self, doorbell: Doorbell, interval: float) -> None:
        self.doorbell = doorbell
        self._interval = interval
        self._not_before = 0.0  # monotonic
        self._failures = 0  # consecutive

    def notify(self, connection: BaseDatabaseWrapper) -> None:
        if connection.in_atomic_block:
            return  # a TestCase holds it open: nothing was committed
        now = time.monotonic()
        if now < self._not_before:
            return  # workers poll again once this writer may notify again
        self._not_before = now + self._interval
        try:
            self.doorbell.ring(connection)
        except Exception as error:  # noqa: BLE001 - the commit is done; only latency is lost
            self._back_off(now, error)
        else:
            self._failures = 0
            took = time.monotonic() - now
            if getattr(self.doorbell, "waits", False) and took > SLOW_FRACTION * self._interval:
                self._not_before = now + min(took / MAX_TIME_SHARE, MAX_INTERVALS * self._interval)

    def _back_off(self, now: float, error: Exception) -> None:
        if not self._failures:
            reason = str(error).partition("\n")[0]
            logger.warning("doorbell failed; events arrive by polling error=%s", reason)
        first, most = BACKOFF
        self._not_before = now + min(first * 2.0 ** min(self._failures, 10), most)
        self._failures += 1


class _Unusable:
    """Replaces a doorbell that cannot be used: a worker does not start, a writer goes on."""

    def __init__(self, error: ImproperlyConfigured) -> None:
        self._error = error

    def ring(self, connection: BaseDatabaseWrapper) -> None:
        raise self._error

    def ear(self) -> Ear:
        raise self._error


@cache
def _notifier(alias: str) -> _Notifier | None:
    doorbell: Doorbell | None
    try:
        doorbell = create_doorbell(alias)
    except ImproperlyConfigured as error:
        doorbell = _Unusable(error)
    return None if doorbell is None else _Notifier(doorbell, current().DOORBELL_INTERVAL)


def _reset(*, setting: str, **kwargs: object) -> None:
    if setting in ("OUTBOX", "DATABASES"):
        _notifier.cache_clear()


setting_changed.connect(_reset, dispatch_uid="django_outbox.doorbell")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_notifier.cache_clear)
