"""Current state of delivery for the dashboard, from a bounded number of bounded queries."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from django.db import connections
from django.db.models.functions import Substr

from ..events import stored_instant
from ..listeners.outcomes import UNSETTLED
from ..listeners.progress import entries
from ..models import OutboxEvent, OutboxPause, OutboxStream
from ..models.fields import IsIndexed
from ..models.stream_queryset import StreamSummary
from ..sql import dialect_of
from .listeners import UnroutedType, describe_listeners, unrouted_types
from .queues import QueueState, queue_states, unserved_queues
from .rates import Rates, rates
from .status import error_class
from .workers import WorkerInfo, workers

MAX_EVENTS: Final = 10_000  # events counted, those due first
MAX_STREAMS: Final = 500  # streams whose events are counted, those due first
UNROUTED_SCAN_LIMIT: Final = 1000  # newest events checked for a listener, and as many due first
DEAD_SCAN_LIMIT: Final = 20_000  # newest events scanned for dead ones if no index finds them
MAX_DEAD: Final = 1000  # newest dead events that are grouped by cause
MAX_BLOCKED_SHOWN: Final = 20  # streams that are shown with what blocks them
MAX_BLOCKED_COUNTED: Final = 1000  # blocked streams that are counted
MAX_PAUSES: Final = 200  # pauses that are listed
ERROR_LENGTH: Final = 200  # characters of an error


@dataclass(slots=True, kw_only=True)
class TypeBacklog:
    """Numbers of unsettled events of one type, among those counted."""

    due: int = 0
    held: int = 0
    retrying: int = 0
    scheduled: int = 0
    in_streams: int = 0
    since: datetime | None = None  # the oldest due time

    @property
    def total(self) -> int:
        return self.due + self.held + self.retrying + self.scheduled + self.in_streams


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogByType:
    by_type: dict[str, TypeBacklog]
    is_whole: bool  # False: there are more than were counted
    lag: float  # seconds that the oldest due event, or stream, has waited

    @property
    def due(self) -> int:
        return sum(each.due + each.in_streams for each in self.by_type.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why events are dead: the event type, the listener of a shared event, the error class."""

    event_type: str
    listener: str  # empty: the event has only one listener
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadEvents:
    by_cause: dict[Cause, tuple[int, datetime | None]]  # count, and the latest death
    count: int
    is_whole: bool
    is_complete: bool  # False: events with a key were searched only up to DEAD_SCAN_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedStreams:
    streams: Sequence[tuple[OutboxStream, StreamSummary]]
    count: int  # at most MAX_BLOCKED_COUNTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    now: datetime  # by the database's clock
    workers: Sequence[WorkerInfo]  # silent ones first
    backlog: BacklogByType
    rates: Rates
    dead: DeadEvents
    blocked: BlockedStreams
    unrouted: Sequence[UnroutedType]
    pauses: Sequence[OutboxPause]  # the oldest first
    queues: Sequence[QueueState]  # the configured ones first
    listeners: Sequence[dict[str, Any]] = field(default_factory=describe_listeners)

    @property
    def alive(self) -> int:
        return sum(not each.is_silent for each in self.workers)

    @property
    def unserved_queues(self) -> Sequence[QueueState]:
        """Return the queues whose due events no live worker delivers, though others are alive."""
        return unserved_queues(self.queues) if self.alive else []


def load_overview(alias: str) -> Overview:
    """Return an overview of the outbox in this database."""
    now = dialect_of(connections[alias]).clock(connections[alias])
    known = workers(alias, now)
    return Overview(
        now=now,
        workers=sorted(known, key=lambda each: not each.is_silent),
        queues=queue_states(alias, known),
        backlog=_backlog(alias, now),
        rates=rates(alias, now),
        dead=_dead(alias),
        blocked=_blocked(alias),
        unrouted=unrouted_types(alias, limit=UNROUTED_SCAN_LIMIT),
        pauses=[*OutboxPause.objects.using(alias).order_by("paused_at", "pk")[:MAX_PAUSES]],
    )


def _backlog(alias: str, now: datetime) -> BacklogByType:
    """Count unsettled events by type and state, those due first."""
    by_type: defaultdict[str, TypeBacklog] = defaultdict(TypeBacklog)
    connection = connections[alias]
    rows = dialect_of(connection).backlog_by_type(connection, most=MAX_EVENTS)
    for event_type, state, count, first in rows:
        setattr(by_type[event_type], state, count)
        if state == "due":
            by_type[event_type].since = stored_instant(first)
    streams = OutboxStream.objects.using(alias).streams_only().filter(due_at__isnull=False)
    heads = [
        *streams.order_by("due_at").values_list("key", "due_at", "locked_by")[: MAX_STREAMS + 1]
    ]
    events_of = OutboxEvent.objects.using(alias).filter(
        IsIndexed("status"), status__in=UNSETTLED, key__in=[key for key, *_ in heads[:MAX_STREAMS]]
    )
    ordered = [*events_of.order_by().values_list("event_type", flat=True)[: MAX_EVENTS + 1]]
    for event_type, count in Counter(ordered[:MAX_EVENTS]).items():
        by_type[event_type].in_streams += count
    dues = [each.since for each in by_type.values() if each.since]
    dues += [due for _, due, locked_by in heads if due and due <= now and locked_by is None]
    counted = sum(count for _type, _state, count, _first in rows)
    return BacklogByType(
        by_type=dict(by_type),
        is_whole=counted < MAX_EVENTS and len(heads) <= MAX_STREAMS and len(ordered) <= MAX_EVENTS,
        lag=max(((now - due).total_seconds() for due in dues), default=0.0),
    )


def _dead(alias: str) -> DeadEvents:
    """Count the newest dead events by cause."""
    connection = connections[alias]
    dialect = dialect_of(connection)
    ids, is_complete = dialect.lately_dead(connection, most=MAX_DEAD + 1, scan=DEAD_SCAN_LIMIT)
    rows: Any = OutboxEvent.objects.using(alias).filter(pk__in=ids[:MAX_DEAD])
    rows = rows.annotate(line=Substr("last_error", 1, ERROR_LENGTH))
    found = [*rows.values_list("event_type", "line", "progress", "done_at")]
    causes: dict[Cause, tuple[int, datetime | None]] = {}
    for event_type, line, progress, done_at in found:
        for cause in _causes(event_type, line, progress):
            count, last = causes.get(cause, (0, None))
            causes[cause] = count + 1, max(filter(None, (last, done_at)), default=None)
    return DeadEvents(
        by_cause=causes, count=len(found), is_whole=len(ids) <= MAX_DEAD, is_complete=is_complete
    )  # fmt: skip


def _causes(event_type: str, line: str | None, progress: str | None) -> list[Cause]:
    """Return the causes of one event; each dead listener of a shared event has its own."""
    shared = entries(progress) if progress else None
    found = [
        Cause(event_type=event_type, listener=title, error=error_class(entry.error))
        for title, entry in (shared or {}).items()
        if entry.state == "dead"
    ]
    return found or [Cause(event_type=event_type, listener="", error=error_class(line))]


def _blocked(alias: str) -> BlockedStreams:
    blocked = OutboxStream.objects.using(alias).blocked()
    count = blocked[:MAX_BLOCKED_COUNTED].count()
    streams = [*blocked.order_by("due_at", "pk")[:MAX_BLOCKED_SHOWN]] if count else []
    summaries = OutboxStream.objects.using(alias).summaries([each.key for each in streams])
    return BlockedStreams(streams=[(each, summaries[each.key]) for each in streams], count=count)
