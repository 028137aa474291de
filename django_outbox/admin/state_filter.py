"""States that the event list can show; an index scan finds each but "done", at a bounded cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from django.db import connections
from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _

from ..listeners.outcomes import UNSETTLED, Status
from ..models import OutboxPause, OutboxQuerySet, OutboxStream
from ..models.fields import DatabaseNow, IsDead
from ..models.pause_queryset import POSTPONED
from ..sql import dialect_of
from ..sql.values import CLOSING_KINDS

BY_DUE_TIME: Final = ("available_at", "event_id")  # the earliest due time comes first
SCAN_LIMIT: Final = 10_000  # events that one index scan returns, at most
MAX_BLOCKED_STREAMS: Final = 200  # blocked streams whose events are shown
MAX_EVENTS_PER_STREAM: Final = 50  # events of one blocked stream that are shown

Span = tuple[str | None, str | None]  # the least and the greatest id, both included
Rows = OutboxQuerySet  # all events of a database, or those of one queue


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """Result of an index scan; the ids are in the order of the list if ``is_sorted``."""

    ids: list[str]
    is_all: bool = True  # False: there may be more
    is_sorted: bool = True


Scan = Callable[[Rows, Span], ScanResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state of events that the list's filter offers."""

    label: Any  # lazily translated
    where: Q | IsDead  # condition that the scanned events must also meet
    scan: Scan | None  # None: no index exists
    ordering: tuple[str, ...] = ("-event_id",)


def _scan_due(rows: Rows, span: Span) -> ScanResult:
    return _first([*rows.due().values_list("pk", flat=True)[: SCAN_LIMIT + 1]])


def scan_due_later(rows: Rows, span: Span) -> ScanResult:
    return _scan_by_due_time(rows, lambda status, owner, since: owner is None)


def _scan_leased(rows: Rows, span: Span) -> ScanResult:
    return _scan_by_due_time(rows, lambda status, owner, since: owner is not None)


def _scan_scheduled(rows: Rows, span: Span) -> ScanResult:
    return _scan_by_due_time(rows, lambda *columns: columns == (Status.NEW, None, None))


def _scan_retrying(rows: Rows, span: Span) -> ScanResult:
    return _scan_by_due_time(rows, lambda *columns: columns == (Status.RETRY, None, None))


def _scan_paused(rows: Rows, span: Span) -> ScanResult:
    """Return postponed events, and the due events of closed queues, which are not postponed."""
    postponed = _scan_by_due_time(
        rows, lambda status, owner, since: owner is None and since is not None
    )
    closed = {*closed_queues().using(rows.db)}
    found = [postponed, *(_scan_due(rows.filter(queue=each), span) for each in closed)]
    return ScanResult(
        ids=[pk for each in found for pk in each.ids],
        is_all=all(each.is_all for each in found),
        is_sorted=len(found) == 1,
    )


def _scan_by_due_time(rows: Rows, matches: Callable[[int, Any, Any], bool]) -> ScanResult:
    """Scan by next due time; leases end soon, so leased events are among the first."""
    later = rows.filter(available_at__gt=DatabaseNow()).order_by(*BY_DUE_TIME)
    found = [*later.values_list("pk", "status", "locked_by", "locked_at")[: SCAN_LIMIT + 1]]
    ids = [pk for pk, status, owner, since in found[:SCAN_LIMIT] if matches(status, owner, since)]
    return ScanResult(ids=ids, is_all=len(found) <= SCAN_LIMIT)


def scan_dead(rows: Rows, span: Span) -> ScanResult:
    connection = connections[rows.db]
    return _first(dialect_of(connection).dead(connection, span=span, most=SCAN_LIMIT + 1))


def _scan_blocked(rows: Rows, span: Span) -> ScanResult:
    """Return the first events of blocked streams; take the streams by their next try."""
    connection = connections[rows.db]
    blocked = OutboxStream.objects.using(rows.db).blocked().order_by("due_at", "pk")
    keys = [*blocked.values_list("pk", flat=True)[: MAX_BLOCKED_STREAMS + 1]]
    dialect = dialect_of(connection)
    ids = (
        dialect.waiting(connection, keys=keys[:MAX_BLOCKED_STREAMS], most=MAX_EVENTS_PER_STREAM)
        if keys
        else []
    )
    return ScanResult(
        ids=ids,
        is_all=len(keys) <= MAX_BLOCKED_STREAMS and len(ids) < MAX_EVENTS_PER_STREAM,
        is_sorted=False,
    )


def _first(ids: list[str]) -> ScanResult:
    return ScanResult(ids=ids[:SCAN_LIMIT], is_all=len(ids) <= SCAN_LIMIT)


def closed_queues() -> QuerySet[OutboxPause, str]:
    """Return the names of the queues that are paused, or whose circuit breaker is open."""
    return OutboxPause.objects.filter(kind__in=CLOSING_KINDS).values_list("name", flat=True)


FREE: Final = Q(locked_by=None, locked_at=None)  # neither leased nor postponed by a pause

STATES: Final = {
    "due": State(
        label=_("Due"),
        where=Q(available_at__lte=DatabaseNow()),
        scan=_scan_due,
        ordering=BY_DUE_TIME,
    ),
    "leased": State(
        label=_("Leased"), where=~Q(locked_by=None), scan=_scan_leased, ordering=BY_DUE_TIME
    ),
    "scheduled": State(
        label=_("Scheduled"),
        where=FREE & Q(status=Status.NEW),
        scan=_scan_scheduled,
        ordering=BY_DUE_TIME,
    ),
    "retrying": State(
        label=_("Retrying"),
        where=FREE & Q(status=Status.RETRY),
        scan=_scan_retrying,
        ordering=BY_DUE_TIME,
    ),
    "paused": State(
        label=_("Paused"),
        where=POSTPONED | Q(available_at__lte=DatabaseNow(), queue__in=closed_queues()),
        scan=_scan_paused,
        ordering=BY_DUE_TIME,
    ),
    "blocked": State(
        label=_("Blocked by their key"),
        where=Q(status__in=UNSETTLED),
        scan=_scan_blocked,
        ordering=("key", "seq"),
    ),
    "dead": State(label=_("Dead"), where=IsDead("status"), scan=scan_dead),
    "done": State(label=_("Done"), where=Q(status=Status.DONE), scan=None),
}
