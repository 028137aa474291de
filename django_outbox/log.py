"""The package's logger, which never raises, and the texts of errors.

A handler, filter or record factory that fails must not end a thread.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

SHORT = 1000  # characters of a text that the database has refused

logger = logging.getLogger("django_outbox")


class _Guard(logging.Logger):
    """Reports what logging raises on standard error, as handlers of the standard library do."""

    def makeRecord(self, *args: Any, **kwargs: Any) -> logging.LogRecord:  # noqa: N802 - its name
        try:
            return super().makeRecord(*args, **kwargs)
        except Exception:  # noqa: BLE001 - a record factory of the project
            return logging.LogRecord(*args[:7])

    def handle(self, record: logging.LogRecord) -> None:
        try:
            super().handle(record)
        except Exception:  # noqa: BLE001 - a handler or filter of the project
            with suppress(Exception):
                logging.Handler().handleError(record)


# Its class may be the project's own (logging.setLoggerClass).
logger.__class__ = type("GuardedLogger", (_Guard, type(logger)), {})


def report_quietly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error of a callback as asyncio does; a failing log handler must not end the loop.

    It is an event loop's exception handler.
    """
    with suppress(Exception):
        loop.default_exception_handler(context)


def text_of(error: BaseException) -> str:
    """Return the message of an error, also of one that cannot be printed."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - it must still be reported
        return "(its message could not be read)"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its class if that is empty."""
    return text_of(error).partition("\n")[0].strip() or type(error).__name__


def in_ascii(text: str) -> str:
    """Return a text as any database can store it: in ASCII, without NUL characters, and short."""
    return text.replace("\0", "").encode("ascii", "replace").decode()[:SHORT]
