"""States that the event list can show; an index finds each but "done", at a bounded cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from django.db import connections
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from ..listeners.outcomes import UNSETTLED, Status
from ..models import OutboxQuerySet, OutboxStream
from ..models.fields import DatabaseNow, IsDead
from ..models.pause_queryset import LEASED, in_held_queue
from ..sql import dialect_of

BY_DUE_TIME: Final = ("available_at", "id")  # the earliest due time comes first
DUE: Final = Q(available_at__lte=DatabaseNow())
SCAN_LIMIT: Final = 10_000  # events that a search by due time covers
DEAD_LIMIT: Final = 100_000  # dead events that a search covers
MAX_BLOCKED_STREAMS: Final = 100  # blocked streams whose events are shown
MAX_EVENTS_PER_STREAM: Final = 20  # events of one blocked stream that are shown

Span = tuple[str | None, str | None]  # the least and the greatest id, both included
Rows = OutboxQuerySet  # all events of a database, or those of one queue


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """The events that a bounded search by an index covers."""

    where: Q  # their condition; they need not be in the state
    scanned: int = 0  # the bound, if there are more
    is_all: bool = True  # False: there may be more
    next_id: str | None = None  # id at which the search can be continued, if it is by id


Scan = Callable[[Rows, Span], ScanResult]


def _scan_due(rows: Rows, span: Span) -> ScanResult:
    return _up_to_limit(rows.filter(DUE).order_by(*BY_DUE_TIME), DUE)


def scan_due_later(rows: Rows, span: Span) -> ScanResult:
    """Search by next due time; leases end soon, so leased events are among the first."""
    later = Q(available_at__gt=DatabaseNow())
    return _up_to_limit(rows.filter(later).order_by(*BY_DUE_TIME), later)


def _up_to_limit(rows: Rows, where: Q) -> ScanResult:
    """Bound a search in the order of due times by the first event that is left out."""
    left_out = rows.values_list("available_at", "pk")[SCAN_LIMIT : SCAN_LIMIT + 1]
    for at, pk in left_out:
        before = Q(available_at__lt=at) | Q(pk__lt=pk)  # many may be due at the same time
        return ScanResult(
            where=where & Q(available_at__lte=at) & before, scanned=SCAN_LIMIT, is_all=False
        )
    return ScanResult(where=where)


def scan_dead(rows: Rows, span: Span) -> ScanResult:
    connection = connections[rows.db]
    condition, count, next_id = dialect_of(connection).dead_condition(span=span, most=DEAD_LIMIT)
    if next_id is None:
        return ScanResult(where=Q(condition))
    return ScanResult(
        where=Q(condition, pk__gt=next_id), scanned=count, is_all=False, next_id=next_id
    )


def _scan_blocked(rows: Rows, span: Span) -> ScanResult:
    """Search the first events of blocked streams; take the streams by their next try."""
    connection = connections[rows.db]
    blocked = OutboxStream.objects.using(rows.db).blocked().order_by("due_at", "pk")
    keys = [*blocked.values_list("pk", flat=True)[: MAX_BLOCKED_STREAMS + 1]]
    chosen, dialect = keys[:MAX_BLOCKED_STREAMS], dialect_of(connection)
    ids = dialect.waiting(streams=chosen, most=MAX_EVENTS_PER_STREAM) if keys else []
    is_all = len(keys) <= MAX_BLOCKED_STREAMS and len(ids) < MAX_EVENTS_PER_STREAM
    return ScanResult(where=Q(pk__in=ids), scanned=len(ids), is_all=is_all)


@dataclass(frozen=True, slots=True)
class State:
    """A state of events that the list's filter offers."""

    label: Any  # lazily translated
    where: Q | IsDead  # condition of the state
    scan: Scan | None = scan_due_later  # None: no index exists
    ordering: tuple[str, ...] = BY_DUE_TIME


WAITING: Final = Q(available_at__gt=DatabaseNow(), locked_by=None)

STATES: Final = {
    "due": State(_("Due"), DUE & ~in_held_queue(), _scan_due),
    "leased": State(_("Leased"), LEASED),
    "scheduled": State(_("Scheduled"), WAITING & Q(status=Status.NEW)),
    "retrying": State(_("Retrying"), WAITING & Q(status=Status.RETRY)),
    "paused": State(_("Paused"), DUE & in_held_queue(), _scan_due),
    "blocked": State(
        _("Blocked by their key"), Q(status__in=UNSETTLED), _scan_blocked, ("stream", "seq")
    ),
    "dead": State(_("Dead"), IsDead("status"), scan_dead, ("-id",)),
    "done": State(_("Done"), Q(status=Status.DONE), None, ("-id",)),
}
