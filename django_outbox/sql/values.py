"""Types, column lists and conversions that the SQL of all databases shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper

from ..events import stored_instant
from ..listeners.outcomes import Decision

V = TypeVar("V")
Row = tuple[Any, ...]

SQL = tuple[str, list[Any]]  # a piece of SQL and its parameters

# Rows by id, or streams by name, each with when it was leased, as a claim returned it: a worker
# that lost a lease may have another one of the same row now.
Leases = Mapping[str, Any]

INSTANTS = ("occurred_at", "created_at", "deliver_at", "first_due_at")
DUE = ("available_at", "due_at")
LIGHT = ("id", "attempts", "rescues", "listener", "routes", "queue", "history", *INSTANTS)
FULL = (
    *LIGHT,
    "event_id",
    "event_type",
    "aggregate_type",
    "aggregate_id",
    "tenant_id",
    "payload",
    "headers",
    "unique_key",
    "key",
    "stream",
)
PAYLOAD, QUEUE = FULL.index("payload"), FULL.index("queue")  # the latter also in LIGHT
KEYED = (*FULL, "seq", "status")
# What a settle writes of a decision, and as what PostgreSQL's types.
DECIDED = {"status": "smallint", "spent": "int", "delay": "float8"} | dict.fromkeys(
    ("error", "cause", "history", "queue"), "text"
)
# Columns that a claim adds; "now" by the database's clock, which is when it leased the row.
TAIL = ("due_at", "previous_owner", "now")


SUSPECT_FROM = 2  # workers that were lost with a row or stream


class RescueState(Enum):
    """How many workers were lost with a row or stream: the SQL condition, with the claimer's id.

    With two it is a suspect: it may be what they died of, and only a quarantine claims it. A lease
    that has ended counts, because claiming it is the rescue.
    """

    ORDINARY = "(rescues = 0 OR (rescues = 1 AND (locked_by IS NULL OR locked_by = %s)))"
    SUSPECT = "(rescues > 1 OR (rescues = 1 AND locked_by <> %s))"


Pauses = Mapping[tuple[str, str], int]  # the ids of pauses, by kind and name
NO_PAUSES: Pauses = MappingProxyType({})
CLOSING_KINDS = ("queue", "breaker")  # kinds of pauses that close a queue to claims


class LeaseKind(Enum):
    """What is leased: an event's row or its stream. The value is the column of its next try."""

    ROW = "available_at"
    STREAM = "deliver_at"  # an event with a key is never due by its own row


class Table(NamedTuple):
    """A table whose rows are leased."""

    name: str
    key: str  # the primary key
    due: str  # the column that says when a row is due; while it is leased, when the lease ends
    order: str  # in which rows of a queue are claimed
    columns: tuple[str, ...]  # that a claim reads


EVENTS = Table("outbox_event", "id", "available_at", "available_at, id", FULL)
STREAMS = Table("outbox_stream", "stream", "due_at", "due_at", ("stream", "queue", "rescues"))


