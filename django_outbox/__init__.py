"""Transactional outbox for Django: an event written with its transaction reaches its listeners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import inbox
    from .engine.drain import drain
    from .engine.worker import Worker
    from .events import GLOBAL, Event
    from .events.typed import event
    from .exceptions import (
        DuplicateEvent,
        InvalidEvent,
        ListenerAlreadyRegistered,
        ListenerTimeout,
        NoActiveTransaction,
        OutboxError,
        PayloadError,
        PayloadTooLarge,
        Recoverable,
        RetryAfter,
        Unrecoverable,
        UnroutableEvent,
    )
    from .outcomes import Dead, Defer, Done, Failure
    from .registry import ANY, listener
    from .retry import Exponential, Fixed, Jittered, Linear, RetryPolicy
    from .writer import awrite, awrite_many, write, write_many
    from .writer.bridge import OutboxSignal

# Resolved at first use (PEP 562): ``import django_outbox`` must work before apps are loaded.
_ROOMS: dict[str, str | None] = {
    "inbox": None,  # the room itself
    "drain": "engine.drain",
    "Worker": "engine.worker",
    "GLOBAL": "events",
    "Event": "events",
    "event": "events.typed",
    "DuplicateEvent": "exceptions",
    "InvalidEvent": "exceptions",
    "ListenerAlreadyRegistered": "exceptions",
    "ListenerTimeout": "exceptions",
    "NoActiveTransaction": "exceptions",
    "OutboxError": "exceptions",
    "PayloadError": "exceptions",
    "PayloadTooLarge": "exceptions",
    "Recoverable": "exceptions",
    "RetryAfter": "exceptions",
    "UnroutableEvent": "exceptions",
    "Unrecoverable": "exceptions",
    "Dead": "outcomes",
    "Defer": "outcomes",
    "Done": "outcomes",
    "Failure": "outcomes",
    "ANY": "registry",
    "listener": "registry",
    "Exponential": "retry",
    "Fixed": "retry",
    "Jittered": "retry",
    "Linear": "retry",
    "RetryPolicy": "retry",
    "awrite": "writer",
    "awrite_many": "writer",
    "write": "writer",
    "write_many": "writer",
    "OutboxSignal": "writer.bridge",
}

__all__ = [
    "ANY",
    "GLOBAL",
    "Dead",
    "Defer",
    "Done",
    "DuplicateEvent",
    "Event",
    "Exponential",
    "Failure",
    "Fixed",
    "InvalidEvent",
    "Jittered",
    "Linear",
    "ListenerAlreadyRegistered",
    "ListenerTimeout",
    "NoActiveTransaction",
    "OutboxError",
    "OutboxSignal",
    "PayloadError",
    "PayloadTooLarge",
    "Recoverable",
    "RetryAfter",
    "RetryPolicy",
    "UnroutableEvent",
    "Unrecoverable",
    "Worker",
    "awrite",
    "awrite_many",
    "drain",
    "event",
    "inbox",
    "listener",
    "write",
    "write_many",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    room = _ROOMS[name]
    module = import_module(f"{__name__}.{room or name}")
    value = module if room is None else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
