"""Inbox for idempotent consumers: process each received message once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import DatabaseError, connections, router, transaction

from . import transactions
from .events import RECEIVED_LENGTHS, exact_text, identity
from .models import OutboxInbox
from .sql import dialect_of

__all__ = ["once"]


@contextmanager
def once(source: str, message_id: Any, *, using: str | None = None) -> Iterator[bool]:
    """Store that a message was received; yield True the first time, False for every repeat.

    ``source`` (up to 128 characters) names the sender or the consumer; ``message_id`` (up to 255
    characters, or an int or UUID) names the message. ``using`` is the database alias; default: the
    router's for ``OutboxInbox``. The entry commits or rolls back with what the block writes: an
    error that leaves the block undoes both, and nothing else in the transaction. If two consumers
    receive the same message, the second waits until the first one has ended.

    Raises ``NoActiveTransaction`` outside ``atomic()`` on that alias, and ``InvalidEvent`` (a
    ``ValueError``) for a name that cannot be stored; both before any SQL.

    Example::

        def receive(message):
            with transaction.atomic(), outbox.inbox.once("payments", message["id"]) as is_new:
                if is_new:
                    outbox.write("order.paid", message)
            return is_new


        assert [receive({"id": 1}), receive({"id": 1})] == [True, False]
    """
    source = _checked("source", source)
    message_id = _checked("message_id", identity(message_id))
    alias = router.db_for_write(OutboxInbox) if using is None else using
    connection = connections[alias]
    transactions.require(connection, "A message was received")
    transactions.require_charset(connection, (source, message_id))
    with transaction.atomic(using=alias):
        try:
            is_new = dialect_of(connection).receive(source=source, message_id=message_id)
        except DatabaseError as error:
            transactions.raise_if_missing_table(connection, error)
            raise
        yield is_new


def _checked(name: str, given: Any) -> str:
    return exact_text(name, given, most=RECEIVED_LENGTHS[name])
