"""Doorbell: wake workers in other processes after a commit. A notification carries no event."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import current, imported
from ..exceptions import did_you_mean
from ..log import first_line
from ..sql import can_notify
from .base import MAX_INTERVALS, Doorbell, Ear
from .local import Local
from .servers import Postgres, Redis

logger = logging.getLogger("django_outbox")

KINDS: dict[str, Callable[..., Any]] = {"postgres": Postgres, "local": Local, "redis": Redis}
METHODS = ("ring", "ear")
BURST = 0.1  # seconds by which notifications may be ahead of their average
LOOP_GAP = 0.002  # seconds; a loop commits again sooner than that
LOOP_COMMITS = 3  # consecutive commits within LOOP_GAP that count as a loop
MAX_TIME_SHARE = 0.05  # fraction of a writer's time that waiting for their answers may take
BACKOFF = (1.0, 60.0)  # seconds without a notification after the first failure, and at most


def ring(connection: BaseDatabaseWrapper) -> None:
    """Wake the workers of this database, once per ``DOORBELL_INTERVAL`` on average; never raise.

    Commits at random moments sometimes come close together. So notifications may be ``BURST`` ahead
    of the average, except in a loop of commits, which notifies every two intervals. Under a
    steady load, or if answers take long (see ``MAX_TIME_SHARE``), they are up to ``MAX_INTERVALS``
    times as rare.
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
        self._spent_until = 0.0  # monotonic; when the notifications so far are within the average
        self._failures = 0  # consecutive
        self._committed_at = self._notified_at = 0.0  # monotonic; the last time of each
        self._quick_commits = 0  # consecutive

    def notify(self, connection: BaseDatabaseWrapper) -> None:
        if connection.in_atomic_block:
            return  # a TestCase holds it open: nothing was committed
        now = time.monotonic()
        is_quick, self._committed_at = now < self._committed_at + LOOP_GAP, now
        self._quick_commits = self._quick_commits + 1 if is_quick else 0
        if now < self._not_before or (
            self._quick_commits >= LOOP_COMMITS and now < self._notified_at + 2 * self._interval
        ):
            return  # workers poll again once this writer may notify again
        self._notified_at = now
        self._spend(now, self._interval)
        try:
            self.doorbell.ring(connection)
        except Exception as error:  # noqa: BLE001 - the commit is done; only latency is lost
            self._back_off(now, error)
        else:
            self._failures = 0
            if getattr(self.doorbell, "waits", False):
                took = time.monotonic() - now
                pause = min(took / MAX_TIME_SHARE, MAX_INTERVALS * self._interval)
                self._spend(now, max(pause - self._interval, 0.0))

    def _spend(self, now: float, seconds: float) -> None:
        """Count a notification as ``seconds`` of the average; pause once ``BURST`` is used up."""
        self._spent_until = max(self._spent_until, now) + seconds
        if self._spent_until > now + BURST:  # a steady load: let more commits share a notification
            self._not_before = now + MAX_INTERVALS * self._interval
            self._spent_until = self._not_before + BURST

    def _back_off(self, now: float, error: Exception) -> None:
        if not self._failures:
            logger.warning("doorbell failed; events arrive by polling error=%s", first_line(error))
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
    try:
        doorbell: Doorbell | None = create_doorbell(alias)
    except ImproperlyConfigured as error:
        doorbell = _Unusable(error)
    return None if doorbell is None else _Notifier(doorbell, current().DOORBELL_INTERVAL)


class UnusableDoorbell(ImproperlyConfigured):
    """``DOORBELL`` does not name a usable doorbell."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message} {hint}")
        self.message, self.hint = message, hint


def create_doorbell(alias: str) -> Doorbell | None:
    """Create the doorbell of a database alias; return None if ``DOORBELL`` is None.

    Raises ``UnusableDoorbell``. Opens nothing, so that system checks may call it too.
    """
    value = current().DOORBELL
    options: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"kind": value}
    kind = options.pop("kind")
    if kind is None:
        return None
    if kind == "auto":
        kind = "postgres" if can_notify(connections[alias]) else "local"
    make = KINDS.get(kind) or _by_path(kind)
    _check_options(kind, make, options)
    if kind == "postgres":
        _require_postgres(alias, options.get("database") or alias)
    try:
        doorbell = make(alias, **options)
    except ImproperlyConfigured as error:
        raise UnusableDoorbell(str(error), "Or choose another doorbell.") from error
    except Exception as error:
        raise UnusableDoorbell(
            f'OUTBOX["DOORBELL"] {kind!r} could not be made: {error!r}.', "Correct its options."
        ) from error
    lacking = [name for name in METHODS if not callable(getattr(doorbell, name, None))]
    if lacking:
        raise UnusableDoorbell(
            f'OUTBOX["DOORBELL"] names {kind!r}, which has no method {" and no ".join(lacking)}.',
            "Expected a class with ring(connection) and ear().",
        )
    return doorbell  # type: ignore[no-any-return]


def _by_path(kind: Any) -> Callable[..., Any]:
    known = ["auto", *KINDS]
    if not isinstance(kind, str) or "." not in kind:
        raise UnusableDoorbell(
            f'OUTBOX["DOORBELL"] is {kind!r}; expected one of {", ".join(known)}, a dotted path '
            "or None.",
            did_you_mean(str(kind), known, "See the settings reference."),
        )
    try:
        make = imported('OUTBOX["DOORBELL"]', kind)
    except ImproperlyConfigured as error:
        raise UnusableDoorbell(f"{error}.", "Correct the dotted path.") from error
    if not callable(make):
        raise UnusableDoorbell(
            f'OUTBOX["DOORBELL"] names {kind!r}, which is {make!r}.', "Expected a class."
        )
    return make  # type: ignore[no-any-return]


def _check_options(kind: str, make: Callable[..., Any], options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(make)
    except ValueError:
        return  # a callable in C: it rejects unknown options itself
    try:
        signature.bind("alias", **options)
    except TypeError as error:
        known = [*signature.parameters][1:]
        wrong = next((name for name in options if name not in known), "")
        raise UnusableDoorbell(
            f'OUTBOX["DOORBELL"] {kind!r} does not fit: {error}. Its options are: '
            f"{', '.join(known) or 'none'}.",
            did_you_mean(wrong, known, "Correct the options, or leave them out."),
        ) from error


def _require_postgres(*aliases: str) -> None:
    for alias in aliases:
        if alias not in connections:
            raise UnusableDoorbell(
                f'OUTBOX["DOORBELL"] names the database {alias!r}, which DATABASES has not.',
                did_you_mean(alias, connections, "Name an alias of DATABASES."),
            )
        if not can_notify(connections[alias]):
            raise UnusableDoorbell(
                f'OUTBOX["DOORBELL"] is "postgres", but {alias!r} is not a PostgreSQL database.',
                'Set "auto", which is "local" there, or "redis" across hosts.',
            )


def _reset(*, setting: str, **kwargs: object) -> None:
    if setting in ("OUTBOX", "DATABASES"):
        _notifier.cache_clear()


setting_changed.connect(_reset, dispatch_uid="django_outbox.doorbell")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_notifier.cache_clear)
