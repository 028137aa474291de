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

import difflib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.db.transaction import TransactionManagementError


class OutboxError(Exception):
    """Base class of every error that the outbox itself raises.

    Example::

        try:
            with transaction.atomic():
                outbox.write("order.placed", {"total": float("nan")})
        except outbox.OutboxError as error:
            reason = str(error)  # what happened, what was expected, what to do
    """


class NoActiveTransaction(OutboxError, TransactionManagementError):
    """An event was written outside ``transaction.atomic()`` on its database alias.

    It is also a ``django.db.transaction.TransactionManagementError``. To correct it, open
    ``atomic()`` around the data and the event; with several databases, on the alias ``using``.

    Example::

        try:
            outbox.write("order.placed", {"order": 7})
        except outbox.NoActiveTransaction:
            with transaction.atomic():
                outbox.write("order.placed", {"order": 7})
    """


class InvalidEvent(OutboxError, ValueError):
    """An event cannot be stored as given; nothing was sent to the database.

    It is also a ``ValueError``. The message names the value to correct.

    Example::

        try:
            outbox.Event(event_type="order.placed ", payload={"order": 7})
        except outbox.InvalidEvent as error:
            reason = str(error)  # the type ends with a space
    """


class PayloadTooLarge(InvalidEvent):
    """Payload or headers have more UTF-8 bytes than ``OUTBOX["MAX_PAYLOAD_BYTES"]`` allows.

    To correct it, store the large part elsewhere and send its address.

    Example::

        report = "x" * 2_000_000
        with transaction.atomic():
            try:
                outbox.write("report.ready", {"report": report})
            except outbox.PayloadTooLarge:
                outbox.write("report.ready", {"url": "https://shop.example/reports/7"})
    """


class DuplicateEvent(OutboxError):
    """An event with this ``event_id`` or ``unique_key`` is already in the table.

    Usually you need not do anything, because the event was written before.

    Example::

        with transaction.atomic():
            outbox.write("invoice.due", {"invoice": 7}, unique_key="invoice 7")
            try:
                outbox.write("invoice.due", {"invoice": 7}, unique_key="invoice 7")
            except outbox.DuplicateEvent:
                pass  # the transaction stays usable
    """


class ListenerAlreadyRegistered(OutboxError):
    """Two listeners have the same title, made of their types and name, or one has two fallbacks.

    To correct it, give the second listener a ``name``.

    Example::

        @outbox.listener("order.cancelled")
        def refund(event): ...


        try:
            outbox.listener("order.cancelled")(print)
        except outbox.ListenerAlreadyRegistered:
            outbox.listener("order.cancelled", name="print")(print)
    """


class UnroutableEvent(OutboxError):
    """No registered listener matches the event, or the listener that it is for is not registered.

    It is not raised to your code, but stored in ``last_error``. ``OUTBOX["UNROUTABLE"]`` decides
    what happens to the event. To correct it, register a listener, or give a renamed one its former
    title (``formerly=``), then replay the event.

    Example::

        unroutable = OutboxEvent.objects.filter(last_error__contains="No listener")
        print(unroutable.count())
    """


class PayloadError(OutboxError):
    """A stored payload or its headers cannot be decoded, or do not match the listener's type.

    If a delivery meets it, the event is dead at once. The message names the field: correct the
    class, then replay the event, or discard the event.

    Example::

        event = outbox.Event(event_type="order.placed", payload={"order": "seven"})
        try:
            event.payload_as(dict[str, int])
        except outbox.PayloadError as error:
            reason = str(error)
    """


class ListenerTimeout(OutboxError):
    """A listener ran longer than its ``timeout``: it was cancelled, or its thread abandoned.

    An ``async def`` listener is cancelled, the thread of any other is abandoned. The retry policy
    decides what happens to the event.

    Example::

        @outbox.listener("report.wanted", timeout=30)
        async def make_report(event): ...


        @make_report.fallback
        def give_up(event, failure):
            return isinstance(failure.exception, outbox.ListenerTimeout)
    """


class RetryAfter(Exception):
    """Raised by a listener: retry after ``delay`` (seconds or timedelta); costs an attempt.

    When no attempts are left, the event is dead.

    Raises ``ValueError`` unless the delay is a finite duration of zero or more.

    Example::

        @outbox.listener("invoice.due")
        def collect(event):
            raise outbox.RetryAfter(timedelta(minutes=5), "the bank is closed")
    """

    def __init__(self, delay: float | timedelta, message: str = "") -> None:
        self.delay = seconds(delay, of="RetryAfter")
        super().__init__(message or f"retry after {self.delay:g} s")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.delay, str(self)), self.__dict__


class Unrecoverable(Exception):
    """Raised by a listener: no retry can succeed. The event is dead at once; costs no attempt.

    Example::

        @outbox.listener("address.changed")
        def forward(event):
            raise outbox.Unrecoverable("the customer is gone")
    """


class BrokerUnavailable(Exception):
    """Raised by a relay's backend: the broker cannot be reached. Costs no attempt.

    It opens the circuit breaker of the relay's queue at once, so the events wait in the table. The
    message must contain no secret: it is logged, and shown with the breaker. A listener may raise
    it, too.

    Example::

        @outbox.listener("parcel.requested")
        def book(event):
            raise outbox.BrokerUnavailable("the carrier does not answer")
    """


def seconds(delay: float | timedelta, *, of: str) -> float:
    """Return a delay in seconds; raise ``ValueError`` unless it is finite and not negative."""
    value: Any = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e10:
        raise ValueError(
            f"{of} got the delay {delay!r}; expected seconds or a timedelta, zero or more."
        )
    return float(value)


def did_you_mean(name: Any, known: Iterable[str], otherwise: str = "") -> str:
    """Return the hint that names the nearest of the known names; without one, the other hint."""
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f'Did you mean "{near[0]}"?' if near else otherwise
