"""What log lines say of the event they belong to: its id, its listener, and what its writer knew.

``OUTBOX["CONTEXT_PROVIDERS"]`` takes ``remember``, ``OUTBOX["INTERCEPTORS"]`` takes ``restore``.
Lines of the standard library get it by ``ContextFilter``, those of structlog, where it is
installed, by its own ``merge_contextvars``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..events import Event

PREFIX = "log."  # of headers that hold a part of the writer's context
OWN = ("event_id", "event_type", "listener", "attempt")  # said of an event, and not passed on

structlog: Any = import_module("structlog.contextvars") if find_spec("structlog") else None

_context: ContextVar[dict[str, str] | None] = ContextVar("django_outbox.logs", default=None)


@contextmanager
def context(**values: object) -> Iterator[None]:
    """Have every log line of a block carry these values, and every event written in it."""
    texts = {name: str(value) for name, value in values.items()}
    with ExitStack() as stack:
        token = _context.set({**(_context.get() or {}), **texts})
        stack.callback(_context.reset, token)
        if structlog is not None:
            stack.enter_context(structlog.bound_contextvars(**texts))
        yield


def remember() -> dict[str, str]:
    """Return the current context as headers."""
    bound = structlog.get_contextvars() if structlog is not None else {}
    values = {**bound, **(_context.get() or {})}
    return {f"{PREFIX}{name}": str(value) for name, value in values.items() if name not in OWN}


@contextmanager
def restore(event: Event) -> Iterator[None]:
    """During a call give log lines the writer's context, and which event and listener it is."""
    values = {
        name.removeprefix(PREFIX): value
        for name, value in event.headers.items()
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in OWN
    }
    own = (event.event_id, event.event_type, event.listener, event.attempts + 1)
    with context(**values, **dict(zip(OWN, own, strict=True))):
        yield


class ContextFilter(logging.Filter):
    """Gives every record ``outbox``, its context as ``key=value …`` text; empty outside of any.

    The values themselves are in ``outbox_context``, a dict, for formatters that write JSON.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        values = _context.get() or {}
        record.outbox_context = values
        record.outbox = " ".join(f"{name}={value}" for name, value in values.items())
        return True
