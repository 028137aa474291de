"""Who is told of a write: the slot of this process's hot queue, and what settings name by path."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from . import events, retry
from .conf import current, resolve
from .events import Event


class HotQueue(Protocol):
    """What the writer asks of a worker in its own process."""

    def offer(self, event: Event) -> bool:
        """Take the event or answer False; never block, never raise."""

    def look(self) -> None:
        """Have the claimer look at the table: something there is due, or will be."""


class Slot:
    """Where the writer finds the worker of this process, by database alias; empty after a fork."""

    def __init__(self) -> None:
        self.queues: dict[str, HotQueue] = {}
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.queues.clear)


slot = Slot()


class JSON:
    """The default serializer: exact JSON text."""

    dumps = staticmethod(events.encode)
    loads = staticmethod(events.decode)


@lru_cache(maxsize=1)
def serializer() -> Any:
    """Return the object with ``dumps`` and ``loads`` that ``SERIALIZER`` names."""
    return resolve("SERIALIZER") if current().SERIALIZER else JSON


@lru_cache(maxsize=1)
def retry_policy() -> retry.RetryPolicy:
    """Return the policy of listeners that have none of their own."""
    value = current().RETRY
    if value is None:
        return retry.Exponential()
    if isinstance(value, dict):
        try:
            return retry.from_setting(value)
        except ValueError as error:
            raise ImproperlyConfigured(f'OUTBOX["RETRY"]: {error}') from error
    value = resolve("RETRY")
    policy = value() if isinstance(value, type) else value
    if not isinstance(policy, retry.RetryPolicy):
        raise ImproperlyConfigured(
            f'OUTBOX["RETRY"] is {policy!r}; expected max_attempts, should_retry and delay.'
        )
    return policy


def _reset(*, setting: str, **kwargs: Any) -> None:
    if setting == "OUTBOX":
        serializer.cache_clear()
        retry_policy.cache_clear()


setting_changed.connect(_reset, dispatch_uid="django_outbox.hooks")
