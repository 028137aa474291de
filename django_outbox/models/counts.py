"""How many events there are by status: counted where an index tells it, else estimated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from django.db import connections
from django.db.models import Count, Q

from .. import dialects
from ..dialects.fields import IsIndexed
from ..outcomes import UNSETTLED, Status
from . import OutboxEvent, OutboxQuerySet, OutboxStream

EXACT: Final = 100_000  # events up to which the whole table is counted
MOST: Final = 100_000  # pending events that are counted by an index, with and without a key
DEAD: Final = 10_000  # dead events that are found by an index
STREAMS: Final = 1000  # streams whose events are counted where no index has the pending ones alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of events by the name of their status."""

    numbers: dict[str, int]
    dead: tuple[str, ...]  # ids, newest first, DEAD at most
    at_least: tuple[str, ...] = ()  # of these there may be more: the count was ended
    estimated: tuple[str, ...] = ()  # of these the database only keeps statistics


def counts(alias: str) -> Counts:
    """Count events at a cost that does not grow with the table."""
    connection = connections[alias]
    dialect = dialects.of(connection)
    found = tuple(dialect.dead(connection, span=(None, None), most=DEAD + 1))
    rows, newest = dialect.estimated_rows(connection), dict[str, int]()
    if rows <= EXACT:
        newest = OutboxEvent.objects.using(alias).newest(EXACT + 1).counts_by_status()
        if sum(newest.values()) <= EXACT:
            return Counts(numbers=newest, dead=found[:DEAD])
    pending, ended = _pending(alias)
    numbers = {each.name: pending[each] for each in Status}
    numbers["DEAD"] = min(len(found), DEAD)
    at_least = [each.name for each in Status if each in ended]
    if len(found) > DEAD:
        at_least.append("DEAD")
    estimated = ["DONE"]
    if newest:  # there are more than the statistics know of
        numbers["DONE"] = newest["DONE"]
        at_least, estimated = [*at_least, "DONE"], []
    else:
        numbers["DONE"] = max(rows - sum(numbers.values()), 0)
    return Counts(
        numbers=numbers, dead=found[:DEAD], at_least=(*at_least,), estimated=(*estimated,)
    )


def _pending(alias: str) -> tuple[Counter[Status], set[Status]]:
    """Count new and retried events; return for which of them the count was ended, too."""
    found: Counter[Status] = Counter()
    ended = set[Status]()
    for look in _looks(alias):
        each = Count("pk", filter=Q(status=Status.NEW)), Count("pk", filter=Q(status=Status.RETRY))
        answer: dict[str, Any] = look[:MOST].aggregate(
            every=Count("pk"), new=each[0], retry=each[1]
        )
        found[Status.NEW] += answer["new"]
        found[Status.RETRY] += answer["retry"]
        if answer["every"] == MOST:
            ended.update(UNSETTLED)
    return found, ended


def _looks(alias: str) -> Iterator[OutboxQuerySet]:
    """Those without a key are due one day; of those with one, the stream is."""
    events = OutboxEvent.objects.using(alias)
    yield events.filter(available_at__isnull=False).order_by("available_at", "event_id")
    if connections[alias].features.supports_partial_indexes:
        keyed = events.filter(IsIndexed("status"), key__isnull=False)
    else:
        streams = OutboxStream.objects.using(alias).real().filter(due_at__isnull=False)
        keys = streams.order_by("due_at").values_list("pk", flat=True)[:STREAMS]
        keyed = events.filter(IsIndexed("status"), key__in=[*keys])
    yield keyed.order_by("key", "seq")
