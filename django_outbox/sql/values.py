"""Types, column lists and conversions that the SQL of all databases shares."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..events import stored_instant
from ..listeners.outcomes import Decision

Row = tuple[Any, ...]

AsRead = tuple[int, str | None]  # attempts and progress of a row when it was leased

INSTANTS = ("occurred_at", "created_at", "deliver_at", "first_due_at")
LIGHT = ("event_id", "attempts", "rescues", "progress", *INSTANTS)
FULL = (
    "event_id", "attempts", "rescues", "progress", *INSTANTS,
    "event_type", "aggregate_type", "aggregate_id", "tenant_id", "payload", "headers", "unique_key",
)  # fmt: skip
PAYLOAD = FULL.index("payload")
KEYED = (*FULL, "key", "seq", "status")
TAIL = ("due_at", "previous_owner", "now")  # columns that a claim adds; "now" by the database


class RescueState(Enum):
    """How often a row's worker was lost; the value is the SQL condition, with the claimer's id.

    A row that two workers were lost with is a suspect. It is claimed alone, so that no other event
    is suspected with it. An expired lease counts, because claiming it is the rescue.
    """

    CLEAN = "(rescues < 2 AND (locked_by IS NULL OR locked_by = %s))"
    LOST = "(rescues = 0 AND locked_by <> %s)"
    SUSPECT = "(rescues > 1 OR (rescues = 1 AND locked_by <> %s))"


Pauses = frozenset[tuple[str, str]]  # kind and name of each

# Seconds by which a paused event is postponed each time. After an interrupted resume, events are
# late by this much at most.
POSTPONED_FOR = 600.0


class LeaseKind(Enum):
    """What is leased: an event's row or its stream. The value is the column of its next try."""

    ROW = "available_at"
    STREAM = "deliver_at"  # an event with a key is never due by its own row


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Which due rows to claim: any, or only those of ``ids`` (events handed over in process)."""

    me: str
    lease: float  # seconds
    limit: int
    ids: Sequence[str] | None = None
    since: float | None = None  # seconds; skip rows due before: dead index entries are there
    at: datetime | None = None  # instead of the database's now, for drain() and tests
    skip_recent: float = 0.0  # seconds
    exclude: Sequence[str] = ()
    state: RescueState = RescueState.CLEAN
    most_bytes: int | None = None  # of payload text; the last row may exceed it

    @property
    def columns(self) -> tuple[str, ...]:
        return FULL if self.ids is None else LIGHT

    def is_cut(self, rows: Sequence[Row]) -> bool:
        """Return whether these rows, of ``columns``, have as much payload as ``most_bytes``."""
        if self.most_bytes is None or self.ids is not None:
            return False
        return sum(len(row[PAYLOAD]) for row in rows) >= self.most_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClaim:
    """Which due streams to claim."""

    me: str
    lease: float  # seconds
    limit: int
    since: float | None = None  # seconds; skip streams due before
    at: datetime | None = None  # instead of the database's now, for drain() and tests
    exclude: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Claimed:
    """The result of a claim: rows of events, or keys of streams with the previous owner."""

    rows: list[Row]
    more: bool  # as many were due as requested, though other workers may have leased some
    waited: float = 0.0  # seconds since the first of them fell due


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamQuery:
    """What to read of leased streams: at most ``limit`` pending events of each."""

    me: str
    keys: Sequence[str]
    limit: int
    dead_too: bool = False  # include dead events, because they block the stream
    only_due_retries: bool = False  # skip failed events that wait, as they block none


@dataclass(slots=True)
class StreamRows:
    """A stream as it was read; its rows have the columns ``KEYED`` and are in order."""

    key: str
    seq: int  # its version
    now: Any  # the database's clock
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Release:
    """How to release a stream."""

    key: str
    seq: int | None  # the version that was read; None: any
    delay: float | None  # seconds until it is due; None: idle until the next write


def claimed(rows: list[Row], *, seen: Sequence[Row], limit: int, due: int) -> Claimed:
    """Return a claim's result, with ``seen`` the rows that were due, oldest first.

    Column ``due`` of these is the due time, and the last column is the database's clock.
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
    """Return a plain int for an int subclass, because drivers adapt only plain ints."""
    return int(value) if isinstance(value, int) else value


def settle_values(event_id: str, decision: Decision) -> tuple[object, ...]:
    """Return a row of a settle's VALUES: event_id, status, spent, delay, error, progress."""
    return (
        event_id, plain(decision.status), decision.spent, decision.delay, decision.error,
        decision.progress,
    )  # fmt: skip


def renewed_of(rows: Sequence[Row], taken: int) -> tuple[set[str], set[str]]:
    """Return (renewed, still held) from ids and due times, after a statement renewed ``taken``.

    The statement gives all rows that it renews the same due time, which is the latest.
    """
    newest = max((due for _, due in rows if due is not None), default=None) if taken else None
    renewed = {each for each, due in rows if due is not None and due == newest}
    return renewed, {each for each, _ in rows}


def released_of(rows: Sequence[Row], me: str, taken: int) -> set[str]:
    """Return which streams ``me`` has just released, from keys and owners, ``taken`` in number."""
    others = {key: owner for key, owner in rows if owner != me}
    if taken == len(others):  # some may have a new owner already
        return {*others}
    return {key for key, owner in others.items() if owner is None}


def to_database(value: datetime, connection: BaseDatabaseWrapper) -> Any:
    """Return an aware instant in the form that this database stores."""
    value = value.astimezone(timezone.utc)
    return value if connection.vendor == "postgresql" else to_text(value, connection)


def to_text(value: datetime, connection: BaseDatabaseWrapper) -> str:
    """Return an instant in UTC as text, which psycopg sends twenty times as fast."""
    if connection.vendor != "postgresql":
        value = value.replace(tzinfo=None)
    return value.isoformat(" ", "microseconds")
