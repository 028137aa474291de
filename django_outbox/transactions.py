"""Check that the outbox can write on a connection: in a transaction, and without changing text."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextvars import ContextVar
from types import FrameType

from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.dispatch import Signal

from .exceptions import InvalidEvent, NoActiveTransaction
from .sql import dialect_of

# Set only by django_outbox.testing: a block that a TestCase opened counts as business code's.
test_blocks_count: ContextVar[bool] = ContextVar("test_blocks_count", default=False)


def is_open(connection: BaseDatabaseWrapper) -> bool:
    """Return whether business code has a transaction open on this connection.

    Blocks that a TestCase opened do not count, so that a forgotten ``atomic()`` fails in tests too.
    """
    return connection.in_atomic_block and (
        test_blocks_count.get()
        or any(not getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)
    )


def require(connection: BaseDatabaseWrapper, happened: str) -> None:
    """Raise ``NoActiveTransaction`` unless one is open; its message begins with ``happened``."""
    if is_open(connection):
        return
    others = [each.alias for each in connections.all(initialized_only=True) if is_open(each)]
    hint = (
        f" A transaction is active on {others}; did you mean using= one of them?" if others else ""
    )
    if not hint and _in_signal_receiver():
        hint = (
            " A signal receiver did so, and many apps send their signals after their transaction: "
            "atomic() around this alone only hides the gap. Open it around the code that sends the "
            "signal, by overriding that method, or set ATOMIC_REQUESTS."
        )
    raise NoActiveTransaction(
        f"{happened} outside a transaction on {connection.alias!r}. Expected transaction.atomic() "
        f"around it and the business change, so that both commit or neither does.{hint}"
    )


def _in_signal_receiver() -> bool:
    """Return whether a ``django.dispatch.Signal`` is being sent further up the stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != Signal.__module__:
        frame = frame.f_back
    return frame is not None


def raise_if_missing_table(connection: BaseDatabaseWrapper, error: DatabaseError) -> None:
    """Raise the error of an INSERT again, with what to do, if a table of the outbox is missing.

    It sends no query, which PostgreSQL would refuse after the error.
    """
    if not dialect_of(connection).is_missing_table(error):
        return
    *code, reason = error.args
    message = (
        f"A table of the outbox is missing on {connection.alias!r}: {str(reason).splitlines()[0]}. "
        f"Run: manage.py migrate django_outbox --database {connection.alias}. Inside a migration, "
        'add ("django_outbox", "0001_initial") to its dependencies; if it is of another app, give '
        "one of yours that dependency, and run_before."
    )
    raise type(error)(*code, message) from error.__cause__


def require_charset(connection: BaseDatabaseWrapper, texts: Iterable[str]) -> None:
    """Raise ``InvalidEvent`` if the connection's charset lacks a character of these texts."""
    if (found := dialect_of(connection).unstorable(texts)) is not None:
        raise InvalidEvent(
            f"The character {found!r} (U+{ord(found):04X}) is not in the charset of the connection "
            f"{connection.alias!r}, so it would be stored as a question mark. Expected charset "
            "utf8mb4 in the OPTIONS of the database."
        )
