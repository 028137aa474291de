"""Context for log lines: the event's id, type, listener and attempt, and its writer's log context.

Add ``remember`` to ``OUTBOX["CONTEXT_PROVIDERS"]`` and ``restore`` to ``OUTBOX["INTERCEPTORS"]``.
Use ``ContextFilter`` or ``JSONFormatter`` with the standard library. structlog, if installed, uses
its own ``merge_contextvars``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec

from ..events import Event

PREFIX = "log."  # of headers that hold the writer's context
CALL_FIELDS = ("event_id", "event_type", "listener", "attempt")  # not passed on to events

# A conversion in a log call's format string, with the name before it: "… event_id=%s".
FIELD = re.compile(r"%%|(?:(?P<name>\w+)=)?%[-#0 +]*[\d.]*[a-zA-Z]")

_context: ContextVar[dict[str, str] | None] = ContextVar("django_outbox.logs", default=None)


@cache
def _structlog() -> Any:
    """Return structlog's context module, if installed; the import takes 0.5 s, so it is lazy."""
    return import_module("structlog.contextvars") if find_spec("structlog") else None


@contextmanager
def context(**values: object) -> Iterator[None]:
    """Add these values to every log line of the block, and to every event written in it.

    Example::

        with logs.context(request_id="r-7"), transaction.atomic():
            outbox.write("order.placed", {"order": 7})
    """
    texts = {name: str(value) for name, value in values.items()}
    with ExitStack() as stack:
        token = _context.set({**(_context.get() or {}), **texts})
        stack.callback(_context.reset, token)
        if (structlog := _structlog()) is not None:
            stack.enter_context(structlog.bound_contextvars(**texts))
        yield


def remember() -> dict[str, str]:
    """Return the current context as headers.

    Example::

        with logs.context(request_id="r-7"):
            assert logs.remember()["log.request_id"] == "r-7"
    """
    structlog = _structlog()
    bound = structlog.get_contextvars() if structlog is not None else {}
    values = {**bound, **(_context.get() or {})}
    return {
        f"{PREFIX}{name}": str(value) for name, value in values.items() if name not in CALL_FIELDS
    }


@contextmanager
def restore(event: Event) -> Iterator[None]:
    """Add the writer's context, the event and the listener to the log lines of a call.

    Example::

        event = outbox.Event(event_type="order.placed", headers={"log.request_id": "r-7"})
        with logs.restore(event):
            assert logs.remember()["log.request_id"] == "r-7"
    """
    values = {
        name.removeprefix(PREFIX): value
        for name, value in event.headers.items()
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in CALL_FIELDS
    }
    own = (event.event_id, event.event_type, event.listener, event.attempts + 1)
    with context(**values, **dict(zip(CALL_FIELDS, own, strict=True))):
        yield


class ContextFilter(logging.Filter):
    """Sets ``outbox`` on every ``LogRecord``: the context as ``key=value …`` text, maybe empty.

    ``outbox_context`` has the values as a dict, for formatters that write JSON.

    Example::

        record = logging.makeLogRecord({"msg": "stock is low"})
        with logs.context(request_id="r-7"):
            logs.ContextFilter().filter(record)
        assert record.outbox == "request_id=r-7"
    """

    def filter(self, record: logging.LogRecord) -> bool:
        values = _context.get() or {}
        record.outbox_context = values
        record.outbox = " ".join(f"{name}={value}" for name, value in values.items())
        return True


class JSONFormatter(logging.Formatter):
    """Formats each line as a JSON object; ``outbox_worker --format json`` uses it.

    Members are ``time`` (UTC), ``level``, ``logger``, ``event`` (the constant words of the line),
    each ``name=value`` of the line (numbers stay numbers), the context, and ``exception`` (the
    traceback, if any). If a line has no such fields, ``event`` is the whole line.

    Example::

        record = logging.makeLogRecord({"msg": "stock is low sku=%s", "args": ("teapot",)})
        line = json.loads(logs.JSONFormatter().format(record))
        assert (line["event"], line["sku"]) == ("stock is low", "teapot")
    """

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _split(record)
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "event": event,
        }
        for name, value in (*fields.items(), *(_context.get() or {}).items()):
            line.setdefault(name, value)
        if record.exc_info:
            line.setdefault("exception", self.formatException(record.exc_info))
        return msgspec.json.encode(line, enc_hook=str).decode()


def _split(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """Split a line into its words and fields, by the call's format string, not by its values."""
    text = str(record.msg)
    arguments = record.args if isinstance(record.args, tuple) else ()
    found = [match for match in FIELD.finditer(text) if match[0] != "%%"]
    if len(found) != len(arguments):
        return record.getMessage(), {}
    first = ""
    if found and found[0].start() == 0 and not found[0]["name"]:  # an outcome, or the line's origin
        first, text = str(arguments[0]), text[found[0].end() :]
        arguments, found = arguments[1:], [*FIELD.finditer(text)]
    names = [match["name"] for match in found]
    if not names or None in names:
        return record.getMessage(), {}
    event = f"{first}{text[: found[0].start()]}".strip()
    return event, dict(zip(names, arguments, strict=True))
