"""The contract between a relay and what talks to a broker: ``Backend`` and ``Message``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ..events import Event
from ..exceptions import BrokerUnavailable
from ..listeners.outcomes import Dead, Defer

# What became of a message: None if the broker has confirmed it; an exception if it has not. The
# exception counts as raised for this event alone: BrokerUnavailable and Unconfirmed, RetryAfter,
# Unrecoverable (dead at once), any other (the relay's retry policy decides).
Outcome = BaseException | Defer | Dead | None
NOT_SENT: Final = Defer(0)  # the turn of a message did not come before the deadline


class Unconfirmed(Exception):
    """The broker did not confirm a message before the deadline; the message may have been sent.

    If no later message of the batch was answered either, the relay treats the broker as
    unavailable. Otherwise it costs the event an attempt.

    Example::

        class Silent(Backend):
            def publish(self, messages, deadline):
                return [Unconfirmed("no answer before the deadline") for _ in messages]
    """


def is_refusal(outcome: Outcome) -> bool:
    """Return whether the broker refused a message, or it cannot be sent."""
    if isinstance(outcome, (BrokerUnavailable, Unconfirmed, Defer)):
        return False
    return isinstance(outcome, (BaseException, Dead))


class Refused(Exception):
    """The broker refused a message; the retry policy decides."""


class Together(Exception):
    """The broker refused messages at once, and did not say for which of them.

    The relay sends them again in halves. ``alone`` is the outcome of one that was sent alone.
    """

    def __init__(self, alone: Outcome) -> None:
        self.alone = alone


def expect_known(options: Iterable[str], known: Collection[str]) -> None:
    """Raise ``TypeError`` for an option that a client does not have."""
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r}; expected one of {', '.join(sorted(known))}.")


def expect(name: str, value: Any, is_valid: bool, expected: str) -> None:
    """Raise ``ValueError`` for an option whose value is not valid."""
    if not is_valid:
        raise ValueError(f"{name} is {value!r}; expected {expected}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The message that is sent for one event.

    - ``to``: topic, routing key, subject, stream, queue or URL: ``TO`` with the fields filled in.
    - ``body``: bytes: the stored JSON, or the structured CloudEvent.
    - ``content_type``: that of the body.
    - ``headers``: the event's own and those of ``FORMAT``.
    - ``event_id``: the same each time; use it as the protocol's message or deduplication id.
    - ``event_type``, ``key``, ``event``: the event, its type, and its ordering key or None.
    - ``group``: chooses a partition: the key, else the aggregate's id, else None.

    Example::

        def as_line(message: Message) -> bytes:
            return message.event_id.encode() + b" " + message.body
    """

    to: str  # topic, routing key, subject, stream, queue or URL, from TO
    body: bytes  # the stored JSON, or the structured CloudEvent
    content_type: str  # of the body
    headers: Mapping[str, str]  # the event's own and those of FORMAT
    event_id: str  # the protocol's message or deduplication id
    event_type: str
    key: str | None  # the event's ordering key
    group: str | None  # what chooses a partition: the key, else the aggregate's id
    event: Event


class Backend:
    """Sends messages to a broker. Subclass it for a broker of your own.

    A process creates an object when it has its first event, opens it once, and closes it once: when
    the process ends, or after ``BrokerUnavailable``; then it creates a new one.
    ``publish`` may be called by several threads at a time. Each method may be ``async def``; those
    of a relay then run on one event loop, in a thread of its own.

    - ``to``: ``TO`` as the settings have it; set before ``open``.
    - ``timeout``: seconds that a call of ``publish`` may take.
    - ``per_key``: consecutive events of one key that may be in a call; 1.
    - ``attribute_prefix``: prefix of CloudEvents attributes among the headers; ``"ce-"``.
    - ``commands``: a pattern of names; headers of an event that it matches whole are not sent.

    Example::

        class Log(Backend):
            def __init__(self, *, path, timeout=10.0):
                super().__init__(timeout=timeout)
                self.path = path

            def open(self):
                try:
                    self.file = open(self.path, "ab")
                except OSError as error:
                    raise BrokerUnavailable(f"{self.path} cannot be written") from error

            def publish(self, messages, deadline):
                self.file.writelines(message.body + b"\\n" for message in messages)
                self.file.flush()
                return [None for _ in messages]

            def close(self):
                self.file.close()
    """

    # Consecutive events of one key that may be in a call. More than 1 only if the broker refuses
    # what follows a refused message of the same key, or ``publish`` stops a key at its first.
    per_key: ClassVar[int] = 1
    attribute_prefix: ClassVar[str] = "ce-"  # of CloudEvents attributes among the headers
    # Names of headers that are commands to the broker, or to a client that receives the message.
    # An event's own headers of these names are not sent: who writes an event commands no broker.
    commands: ClassVar[re.Pattern[str] | None] = None
    to: str = ""  # TO as the relay's settings have it; set after __init__ and before open
    timeout: float = 10.0  # seconds that a call of ``publish`` may take

    def __init__(self, *, timeout: Any = 10.0) -> None:
        """Take ``OPTIONS`` as keyword arguments; connect to nothing.

        Raises ``TypeError`` or ``ValueError`` for options that it does not take; the system checks
        show the message.
        """
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        expect("timeout", timeout, is_number and timeout > 0, "seconds above zero")
        self.timeout = timeout

    def open(self) -> Any:
        """Connect. Raises ``BrokerUnavailable`` if the broker cannot be reached."""

    def prepare(self, message: Message) -> Any:
        """Return what ``publish`` gets of a message; raise if it can never be sent."""
        return message

    def publish(self, messages: Sequence[Any], deadline: float) -> Any:
        """Send messages and wait for the broker's confirmations; return one outcome for each.

        ``deadline`` (``time.monotonic()``): when to stop waiting; what is not confirmed by then is
        ``Unconfirmed``. The client must not send a message again after ``publish`` has returned.
        Raises ``BrokerUnavailable`` if the broker could not be reached, so nothing is confirmed.
        """
        raise NotImplementedError

    def check(self) -> Any:
        """Check that the broker, opened before, takes messages; called every 3 s during an outage.

        Raises ``BrokerUnavailable`` if it does not answer, and any other error for what is wrong
        with it: a stream that is missing, a permission.
        """

    def close(self) -> Any:
        """Close the connection without waiting for a broker that is unavailable."""

    @staticmethod
    def quote(value: str) -> str:
        """Return the value of an event's field as it goes into ``TO``."""
        return value
