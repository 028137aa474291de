"""The contract between a relay and what talks to a broker: ``Backend`` and ``Message``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..events import Event
from ..listeners.outcomes import Dead, Defer

# What became of a message: None if the broker has confirmed it; an exception if it has not. The
# exception counts as raised for this event alone: BrokerUnavailable and Unconfirmed, RetryAfter,
# Unrecoverable (dead at once), any other (the relay's retry policy decides).
Outcome = BaseException | Defer | Dead | None


class Unconfirmed(Exception):
    """The broker did not confirm a message before the deadline; whether it has it is not known.

    If no later message of the batch was answered either, the relay takes the broker for
    unavailable. Otherwise it costs the event an attempt.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is sent of one event."""

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

    An object is made when a process has its first event, opened once, and closed once: when the
    process ends, or after it has raised ``BrokerUnavailable``; a new one takes its place.
    ``publish`` may be called by several threads at a time. Each method may be ``async def``; those
    of a relay then run on one event loop, in a thread of its own.
    """

    # Consecutive events of one key that may be in a call. More than 1 only if the broker refuses
    # what follows a refused message of the same key, or ``publish`` stops a key at its first.
    per_key: ClassVar[int] = 1
    attribute_prefix: ClassVar[str] = "ce-"  # of CloudEvents attributes among the headers
    to: str = ""  # TO as the relay's settings have it; set after __init__ and before open
    timeout: float = 10.0  # seconds that a call of ``publish`` may take

    def __init__(self, *, timeout: Any = 10.0) -> None:
        """Take ``OPTIONS`` as keyword arguments; connect to nothing.

        Raises ``TypeError`` or ``ValueError`` for options that it does not take; the system checks
        show the message.
        """
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0:
            raise ValueError(f"timeout is {timeout!r}; expected seconds above zero.")
        self.timeout = timeout

    def open(self) -> Any:
        """Connect. Raises ``BrokerUnavailable`` if the broker cannot be reached."""

    def publish(self, messages: Sequence[Message], deadline: float) -> Any:
        """Send messages and wait for the broker's confirmations; return one outcome for each.

        ``deadline`` (``time.monotonic()``): when to stop waiting; what is not confirmed by then is
        ``Unconfirmed``. The client must not send a message again after ``publish`` has returned.
        Raises ``BrokerUnavailable`` if the broker could not be reached, so nothing is confirmed.
        """
        raise NotImplementedError

    def check(self) -> Any:
        """Look whether the broker, opened before, takes messages.

        Raises ``BrokerUnavailable`` if it does not answer, and any other error for what is wrong
        with it: a stream that is missing, a permission. It is asked every 3 s during an outage.
        """

    def close(self) -> Any:
        """Close the connection without waiting for a broker that is away."""

    @staticmethod
    def quote(value: str) -> str:
        """Return the value of an event's field as it goes into ``TO``."""
        return value
