"""Current state of delivery for the dashboard, from a bounded number of bounded queries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import connections

from ..conf import current
from ..events import GLOBAL, stored_instant
from ..listeners.callables import qualified_name
from ..listeners.registry import ANY, listeners, route
from ..models import OutboxEvent, OutboxStatistics, OutboxStream
from ..sql import dialect_of
from .causes import Causes, load_causes
from .counts import Rates, limited, minutes, rates
from .holds import DEAD, Hold, load_holds
from .queues import QueueState, lag, queue_states, unserved_queues
from .workers import Loss, WorkerInfo, clock_and_workers, losses, missing, suspects

MAX_EVENTS: Final = 10_000  # events counted, those due first
MAX_TYPES: Final = 10  # event types whose deliveries are shown
MINUTES: Final = 60  # that the charts and deliveries cover
MAX_CAUSES: Final = 5  # causes of dead events, those of the most events
MAX_BLOCKED_SHOWN: Final = 5  # streams that are shown with what blocks them
MAX_BLOCKED_COUNTED: Final = 1000  # blocked streams that are counted


@dataclass(slots=True, kw_only=True)
class TypeBacklog:
    """Numbers of unsettled events of one type, among those counted."""

    due: int = 0
    held: int = 0  # due ones
    leased: int = 0
    retrying: int = 0
    scheduled: int = 0
    since: datetime | None = None  # the oldest due time

    @property
    def total(self) -> int:
        return self.due + self.held + self.leased + self.retrying + self.scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogByType:
    by_type: dict[str, TypeBacklog]
    is_whole: bool  # False: there are more than were counted


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedStream:
    name: str  # lane and key
    key: str
    due_at: datetime | None  # the next try
    head: OutboxEvent | None  # None: it was settled between two queries
    backlog: int  # events that wait in it


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedStreams:
    streams: Sequence[BlockedStream]
    count: int  # at most MAX_BLOCKED_COUNTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    now: datetime  # by the database's clock
    workers: Sequence[WorkerInfo]  # live and lost ones
    missing: Sequence[WorkerInfo]  # lost, and not replaced
    losses: Sequence[Loss]  # events that were leased by lost workers, newest first
    suspects: Sequence[Loss]  # those that may have stopped their workers; one: it is certain
    backlog: BacklogByType
    rates: Rates
    points: Sequence[dict[str, Any]]  # counts of each minute of the last hour, the oldest first
    types: Sequence[dict[str, Any]]  # counts of the last hour by event type, the most first
    causes: Causes
    blocked: BlockedStreams
    holds: Sequence[Hold]  # pauses first, the oldest first
    queues: Sequence[QueueState]  # the configured ones first

    @property
    def alive(self) -> int:
        return sum(not each.is_silent for each in self.workers)

    @property
    def pauses(self) -> list[Hold]:
        return [each for each in self.holds if each.kind != DEAD]

    @property
    def lag(self) -> float:
        """Return the seconds that the oldest due event or stream has waited."""
        return lag(self.queues)

    @property
    def unserved_queues(self) -> Sequence[str]:
        """Return the queues whose due events no live worker delivers, though others are alive."""
        late = unserved_queues([each.as_row() for each in self.queues]) if self.alive else []
        return [each["queue"] for each in late]

    @property
    def unrouted(self) -> Sequence[str]:
        """Return the event types that wait and that no listener of this process receives."""
        if current().MODE == "writer_only":  # another program reads the table
            return []
        return [each for each in sorted(self.backlog.by_type) if not listeners_of(each)]


def listeners_of(event_type: str) -> list[str]:
    """Return the names of the functions that receive an event type in this process."""
    kinds = {GLOBAL, *(each.aggregate_type for each in listeners())} - {ANY}
    found = (each for kind in kinds for each in route(str(kind), event_type))
    return sorted({qualified_name(each.call) for each in found})


def load_overview(alias: str, *, causes: Causes | None = None) -> Overview:
    """Return an overview of the outbox in this database.

    ``causes`` that were read lately are counted anew, unless some of their events are gone.
    """
    now, known = clock_and_workers(alias)
    hour = now - timedelta(minutes=MINUTES + 1)
    points = minutes(alias, hour)
    lately = rates(points, now)
    lost = missing(known)
    found = losses(alias) if lost or lately.rescued else []
    holds = load_holds(alias, now)
    return Overview(
        now=now,
        workers=known,
        missing=lost,
        losses=found,
        suspects=suspects(found),
        queues=queue_states(alias, known, holds),
        backlog=backlog(alias, holds),
        rates=lately,
        points=points,
        types=OutboxStatistics.objects.using(alias).since(hour).by_listener(MAX_TYPES),
        causes=_causes(alias, causes),
        blocked=blocked_streams(alias),
        holds=holds,
    )


def _causes(alias: str, known: Causes | None) -> Causes:
    """Return the causes; to group all dead events takes longer than all other queries together."""
    if known is not None:
        total = dialect_of(connections[alias]).count_dead()
        if total >= known.total:
            return replace(known, total=total)
    return load_causes(alias, limit=MAX_CAUSES)


def backlog(alias: str, holds: Sequence[Hold] = ()) -> BacklogByType:
    """Count unsettled events without a key by type and state, those due first."""
    by_type: defaultdict[str, TypeBacklog] = defaultdict(TypeBacklog)
    connection = connections[alias]
    held = [each.queue for each in holds if each.count]
    rows = dialect_of(connection).backlog_by_type(held=held, most=MAX_EVENTS)
    for event_type, state, count, first in rows:
        setattr(by_type[event_type], state, count)
        if state == "due":
            by_type[event_type].since = stored_instant(first)
    counted = sum(count for _type, _state, count, _first in rows)
    return BacklogByType(by_type=dict(by_type), is_whole=counted < MAX_EVENTS)


def blocked_streams(alias: str) -> BlockedStreams:
    """Count blocked streams, and read the heads of those that are tried next."""
    rows = OutboxStream.objects.using(alias)
    blocked = rows.blocked().order_by("due_at", "pk").values_list("pk", "key", "due_at")
    streams = [*blocked[:MAX_BLOCKED_COUNTED]]
    summaries = rows.summaries([name for name, *_ in streams[:MAX_BLOCKED_SHOWN]])
    return BlockedStreams(
        streams=[
            BlockedStream(name=name, key=key, due_at=due_at, head=found.head, backlog=found.backlog)
            for (name, key, due_at), found in zip(streams, summaries.values(), strict=False)
        ],
        count=limited(len(streams), MAX_BLOCKED_COUNTED),
    )
