"""Transactional outbox for Django: write events with your data, deliver them after the commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import inbox
    from .events import GLOBAL, Event
    from .events.typed import event
    from .exceptions import (
        BrokerUnavailable,
        DuplicateEvent,
        InvalidEvent,
        ListenerAlreadyRegistered,
        ListenerTimeout,
        NoActiveTransaction,
        OutboxError,
        PayloadError,
        PayloadTooLarge,
        RetryAfter,
        Unrecoverable,
        UnroutableEvent,
    )
    from .listeners.outcomes import Dead, Defer, Done, Failure
    from .listeners.registry import ANY, listener
    from .listeners.retry import Exponential, Fixed, Jittered, Linear, RetryPolicy
    from .worker.drain import drain
    from .worker.worker import Worker
    from .writing.signal_bridge import OutboxSignal
    from .writing.write import awrite, awrite_many, write, write_many

# Imported at first use (PEP 562), because ``import django_outbox`` must work before apps load.
_MODULES: dict[str, str | None] = {
    "inbox": None,  # a module, not a name in one
    "drain": "worker.drain",
    "Worker": "worker.worker",
    "GLOBAL": "events",
    "Event": "events",
    "event": "events.typed",
    "BrokerUnavailable": "exceptions",
    "DuplicateEvent": "exceptions",
    "InvalidEvent": "exceptions",
    "ListenerAlreadyRegistered": "exceptions",
    "ListenerTimeout": "exceptions",
    "NoActiveTransaction": "exceptions",
    "OutboxError": "exceptions",
    "PayloadError": "exceptions",
    "PayloadTooLarge": "exceptions",
    "RetryAfter": "exceptions",
    "UnroutableEvent": "exceptions",
    "Unrecoverable": "exceptions",
    "Dead": "listeners.outcomes",
    "Defer": "listeners.outcomes",
    "Done": "listeners.outcomes",
    "Failure": "listeners.outcomes",
    "ANY": "listeners.registry",
    "listener": "listeners.registry",
    "Exponential": "listeners.retry",
    "Fixed": "listeners.retry",
    "Jittered": "listeners.retry",
    "Linear": "listeners.retry",
    "RetryPolicy": "listeners.retry",
    "awrite": "writing.write",
    "awrite_many": "writing.write",
    "write": "writing.write",
    "write_many": "writing.write",
    "OutboxSignal": "writing.signal_bridge",
}

__all__ = [
    "ANY",
    "GLOBAL",
    "BrokerUnavailable",
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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    path = _MODULES[name]
    module = import_module(f"{__name__}.{path or name}")
    value = module if path is None else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
