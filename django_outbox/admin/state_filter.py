"""The states that people ask for: each is found by an index, at a bounded cost."""

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

NEXT: Final = ("available_at", "event_id")  # the earliest due time comes first
FIRST: Final = 10_000  # events that one index scan returns, at most
STREAMS: Final = 200  # blocked streams whose events are shown
OF_EACH: Final = 50  # events of one blocked stream that are shown

Span = tuple[str | None, str | None]  # the least and the greatest id, both included


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of an index scan; the ids are in the order of the list if ``is_sorted``."""

    ids: list[str]
    is_all: bool = True  # False: there may be more
    is_sorted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state of events that the list's filter offers."""

    label: Any  # lazily translated
    where: Q | IsDead  # condition that the events found must still meet
    look: Callable[[str, Span], Found] | None  # takes a database alias; None: no index exists
    ordering: tuple[str, ...] = ("-event_id",)


def _due(alias: str, span: Span) -> Found:
    return _found([*_events(alias).due().values_list("pk", flat=True)[: FIRST + 1]])


def look_later(alias: str, span: Span) -> Found:
    return _next(alias, lambda status, owner, since: owner is None)


def _leased(alias: str, span: Span) -> Found:
    return _next(alias, lambda status, owner, since: owner is not None)


def _scheduled(alias: str, span: Span) -> Found:
    return _next(alias, lambda *held: held == (Status.NEW, None, None))


def _retrying(alias: str, span: Span) -> Found:
    return _next(alias, lambda *held: held == (Status.RETRY, None, None))


def _paused(alias: str, span: Span) -> Found:
    return _next(alias, lambda status, owner, since: owner is None and since is not None)


def _next(alias: str, is_meant: Callable[[int, Any, Any], bool]) -> Found:
    """Scan by next due time; leases end soon, so leased events are among the first."""
    later = _events(alias).filter(available_at__gt=DatabaseNow()).order_by(*NEXT)
    rows = [*later.values_list("pk", "status", "locked_by", "locked_at")[: FIRST + 1]]
    ids = [pk for pk, *held in rows[:FIRST] if is_meant(*held)]
    return Found(ids=ids, is_all=len(rows) <= FIRST)


def look_dead(alias: str, span: Span) -> Found:
    connection = connections[alias]
    return _found(dialect_of(connection).dead(connection, span=span, most=FIRST + 1))


def _blocked(alias: str, span: Span) -> Found:
    """Look at the first events of the streams that were blocked first."""
    connection = connections[alias]
    blocked = OutboxStream.objects.using(alias).blocked().order_by("due_at", "pk")
    keys = [*blocked.values_list("pk", flat=True)[: STREAMS + 1]]
    dialect = dialect_of(connection)
    ids = dialect.waiting(connection, keys=keys[:STREAMS], most=OF_EACH) if keys else []
    return Found(ids=ids, is_all=len(keys) <= STREAMS and len(ids) < OF_EACH, is_sorted=False)


def _found(ids: list[str]) -> Found:
    return Found(ids=ids[:FIRST], is_all=len(ids) <= FIRST)


def _events(alias: str) -> Any:
    return OutboxEvent.objects.using(alias)


FREE: Final = Q(locked_by=None, locked_at=None)

STATES: Final = {
    "due": State(
        label=_("Due"), where=Q(available_at__lte=DatabaseNow()), look=_due, ordering=NEXT
    ),
    "leased": State(label=_("Leased"), where=~Q(locked_by=None), look=_leased, ordering=NEXT),
    "scheduled": State(
        label=_("Scheduled"), where=FREE & Q(status=Status.NEW), look=_scheduled, ordering=NEXT
    ),
    "retrying": State(
        label=_("Retrying"), where=FREE & Q(status=Status.RETRY), look=_retrying, ordering=NEXT
    ),
    "paused": State(label=_("Paused"), where=POSTPONED, look=_paused, ordering=NEXT),
    "blocked": State(
        label=_("Blocked by their key"),
        where=Q(status__in=UNSETTLED),
        look=_blocked,
        ordering=("key", "seq"),
    ),
    "dead": State(label=_("Dead"), where=IsDead("status"), look=look_dead),
    "done": State(label=_("Done"), where=Q(status=Status.DONE), look=None),
}
