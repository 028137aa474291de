"""The current state of delivery, which the console and ``outbox_status`` show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import connections

from ..conf import current
from ..events import GLOBAL, least_id
from ..listeners.outcomes import Status
from ..listeners.registry import ANY, listeners, route
from ..models import OutboxEvent, OutboxStream
from ..models.fields import age
from ..models.queryset import by_death
from ..models.stream_queryset import with_summaries
from ..sql import dialect_of
from ..sql.dialect import Flow
from .causes import Causes, load_causes
from .counts import MAX_LAG, PERIOD, Rates, capped_count, counts, limited, minutes, rates
from .holds import COUNT_LIMIT, Hold
from .problems import Limits, find_problems
from .queues import ListenerState, QueueState, lag, load_backlog
from .sentences import sentence
from .workers import Loss, WorkerInfo, clock_and_workers, losses, missing, suspects

MINUTES: Final = 60  # that the charts cover
MAX_CAUSES: Final = 20  # causes of dead events that are listed
MAX_HOLDS: Final = 100  # that are listed, the longest first
MAX_BLOCKED_SHOWN: Final = 5  # streams that are shown with what blocks them
MAX_BLOCKED_COUNTED: Final = 1000  # blocked streams that are counted

Report = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    now: datetime  # by the database's clock
    workers: Sequence[WorkerInfo]  # live and lost ones
    missing: Sequence[WorkerInfo]  # lost, and not replaced
    losses: Sequence[Loss]  # events that were leased by lost workers, newest first
    suspects: Sequence[Loss]  # those that may have stopped their workers; one: it is certain
    queues: Sequence[QueueState]  # the configured ones first
    holds: Sequence[Hold]  # pauses first, the oldest first
    listeners: Sequence[ListenerState]  # those with the most that waits first
    flow: Flow | None  # None: no queue is late
    rates: Rates
    points: Sequence[dict[str, Any]]  # counts of each minute of the last hour, the oldest first
    causes: Causes
    blocked: Sequence[Any]  # streams with a ``summary``, those that are tried next
    blocked_count: int  # at most MAX_BLOCKED_COUNTED
    is_new: bool  # nothing was ever written, and no worker has run

    @property
    def alive(self) -> int:
        return sum(not each.is_silent for each in self.workers)

    @property
    def lag(self) -> float:
        """Return the seconds that the oldest due event or stream has waited."""
        return lag(self.queues)

    @property
    def unrouted(self) -> Sequence[ListenerState]:
        """Return the event types that wait and that no listener of this process receives."""
        if current().MODE == "writer_only":  # another program reads the table
            return []
        kinds = {GLOBAL, *(each.aggregate_type for each in listeners())} - {ANY}
        return [
            each
            for each in self.listeners
            if not each.is_routed and not any(route(str(kind), each.listener) for kind in kinds)
        ]


def load_overview(alias: str, *, causes: Causes | None = None) -> Overview:
    """Return an overview of the outbox in this database.

    ``causes`` that were read lately are counted anew, unless some of their events are gone.
    """
    now, known = clock_and_workers(alias)
    points = minutes(alias, now - timedelta(minutes=MINUTES + 1))
    lately, lost = rates(points, now), missing(known)
    found = losses(alias, now) if lost or lately.rescued else []
    queues, holds, served = load_backlog(alias, now, known)
    causes = _causes(alias, causes, now)
    blocked, blocked_count = _blocked(alias)
    is_empty = not (known or points or holds or served or causes.total or blocked)
    return Overview(
        now=now,
        workers=known,
        missing=lost,
        losses=found,
        suspects=suspects(found),
        queues=queues,
        holds=holds,
        listeners=served,
        flow=_flow(alias, now, queues),
        rates=lately,
        points=points,
        causes=causes,
        blocked=blocked,
        blocked_count=blocked_count,
        is_new=is_empty and not OutboxEvent.objects.using(alias).exists(),
    )


def _causes(alias: str, known: Causes | None, now: datetime) -> Causes:
    """Return the causes; to group all dead events takes longer than all other queries together."""
    if known is not None:
        total = by_death(OutboxEvent.objects.using(alias)).count()
        if total >= known.total:
            return replace(known, total=total)
    return load_causes(alias, limit=MAX_CAUSES, now=now)


def _flow(alias: str, now: datetime, queues: Sequence[QueueState]) -> Flow | None:
    """Return what was written lately, if a queue is late, and how much is due where much is."""
    late = [each for each in queues if (each.oldest_due_age or 0.0) > MAX_LAG]
    if not late:
        return None
    many = [each.name for each in late if each.events >= COUNT_LIMIT]
    since = least_id(now - timedelta(seconds=PERIOD))
    return dialect_of(connections[alias]).flow(queues=many, since=since, most=COUNT_LIMIT)


def _blocked(alias: str) -> tuple[list[Any], int]:
    """Count blocked streams, and read the heads of those that are tried next."""
    rows = OutboxStream.objects.using(alias)
    streams = [*rows.blocked().order_by("due_at", "pk")[:MAX_BLOCKED_COUNTED]]
    shown = with_summaries(rows, streams[:MAX_BLOCKED_SHOWN])
    return shown, limited(len(streams), MAX_BLOCKED_COUNTED)


# -- the report of outbox_status -------------------------------------------------------------------


def status(alias: str, limits: Limits | None = None) -> Report:
    """Return the status report of the outbox in this database, for people and monitoring.

    Its values are plain, but for datetimes. Ages are seconds by the database's clock. Counts of
    rows stop at a limit, see the reference.
    """
    events, streams = OutboxEvent.objects.using(alias), OutboxStream.objects.using(alias)
    found, total = load_overview(alias), counts(alias)
    problems = find_problems(found, limits)
    holds = sorted(found.holds, key=lambda each: (each.planned, -each.age))[:MAX_HOLDS]
    return {
        "problems": [{**each.as_row(), "text": sentence(each, found.now)} for each in problems],
        "counts": total.numbers,
        "at_least": total.at_least,
        "estimated": [*total.estimated],
        "due": sum(each.due for each in found.queues),
        "oldest_due_age": found.lag,
        "held": sum(each.count for each in found.holds),
        "leased": capped_count(events.leased()) + capped_count(streams.leased()),
        "blocked": found.blocked_count,
        "rates": {"seconds": PERIOD, **asdict(found.rates)},
        "queues": [each.as_row() for each in found.queues],
        "listeners": [each.as_row() for each in found.listeners],
        "blocked_streams": [_stream(each, found.now) for each in found.blocked],
        "holds": [each.as_row() for each in holds],
        "workers": [
            each.as_row()
            for each in found.workers
            if each.is_newly_lost or not each.is_silent or each in found.missing
        ],
        "causes": [each.as_row() for each in found.causes.causes],
    }


def _stream(each: Any, now: datetime) -> dict[str, Any]:
    head = each.summary.head
    names = ("event_id", "listener", "event_type")
    return {
        "key": each.key,
        **{name: head and getattr(head, name) for name in names},
        "status": head and Status(head.status).name,
        "age": head and head.first_due_at and round(age(head.first_due_at, now), 3),
        "next_try": each.due_at,
        "backlog": each.summary.backlog,
    }
