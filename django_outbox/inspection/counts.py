"""Numbers of events by status, and of those that ended lately.

All are counted as far as an index allows it; otherwise they are estimated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import connections
from django.db.models import Count, Q, QuerySet, Sum

from ..listeners.outcomes import UNSETTLED, Status
from ..models import OutboxEvent, OutboxQuerySet, OutboxStatistics, OutboxStream
from ..models.fields import IsIndexed
from ..models.queryset import by_death
from ..sql import dialect_of

MAX_EXACT_COUNT: Final = 100_000  # events; a table up to this size is counted in full
MAX_PENDING: Final = 100_000  # pending events with a key, and as many without, that an index counts
PERIOD: Final = 300  # seconds
MAX_DEAD_SHARE: Final = 0.1  # of the events that ended
MAX_LAG: Final = 60.0  # seconds that the oldest due event has waited
COUNT_LIMIT: Final = 10_000  # leased and blocked rows that are counted
MAX_STREAMS: Final = 1000  # streams whose events are counted if partial indexes are not supported


class AtLeast(int):
    """A count that stopped at its limit, or a sum with one, which people see as ``10,000+``."""

    def __str__(self) -> str:
        return f"{int(self):,}+"

    def __add__(self, other: int) -> AtLeast:
        return AtLeast(int(self) + int(other))

    __radd__ = __add__


def limited(count: int, limit: int) -> int:
    """Return a count of rows of which no more than ``limit`` were counted."""
    return AtLeast(count) if count >= limit else count


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of events, by the name of their status."""

    numbers: dict[str, int]
    estimated: tuple[str, ...] = ()  # statuses estimated from the database's statistics

    @property
    def at_least(self) -> list[str]:
        """Return the statuses whose count stopped at a limit."""
        return [name for name, each in self.numbers.items() if isinstance(each, AtLeast)]


def counts(alias: str) -> Counts:
    """Count events at a cost that does not grow with the table."""
    events, done = OutboxEvent.objects.using(alias), None
    rows = dialect_of(connections[alias]).estimated_rows()
    if rows <= MAX_EXACT_COUNT:
        newest = events.newest(MAX_EXACT_COUNT + 1).counts_by_status()
        if sum(newest.values()) <= MAX_EXACT_COUNT:
            return Counts(numbers=newest)
        done = AtLeast(newest["DONE"])  # there are more rows than the statistics say
    found = {**_pending(alias), "DEAD": by_death(events).count()}
    found["DONE"] = max(rows - sum(found.values()), 0) if done is None else done
    numbers = {each.name: found.get(each.name, 0) for each in Status}
    return Counts(numbers=numbers, estimated=("DONE",) if done is None else ())


def _pending(alias: str) -> dict[str, int]:
    """Count new and retried events."""
    found, count = Counter[str](), int
    by_status = {Status(each).name: Count("pk", filter=Q(status=each)) for each in UNSETTLED}
    for query in _pending_queries(alias):
        answer: dict[str, Any] = query[:MAX_PENDING].aggregate(**by_status)
        found.update(answer)
        count = AtLeast if sum(answer.values()) == MAX_PENDING else count
    return {name: count(number) for name, number in found.items()}


def _pending_queries(alias: str) -> Iterator[OutboxQuerySet]:
    """Yield the pending events without a key, then those with one.

    An event without a key has a due time of its own; for one with a key the stream has it.
    """
    events = OutboxEvent.objects.using(alias)
    yield events.filter(available_at__isnull=False).order_by("available_at", "id")
    if connections[alias].features.supports_partial_indexes:
        keyed = events.filter(IsIndexed("status"), stream__isnull=False, available_at=None)
    else:
        streams = OutboxStream.objects.using(alias).filter(due_at__isnull=False)
        names = streams.order_by("due_at").values_list("pk", flat=True)[:MAX_STREAMS]
        keyed = events.filter(IsIndexed("status"), stream__in=[*names])
    yield keyed.order_by("stream", "seq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Counts of the last ``PERIOD`` seconds, of all event types and workers."""

    done: int = 0
    retry: int = 0  # executions that failed and will be repeated
    dead: int = 0
    rescued: int = 0  # events that lost workers had leased

    @property
    def dead_share(self) -> float:
        """Return which share of the events that ended are dead, from 0 to 1."""
        return self.dead / (self.done + self.dead) if self.dead else 0.0

    @property
    def is_stalled(self) -> bool:
        """Return whether executions fail, and no event is done."""
        return bool(self.retry) and not self.done


def minutes(alias: str, since: datetime) -> list[dict[str, Any]]:
    """Return the counts of each minute since then, of all event types and workers."""
    rows: Any = OutboxStatistics.objects.using(alias).since(since).values("started_at")
    sums = {name: Sum(name) for name in Rates.__dataclass_fields__}
    return [*rows.annotate(**sums).order_by("started_at")]


def rates(points: Sequence[dict[str, Any]], now: datetime) -> Rates:
    """Return the rates of the last minutes from the counts of ``minutes``."""
    since = now - timedelta(seconds=PERIOD)
    recent = [each for each in points if each["started_at"] >= since]
    return Rates(
        **{name: sum(each[name] for each in recent) for name in Rates.__dataclass_fields__}
    )


def capped_count(rows: QuerySet[Any]) -> int:
    """Count rows, at most ``COUNT_LIMIT``."""
    return limited(rows[:COUNT_LIMIT].count(), COUNT_LIMIT)
