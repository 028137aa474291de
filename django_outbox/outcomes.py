"""What a listener may answer, and the one Decision that every delivery ends in."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

from .exceptions import seconds


class Status(IntEnum):
    """The column ``status``; the numbers are part of the table's contract."""

    NEW = 0  # written, deferred or replayed; no failure on record
    DONE = 1  # final
    RETRY = 2  # failed at least once, due again
    DEAD = 3  # final until a person replays it


UNSETTLED = (Status.NEW, Status.RETRY)


@dataclass(frozen=True, slots=True)
class Done:
    """The event is done; the same as answering ``None``."""


@dataclass(frozen=True, slots=True)
class Defer:
    """Not yet: look again after ``delay`` (seconds or timedelta). Costs no attempt.

    Raises ``ValueError`` for a negative delay or one that is no duration.
    """

    delay: float | timedelta  # seconds once constructed

    def __post_init__(self) -> None:
        object.__setattr__(self, "delay", seconds(self.delay, of="Defer"))


@dataclass(frozen=True, slots=True)
class Dead:
    """Give up: the event is dead at once. Costs no attempt; ``reason`` is kept as its error."""

    reason: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise ValueError(f"Dead got the reason {self.reason!r}; expected a str.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a fallback is called: what became of its listener (design section 3)."""

    listener: str  # as the event's progress names it: event type and name
    attempts: int  # executions of the listener, the last one included
    exception: BaseException  # what the last one raised
    text: str  # class, message and the end of the traceback, at most 4000 characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the settler writes: one row's next state."""

    status: Status
    delay: float | None = None  # seconds from the database's now; None: not due any more
    spent: int = 0  # attempts that this delivery cost
    error: str | None = None  # None keeps what the row has
    kind: str = ""  # what logs may say of the error: its class, or words of our own
    progress: str | None = None  # fan-out: JSON per listener; None keeps what the row has
    outcome: str = "done"  # done · retry · deferred · dead · lost: for signals and logs
    written: bool = False  # committed already, with the effects of an atomic listener


DONE = Decision(status=Status.DONE)
LOST = Decision(status=Status.NEW, outcome="lost", written=True)  # another owner has the row
