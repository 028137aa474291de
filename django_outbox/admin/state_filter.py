"""States that the event list can show; an index scan finds each but "done", at a bounded cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from django.db import connections
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from ..listeners.outcomes import UNSETTLED, Status
from ..models import OutboxEvent, OutboxStream
from ..models.fields import DatabaseNow, IsDead
from ..models.pause_queryset import POSTPONED
from ..sql import dialect_of

BY_DUE_TIME: Final = ("available_at", "event_id")  # the earliest due time comes first
SCAN_LIMIT: Final = 10_000  # events that one index scan returns, at most
MAX_BLOCKED_STREAMS: Final = 200  # blocked streams whose events are shown
MAX_EVENTS_PER_STREAM: Final = 50  # events of one blocked stream that are shown

Span = tuple[str | None, str | None]  # the least and the greatest id, both included


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """Result of an index scan; the ids are in the order of the list if ``is_sorted``."""

    ids: list[str]
    is_all: bool = True  # False: there may be more
    is_sorted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state of events that the list's filter offers."""

    label: Any  # lazily translated
    where: Q | IsDead  # condition that the scanned events must also meet
    scan: Callable[[str, Span], ScanResult] | None  # takes a database alias; None: no index exists
    ordering: tuple[str, ...] = ("-event_id",)


def _scan_due(alias: str, span: Span) -> ScanResult:
    return _first([*_events(alias).due().values_list("pk", flat=True)[: SCAN_LIMIT + 1]])


def scan_due_later(alias: str, span: Span) -> ScanResult:
    return _scan_by_due_time(alias, lambda status, owner, since: owner is None)


def _scan_leased(alias: str, span: Span) -> ScanResult:
    return _scan_by_due_time(alias, lambda status, owner, since: owner is not None)


def _scan_scheduled(alias: str, span: Span) -> ScanResult:
    return _scan_by_due_time(alias, lambda *columns: columns == (Status.NEW, None, None))


def _scan_retrying(alias: str, span: Span) -> ScanResult:
    return _scan_by_due_time(alias, lambda *columns: columns == (Status.RETRY, None, None))


def _scan_paused(alias: str, span: Span) -> ScanResult:
    return _scan_by_due_time(
        alias, lambda status, owner, since: owner is None and since is not None
    )


def _scan_by_due_time(alias: str, matches: Callable[[int, Any, Any], bool]) -> ScanResult:
    """Scan by next due time; leases end soon, so leased events are among the first."""
    later = _events(alias).filter(available_at__gt=DatabaseNow()).order_by(*BY_DUE_TIME)
    rows = [*later.values_list("pk", "status", "locked_by", "locked_at")[: SCAN_LIMIT + 1]]
    ids = [pk for pk, *columns in rows[:SCAN_LIMIT] if matches(*columns)]
    return ScanResult(ids=ids, is_all=len(rows) <= SCAN_LIMIT)


def scan_dead(alias: str, span: Span) -> ScanResult:
    connection = connections[alias]
    return _first(dialect_of(connection).dead(connection, span=span, most=SCAN_LIMIT + 1))


def _scan_blocked(alias: str, span: Span) -> ScanResult:
    """Return the first events of blocked streams; take the streams by their next try."""
    connection = connections[alias]
    blocked = OutboxStream.objects.using(alias).blocked().order_by("due_at", "pk")
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


def _events(alias: str) -> Any:
    return OutboxEvent.objects.using(alias)


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
    "paused": State(label=_("Paused"), where=POSTPONED, scan=_scan_paused, ordering=BY_DUE_TIME),
    "blocked": State(
        label=_("Blocked by their key"),
        where=Q(status__in=UNSETTLED),
        scan=_scan_blocked,
        ordering=("key", "seq"),
    ),
    "dead": State(label=_("Dead"), where=IsDead("status"), scan=scan_dead),
    "done": State(label=_("Done"), where=Q(status=Status.DONE), scan=None),
}