@dataclass(frozen=True, slots=True)
class Branch:
    """What a claim takes from one queue, those due first."""

    queue: str
    limit: int
    since: float | None = None  # seconds; skip what was due before: dead index entries are there
    most_bytes: int | None = None  # of payload text; the last row may exceed it


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Which due rows to claim: some of each queue, or those of ``ids`` (handed over in process)."""

    me: str
    lease: float  # seconds
    table: Table = EVENTS
    branches: Sequence[Branch] = ()
    ids: Sequence[str] | None = None
    at: datetime | None = None  # instead of the database's now, for drain() and tests
    skip_recent: float = 0.0  # seconds
    exclude: Sequence[str] = ()
    state: RescueState = RescueState.ORDINARY

    @property
    def columns(self) -> tuple[str, ...]:
        return self.table.columns if self.ids is None else LIGHT

    def cut(self, rows: Iterable[Row]) -> tuple[list[Row], set[str]]:
        """Return the rows within the ``most_bytes`` of their queues, and which queues were cut."""
        left = {each.queue: each.most_bytes for each in self.branches if each.most_bytes}
        if not left:
            return [*rows], set()
        kept, cut = [], set()
        for row in rows:
            room = left.get(row[QUEUE])
            if room is not None:
                if room <= 0:
                    cut.add(row[QUEUE])
                    continue
                left[row[QUEUE]] = room - len(row[PAYLOAD])
            kept.append(row)
        return kept, cut


@dataclass(frozen=True, slots=True)
class Found:
    """What a claim found in one queue."""

    more: bool = False  # as many were due as requested, though other workers may have leased some
    waited: float = 0.0  # seconds since the first of them fell due


@dataclass(frozen=True, slots=True)
class Claimed:
    """The result of a claim."""

    rows: list[Row]  # with the claim's columns and TAIL
    queues: Mapping[str, Found] = field(default_factory=dict)  # those in which something was due

    def found(self, queue: str) -> Found:
        """Return what was found in a queue."""
        return self.queues.get(queue, Found())


class PauseTimes(NamedTuple):
    """A pause, and when it ends."""

    id: int
    left: float | None  # seconds until it does; negative: since when it has; None: no end is set
    length: float  # seconds; of a circuit breaker's pause


class Column(NamedTuple):
    """A column of values, one for each row of an UPDATE."""

    name: str
    kind: str  # its type, as PostgreSQL calls it
    values: Sequence[Any]


class EachUpdate(NamedTuple):
    """An UPDATE of rows of a table, each by values of its own.

    The first of the columns is the primary key. In ``changes``, which have no parameters, and in
    ``where``, the row is ``e`` and what is given ``v``.
    """

    table: str
    given: Sequence[Column]
    changes: str
    where: SQL


class Ending(NamedTuple):
    """A decision on a row that is leased."""

    id: str
    locked_at: Any  # when the row or its stream was leased
    attempts: int  # as they were then: a settle whose answer was lost is repeated, and counts once
    decision: Decision


class Unclaimed(NamedTuple):
    """A lease to be given back."""

    id: str
    locked_at: Any
    due_at: datetime
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamQuery:
    """What to read of leased streams: at most ``limit`` pending events of each."""

    me: str
    streams: Leases
    limit: int
    dead_too: bool = False  # include dead events, because they block the stream
    only_due_retries: bool = False  # skip failed events that wait, as they block none


@dataclass(slots=True)
class StreamRows:
    """A stream as it was read; its rows are in order.

    They have the columns ``KEYED``, and from which seq on they wait for the routing of another.
    """

    name: str
    seq: int  # its version
    now: Any  # the database's clock
    rows: list[Row] = field(default_factory=list)


class Release(NamedTuple):
    """How to release a stream."""

    name: str
    locked_at: Any  # when it was leased
    seq: int | None  # the version that was read; None: any
    delay: float | None  # seconds until it is due; None: idle until the next write
    queue: str | None = None  # where it waits from now on; None keeps its queue
    is_innocent: bool = False  # its events came to an end here: no worker was lost by them


def claimed(
    claim: Claim, rows: list[Row], seen: Sequence[Row], cut: Collection[str] = ()
) -> Claimed:
    """Return a claim's result, with ``seen`` the rows that were due, oldest first in each queue.

    More are due of queues that are ``cut``, whatever their number of rows.
    """
    branches, queue = claim.branches, claim.columns.index("queue")
    limits = {each.queue: each.limit for each in branches}
    counts: Mapping[str, int]
    if len(branches) == 1 and seen:
        first, counts = {branches[0].queue: seen[0]}, {branches[0].queue: len(seen)}
    else:
        counts = Counter(row[queue] for row in seen)
        first = {row[queue]: row for row in reversed(seen)}
    found = {}
    for name, row in first.items():
        more = name in cut or counts[name] >= limits.get(name, 0)
        found[name] = Found(more, seconds_between(row[-3], row[-1]) or 0.0)
    return Claimed(rows, found)


def in_parts(values: Sequence[V], size: int) -> Iterator[Sequence[V]]:
    """Yield at most ``size`` of these values at a time."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def key_of(table: str) -> str:
    """Return the column of a table's primary key."""
    return "stream" if table == "outbox_stream" else "id"


def marks(values: Collection[Any]) -> str:
    return ", ".join(["%s"] * len(values))


def plain(value: Any) -> Any:
    """Return a plain int for an int subclass, because drivers adapt only plain ints."""
    return int(value) if isinstance(value, int) else value


def seconds_between(first: Any, second: Any) -> float | None:
    """Return the seconds between two instants that this database has returned; None if one is."""
    start, end = stored_instant(first), stored_instant(second)
    return None if start is None or end is None else (end - start).total_seconds()


def to_database(value: datetime, connection: BaseDatabaseWrapper) -> Any:
    """Return an aware instant in the form that this database stores."""
    value = value.astimezone(timezone.utc)
    return value if connection.vendor == "postgresql" else to_text(value, connection)


def instant(stored: Any, connection: BaseDatabaseWrapper) -> str:
    """Return an instant as text, which a statement or the ORM has read from this database."""
    value = stored_instant(stored)
    assert value is not None
    return to_text(value, connection)


def instants(name: str, stored: Sequence[Any], connection: BaseDatabaseWrapper) -> Column:
    """Return a column of instants that this database has stored."""
    texts = {each: instant(each, connection) for each in {*stored}}  # a claim has one for all
    return Column(name, "timestamptz", [texts[each] for each in stored])


def to_text(value: datetime, connection: BaseDatabaseWrapper) -> str:
    """Return an instant in UTC as text, which psycopg sends twenty times as fast."""
    if connection.vendor != "postgresql":
        value = value.replace(tzinfo=None)
    return value.isoformat(" ", "microseconds")
