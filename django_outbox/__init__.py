"""Transactional outbox for Django: write events with your data, deliver them after the commit."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

# Imported at first use (PEP 562), because ``import django_outbox`` must work before apps load.
# Type checkers read ``__init__.pyi``.
_MODULES = {
    "worker.drain": "drain",
    "worker.worker": "Worker",
    "events": "GLOBAL Event current_event",
    "events.typed": "event",
    "exceptions": "BrokerUnavailable DuplicateEvent InvalidEvent ListenerAlreadyRegistered "
    "ListenerTimeout NoActiveTransaction OutboxError PayloadError PayloadTooLarge RetryAfter "
    "UnroutableEvent Unrecoverable",
    "inspection.fate": "Fate fate",
    "listeners.outcomes": "Dead Defer Done Failure",
    "listeners.registry": "ANY listener",
    "listeners.retry": "Exponential Fixed Jittered Linear RetryPolicy",
    "writing.cancel": "cancel reschedule",
    "writing.write": "awrite awrite_many write write_many",
    "writing.signal_bridge": "OutboxSignal",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["inbox", *_MODULE_OF]  # noqa: PLE0604 - all of them are str


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"{__name__}.{_MODULE_OF.get(name, name)}")
    value = getattr(module, name) if name in _MODULE_OF else module  # inbox is a module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
