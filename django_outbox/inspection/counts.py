"""Numbers of events by status: counted if an index allows it, otherwise estimated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from django.db import connections
from django.db.models import Count, Q

from ..listeners.outcomes import UNSETTLED, Status
from ..models import OutboxEvent, OutboxQuerySet, OutboxStream
from ..models.fields import IsIndexed
from ..sql import dialect_of

MAX_EXACT_COUNT: Final = 100_000  # events; a table up to this size is counted in full
MAX_PENDING: Final = 100_000  # pending events with a key, and as many without, that an index counts
MAX_DEAD: Final = 10_000  # dead events that an index finds, at most
MAX_STREAMS: Final = 1000  # streams whose events are counted if partial indexes are not supported


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of events, by the name of their status."""

    numbers: dict[str, int]
    dead: tuple[str, ...]  # ids, newest first, MAX_DEAD at most
    at_least: tuple[str, ...] = ()  # statuses whose count stopped at a limit
    estimated: tuple[str, ...] = ()  # statuses estimated from the database's statistics


def counts(alias: str) -> Counts:
    """Count events at a cost that does not grow with the table."""
    connection = connections[alias]
    dialect = dialect_of(connection)
    dead = tuple(dialect.dead(connection, span=(None, None), most=MAX_DEAD + 1))
    rows, newest = dialect.estimated_rows(connection), dict[str, int]()
    if rows <= MAX_EXACT_COUNT:
        newest = OutboxEvent.objects.using(alias).newest(MAX_EXACT_COUNT + 1).counts_by_status()
        if sum(newest.values()) <= MAX_EXACT_COUNT:
            return Counts(numbers=newest, dead=dead[:MAX_DEAD])
    pending, capped = _pending(alias)
    numbers = {each.name: pending[each] for each in Status}
    numbers["DEAD"] = min(len(dead), MAX_DEAD)
    at_least = [each.name for each in Status if each in capped]
    if len(dead) > MAX_DEAD:
        at_least.append("DEAD")
    estimated = ["DONE"]
    if newest:  # there are more rows than the statistics say
        numbers["DONE"] = newest["DONE"]
        at_least, estimated = [*at_least, "DONE"], []
    else:
        numbers["DONE"] = max(rows - sum(numbers.values()), 0)
    return Counts(
        numbers=numbers, dead=dead[:MAX_DEAD], at_least=(*at_least,), estimated=(*estimated,)
    )


def _pending(alias: str) -> tuple[Counter[Status], set[Status]]:
    """Count new and retried events; return also the statuses whose count stopped at a limit."""
    found: Counter[Status] = Counter()
    capped = set[Status]()
    for query in _pending_queries(alias):
        by_status = (
            Count("pk", filter=Q(status=Status.NEW)),
            Count("pk", filter=Q(status=Status.RETRY)),
        )
        answer: dict[str, Any] = query[:MAX_PENDING].aggregate(
            total=Count("pk"), new=by_status[0], retry=by_status[1]
        )
        found[Status.NEW] += answer["new"]
        found[Status.RETRY] += answer["retry"]
        if answer["total"] == MAX_PENDING:
            capped.update(UNSETTLED)
    return found, capped


def _pending_queries(alias: str) -> Iterator[OutboxQuerySet]:
    """Yield the pending events without a key, then those with one.

    An event without a key has a due time of its own; for one with a key the stream has it.
    """
    events = OutboxEvent.objects.using(alias)
    yield events.filter(available_at__isnull=False).order_by("available_at", "event_id")
    if connections[alias].features.supports_partial_indexes:
        keyed = events.filter(IsIndexed("status"), key__isnull=False)
    else:
        streams = OutboxStream.objects.using(alias).streams_only().filter(due_at__isnull=False)
        keys = streams.order_by("due_at").values_list("pk", flat=True)[:MAX_STREAMS]
        keyed = events.filter(IsIndexed("status"), key__in=[*keys])
    yield keyed.order_by("key", "seq")
