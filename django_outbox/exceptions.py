"""Exceptions: those that the package raises, and three that a listener raises to choose an outcome.

OutboxError
├── NoActiveTransaction         also django's TransactionManagementError
├── InvalidEvent                also ValueError
│   └── PayloadTooLarge
├── DuplicateEvent
├── ListenerAlreadyRegistered
├── UnroutableEvent
├── PayloadError
└── ListenerTimeout
RetryAfter                      raised by a listener: retry after this delay (costs an attempt)
Unrecoverable                   raised by a listener: no retry can succeed (costs no attempt)
BrokerUnavailable               raised by a relay: its broker is away (costs no attempt)

Configuration errors raise django's ImproperlyConfigured.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.transaction import TransactionManagementError


class OutboxError(Exception):
    """Base class of every error that the outbox itself raises."""


class NoActiveTransaction(OutboxError, TransactionManagementError):
    """An event was written outside ``transaction.atomic()`` on its database alias."""


class InvalidEvent(OutboxError, ValueError):
    """An event cannot be stored as given; nothing was sent to the database."""


class PayloadTooLarge(InvalidEvent):
    """Payload or headers have more UTF-8 bytes than ``OUTBOX["MAX_PAYLOAD_BYTES"]`` allows."""


class DuplicateEvent(OutboxError):
    """An event with this ``event_id`` or ``unique_key`` is already in the table."""


class ListenerAlreadyRegistered(OutboxError):
    """Two listeners have the same title, made of their types and name, or one has two fallbacks."""


class UnroutableEvent(OutboxError):
    """No registered listener matches the event."""


class PayloadError(OutboxError):
    """A stored payload or its headers cannot be decoded, or do not match the listener's type."""


class ListenerTimeout(OutboxError):
    """A listener ran longer than its ``timeout``: it was cancelled, or its thread abandoned."""


class RetryAfter(Exception):
    """Raised by a listener: retry after ``delay`` (seconds or timedelta); costs an attempt."""

    def __init__(self, delay: float | timedelta, message: str = "") -> None:
        self.delay = seconds(delay, of="RetryAfter")
        super().__init__(message or f"retry after {self.delay:g} s")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.delay, str(self)), self.__dict__


class Unrecoverable(Exception):
    """Raised by a listener: no retry can succeed. The event is dead at once; costs no attempt."""


class BrokerUnavailable(Exception):
    """Raised by a relay's backend: the broker cannot be reached. Costs no attempt.

    It opens the circuit breaker of the relay's queue at once, so the events wait in the table. The
    message must contain no secret: it is logged, and shown with the breaker.
    """


def seconds(delay: float | timedelta, *, of: str) -> float:
    """Return a delay in seconds; raise ``ValueError`` unless it is finite and not negative."""
    value: Any = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e10:
        raise ValueError(
            f"{of} got the delay {delay!r}; expected seconds or a timedelta, zero or more."
        )
    return float(value)
