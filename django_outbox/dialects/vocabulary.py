"""What the dialects' statements have in common: a claim, its columns, the fence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from ..events import stored_instant
from ..outcomes import Decision

Row = tuple[Any, ...]

INSTANTS = ("occurred_at", "created_at", "deliver_at", "first_due_at")
LIGHT = ("event_id", "attempts", "rescues", "progress", *INSTANTS)
FULL = (
    "event_id", "attempts", "rescues", "progress", *INSTANTS,
    "event_type", "aggregate_type", "aggregate_id", "tenant_id", "payload", "headers", "unique_key",
)  # fmt: skip
KEYED = (*FULL, "key", "seq", "status")
TAIL = ("due_at", "was", "now")  # what a claim adds: the due time and owner it found, its clock


class Past(Enum):
    """What became of those who held a row before; the value is its condition, with my name.

    A row that two lost workers held is a suspect: it is claimed alone, so that its neighbours are
    innocent. The lease that is found counts, for finding it is the rescue.
    """

    CLEAN = "(rescues < 2 AND (locked_by IS NULL OR locked_by = %s))"
    LOST = "(rescues = 0 AND locked_by <> %s)"
    SUSPECT = "(rescues > 1 OR (rescues = 1 AND locked_by <> %s))"


Pauses = frozenset[tuple[str, str]]  # kind and name of each

# Seconds that what is paused is made due later at a time; so late it is, at most, should the resume
# that brings it back be cut short.
POSTPONED_FOR = 600.0


class Hold(Enum):
    """What a worker has leased of an event; the value is the column of the event's next try."""

    ROW = "available_at"
    STREAM = "deliver_at"  # a keyed row is never due itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What to claim: due rows, or those of ``ids`` (the hot ones) that are due."""

    me: str
    lease: float  # seconds
    limit: int
    ids: Sequence[str] | None = None
    since: float | None = None  # seconds; skip what was due before: dead index entries lie there
    at: datetime | None = None  # instead of the database's now, for drain() and tests
    skip_recent: float = 0.0  # seconds
    exclude: Sequence[str] = ()
    past: Past = Past.CLEAN

    @property
    def columns(self) -> tuple[str, ...]:
        return FULL if self.ids is None else LIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClaim:
    """Which due streams to claim."""

    me: str
    lease: float  # seconds
    limit: int
    since: float | None = None  # seconds; skip what was due before
    at: datetime | None = None  # instead of the database's now, for drain() and tests
    exclude: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim brought: rows of events, or keys of streams with the owner found."""

    rows: list[Row]
    more: bool  # as many were due as were asked for, though others may have been faster
    waited: float = 0.0  # seconds since the first of them fell due


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What to read of leased streams: of each at most ``limit`` pending events."""

    me: str
    keys: Sequence[str]
    limit: int
    dead_too: bool = False  # for they end the stream
    only_due_retries: bool = False  # failed events that wait keep nobody


@dataclass(slots=True)
class Found:
    """A stream as it was read; its rows have the columns ``KEYED`` and are in order."""

    key: str
    seq: int  # its version
    now: Any  # the database's clock
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Release:
    """How to give a stream back."""

    key: str
    seq: int | None  # the version that was read; None: whichever it has
    delay: float | None  # seconds until it is due; None: idle until the next write


def claimed(rows: list[Row], *, seen: Sequence[Row], limit: int, due: int) -> Claimed:
    """Tell what a claim brought of the rows that it saw, due first; ``due`` is that column.

    The last column is the database's clock.
    """
    waited = 0.0
    if seen:
        since, now = stored_instant(seen[0][due]), stored_instant(seen[0][-1])
        assert since is not None and now is not None
        waited = (now - since).total_seconds()
    return Claimed(rows, more=len(seen) >= limit, waited=waited)


def marks(values: Collection[Any]) -> str:
    return ", ".join(["%s"] * len(values))


def plain(value: Any) -> Any:
    """Drivers adapt ints, not their subclasses."""
    return int(value) if isinstance(value, int) else value


def settle_values(event_id: str, decision: Decision) -> tuple[object, ...]:
    """One row of a settle's VALUES list: event_id, status, spent, delay, error, progress."""
    return (
        event_id, plain(decision.status), decision.spent, decision.delay, decision.error,
        decision.progress,
    )  # fmt: skip


def renewed_of(rows: Sequence[Row], taken: int) -> tuple[set[str], set[str]]:
    """Return (renewed, still mine) of ids and due times, when one statement renewed ``taken``.

    What it has renewed it has given the same due time, and the latest.
    """
    newest = max((due for _, due in rows if due is not None), default=None) if taken else None
    renewed = {each for each, due in rows if due is not None and due == newest}
    return renewed, {each for each, _ in rows}
