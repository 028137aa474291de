"""The error tree: every error the package raises, and those a listener raises to be understood.

OutboxError
├── NoActiveTransaction         also django's TransactionManagementError
├── InvalidEvent                also ValueError
│   └── PayloadTooLarge
├── DuplicateEvent
├── ListenerAlreadyRegistered
├── UnroutableEvent
├── PayloadError
└── ListenerTimeout
Recoverable
└── RetryAfter                  a listener says: again, after this delay (costs an attempt)
Unrecoverable                   a listener says: never again (costs no attempt)

Configuration faults are django's ImproperlyConfigured.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.transaction import TransactionManagementError


class OutboxError(Exception):
    """Base of every error that the outbox itself raises."""


class NoActiveTransaction(OutboxError, TransactionManagementError):
    """An event was written outside ``transaction.atomic()`` on its database alias."""


class InvalidEvent(OutboxError, ValueError):
    """An event cannot be stored as it is; nothing was sent to the database."""


class PayloadTooLarge(InvalidEvent):
    """Payload or headers have more UTF-8 bytes than ``OUTBOX["MAX_PAYLOAD_BYTES"]`` allows."""


class DuplicateEvent(OutboxError):
    """An event with this ``event_id`` or ``unique_key`` is already in the table."""


class ListenerAlreadyRegistered(OutboxError):
    """Two listeners claim the same (aggregate type, event type, name)."""


class UnroutableEvent(OutboxError):
    """No registered listener matches the event."""


class PayloadError(OutboxError):
    """A stored payload or its headers cannot be decoded, or do not fit the listener's type."""


class ListenerTimeout(OutboxError):
    """An ``async def`` listener ran longer than its ``timeout`` and was cancelled."""


class Recoverable(Exception):
    """A failure that is expected to pass; the retry policy decides when to try again."""


class RetryAfter(Recoverable):
    """Raised by a listener: try again after ``delay`` (seconds or timedelta); costs an attempt."""

    def __init__(self, delay: float | timedelta, message: str = "") -> None:
        self.delay = seconds(delay, of="RetryAfter")
        super().__init__(message or f"retry after {self.delay:g} s")


class Unrecoverable(Exception):
    """Raised by a listener: this can never succeed. Dead at once, no attempt counted."""


def seconds(delay: float | timedelta, *, of: str) -> float:
    """Return a delay as seconds; ``ValueError`` unless it is a finite duration of zero or more."""
    value: Any = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e10:
        raise ValueError(
            f"{of} got the delay {delay!r}; expected seconds or a timedelta, zero or more."
        )
    return float(value)
