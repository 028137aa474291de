"""The values that a listener may return, and the ``Decision`` that every delivery ends in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum

from ..exceptions import seconds
from ..log import in_ascii


class Status(IntEnum):
    """The values of the column ``status``; the numbers are part of the table's public contract."""

    NEW = 0  # written, deferred or replayed; no failure on record
    DONE = 1  # final
    RETRY = 2  # failed at least once, due again
    DEAD = 3  # final until replayed


UNSETTLED = (Status.NEW, Status.RETRY)


@dataclass(frozen=True, slots=True)
class Done:
    """The event is done; the same as returning ``None``.

    Example::

        @outbox.listener("order.packed")
        def count_parcels(event):
            return outbox.Done()
    """


@dataclass(frozen=True, slots=True)
class Defer:
    """Deliver the event again after ``delay`` (seconds or timedelta). Costs no attempt.

    ``reason`` says why, for people: it is stored as the event's error while it waits.

    Raises ``ValueError`` unless the delay is a finite duration of zero or more.

    Example::

        @outbox.listener("order.paid")
        def ship(event):
            return outbox.Defer(timedelta(hours=1))  # not in stock yet
    """

    delay: float | timedelta  # seconds once constructed
    reason: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "delay", seconds(self.delay, of="Defer"))


@dataclass(frozen=True, slots=True)
class Dead:
    """Give up: the event is dead at once. Costs no attempt; ``reason`` is stored as its error.

    Raises ``ValueError`` for a reason that is not a str.

    Example::

        @outbox.listener("letter.written")
        def post(event):
            return outbox.Dead("the address does not exist")
    """

    reason: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise ValueError(f"Dead got the reason {self.reason!r}; expected a str.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a listener has failed for good; passed to its fallback after the event.

    - ``listener``: the listener's title: event type and name.
    - ``attempts``: executions of the listener, the last one included.
    - ``exception``: what the last execution raised.
    - ``text``: class, message and the end of the traceback, at most 4000 characters.

    Example::

        @outbox.listener("card.charged")
        def send_receipt(event):
            raise outbox.Unrecoverable("no address")


        @send_receipt.fallback
        def alert(event, failure):
            print(f"{failure.listener} failed {failure.attempts} times: {failure.exception}")
    """

    listener: str  # the listener's title: event type and name
    attempts: int  # executions of the listener, the last one included
    exception: BaseException  # raised by the last execution
    text: str  # class, message and the end of the traceback, at most 4000 characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next state of an event's row, as the settler writes it."""

    status: Status
    delay: float | None = None  # seconds from the database's now; None: not due again
    spent: int = 0  # attempts that this delivery cost
    error: str | None = None  # None keeps the row's error
    kind: str = ""  # what logs may show of the error: its class, or our own text
    cause: str | None = None  # the error without ids and numbers; None keeps the row's cause
    history: str | None = None  # JSON in ASCII; None keeps the row's history
    queue: str | None = None  # where the row waits from now on; None keeps its queue
    outcome: str = "done"  # done · retry · deferred · dead · discarded · lost: for signals
    written: bool = False  # already committed, with the changes of an atomic listener
    unavailable: str = ""  # why what it sends to cannot be reached: the breaker opens at once

    def shortened(self) -> Decision:
        """Return the decision as any database can store it."""
        error, cause = self.error and in_ascii(self.error), self.cause and in_ascii(self.cause)
        return replace(self, error=error, cause=cause)


COALESCED = "coalesced"  # the result of a delivery that a newer one of its slot replaced
DISCARDED = "Discarded:"  # begins the error of a delivery whose listener was removed
DONE = Decision(status=Status.DONE)
LOST = Decision(status=Status.NEW, outcome="lost", written=True)  # another worker owns the row
