"""Who is told of a write: the slot of this process's hot queue, and what settings name by path."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from . import events, retry
from .conf import current, resolve, resolve_all
from .events import Event


class HotQueue(Protocol):
    """What the writer asks of a worker in its own process."""

    def offer(self, event: Event) -> bool:
        """Take the event or answer False; never block, never raise."""

    def look(self) -> None:
        """Have the claimer look at the table: something there is due, or will be."""


class Slot:
    """Where the writer finds the worker of this process, by database alias; empty after a fork."""

    start: Callable[[str], None] | None = None  # set by EMBEDDED: starts a worker for an alias

    def __init__(self) -> None:
        self.queues: dict[str, HotQueue] = {}
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def queue(self, alias: str) -> HotQueue | None:
        """Return the hot queue of this process; with EMBEDDED the first call starts its worker."""
        if self.start is not None and alias not in self._asked:
            with self._lock:
                first = alias not in self._asked
                self._asked.add(alias)
            if first and alias not in self.queues:
                self.start(alias)
        return self.queues.get(alias)

    def _forget(self) -> None:
        self.queues.clear()
        self._asked: set[str] = set()
        self._lock = threading.Lock()


slot = Slot()


class JSON:
    """The default serializer: exact JSON text."""

    dumps = staticmethod(events.encode)
    loads = staticmethod(events.decode)


@lru_cache(maxsize=1)
def serializer() -> Any:
    """Return the object with ``dumps`` and ``loads`` that ``SERIALIZER`` names."""
    value = resolve("SERIALIZER")
    if value is None:
        return JSON
    if not callable(getattr(value, "dumps", None)) or not callable(getattr(value, "loads", None)):
        raise ImproperlyConfigured(
            f'OUTBOX["SERIALIZER"] is {value!r}; expected an object with dumps and loads.'
        )
    return value


@lru_cache(maxsize=1)
def retry_policy() -> retry.RetryPolicy:
    """Return the policy of listeners that have none of their own."""
    value = resolve("RETRY")
    if value is None:
        return retry.Exponential()
    try:
        if isinstance(value, Mapping):
            return retry.from_setting(value)
        return retry.checked(value() if isinstance(value, type) else value)
    except (TypeError, ValueError) as error:
        raise ImproperlyConfigured(f'OUTBOX["RETRY"]: {error}') from error


@lru_cache(maxsize=1)
def interceptors() -> tuple[Callable[[Event], Any], ...]:
    """Return the callables that make a context manager around each call of a listener."""
    found = resolve_all("INTERCEPTORS")
    for path, interceptor in zip(current().INTERCEPTORS, found, strict=True):
        if not callable(interceptor):
            raise ImproperlyConfigured(
                f'OUTBOX["INTERCEPTORS"] names {path!r}, which is {interceptor!r}; expected a '
                "callable that takes an event and returns a context manager."
            )
    return found


def _reset(*, setting: str, **kwargs: Any) -> None:
    if setting == "OUTBOX":
        serializer.cache_clear()
        retry_policy.cache_clear()
        interceptors.cache_clear()


setting_changed.connect(_reset, dispatch_uid="django_outbox.hooks")
