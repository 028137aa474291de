"""One message seen once: what an idempotent consumer remembers, in its own transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections, router, transaction

from . import dialects, transactions
from .events import RECEIVED_LENGTHS, exact_text, identity
from .models import OutboxInbox

__all__ = ["once"]


@contextmanager
def once(source: str, message_id: Any, *, using: str | None = None) -> Iterator[bool]:
    """Remember a received message; True the first time, False for every repeat.

    ``source`` (up to 128 characters) names who sends or who consumes, ``message_id`` (up to 255; an
    int or UUID stands for its text) the message. ``using`` is the database alias; default: the
    router's for ``OutboxInbox``. What is remembered commits or vanishes together with what the
    block writes: an error that leaves the block undoes both, and nothing else of the transaction.
    Of two consumers of one message the second waits for the first one's end.

    Raises ``NoActiveTransaction`` outside ``atomic()`` on that alias and ``InvalidEvent`` (a
    ``ValueError``) for a name that cannot be stored, both before any SQL. Design section 4.
    """
    source = _checked("source", source)
    message_id = _checked("message_id", identity(message_id))
    alias = router.db_for_write(OutboxInbox) if using is None else using
    connection = connections[alias]
    transactions.require(connection, "A message was received")
    with transaction.atomic(using=alias):
        yield dialects.of(connection).receive(connection, source=source, message_id=message_id)


def _checked(name: str, given: Any) -> str:
    return exact_text(name, given, most=RECEIVED_LENGTHS[name])
