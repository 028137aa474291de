"""Filters of the list: state, event type, listener, queue, and time written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, Final, NamedTuple

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..conf import current
from ..events import least_id
from ..listeners import registry
from ..listeners.outcomes import Status
from ..models import OutboxQuerySet, OutboxStream
from ..models.fields import DatabaseNow, IsIndexed
from ..models.pause_queryset import in_held_queue

TYPES_SCAN_LIMIT: Final = 1000  # newest events whose types the filter offers
BLOCKED_LIMIT: Final = 1000  # blocked streams whose events are listed, the next to be tried first
CAUSE: Final = "cause"  # URL parameter: the digest of a cause
PERIODS: Final = {
    "hour": (_("Last hour"), timedelta(hours=1)),
    "day": (_("Last 24 hours"), timedelta(days=1)),
    "week": (_("Last 7 days"), timedelta(days=7)),
    "month": (_("Last 30 days"), timedelta(days=30)),
}
BY_DUE_TIME: Final = ("available_at", "id")  # the earliest due time comes first
NEWEST: Final = ("-id",)
WAITING: Final = Q(available_at__gt=DatabaseNow(), locked_by=None)


class State(NamedTuple):
    """A state of events that the list's filter offers; an index finds each of them."""

    label: Any  # lazily translated
    of: Callable[[OutboxQuerySet], OutboxQuerySet]  # selects the events in it
    ordering: tuple[str, ...] = BY_DUE_TIME


def _paused(rows: OutboxQuerySet) -> OutboxQuerySet:
    return rows.filter(in_held_queue(), available_at__lte=DatabaseNow())


def _blocked(rows: OutboxQuerySet) -> OutboxQuerySet:
    blocked = OutboxStream.objects.using(rows.db).blocked().values_list("pk", flat=True)
    # By their names: MariaDB reads the whole table for a subquery that has them.
    names = [*blocked.order_by("due_at", "pk")[:BLOCKED_LIMIT]]
    return rows.pending().filter(IsIndexed("status"), stream__in=names)


STATES: Final = {
    "due": State(_("Due"), OutboxQuerySet.due),
    "leased": State(_("Leased"), OutboxQuerySet.leased),
    "scheduled": State(_("Scheduled"), lambda rows: rows.filter(WAITING, status=Status.NEW)),
    "retrying": State(_("Retrying"), lambda rows: rows.filter(WAITING, status=Status.RETRY)),
    "paused": State(_("Held by a pause or a breaker"), _paused),
    "blocked": State(_("Blocked by their key"), _blocked, ("stream", "seq")),
    "dead": State(_("Dead"), OutboxQuerySet.dead, NEWEST),
    "done": State(_("Done"), OutboxQuerySet.done, NEWEST),
}


class Filter(admin.SimpleListFilter):
    """Filter that lists nothing for a value that it does not know, and says so."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, Any]]:
        return []

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        if value is None:
            return queryset
        if "\0" in value:  # PostgreSQL rejects NUL
            raise IncorrectLookupParameters(self.parameter_name)
        try:
            rows: QuerySet[Any] = self.filtered(queryset, value)
            return rows
        except KeyError as error:
            raise IncorrectLookupParameters(self.parameter_name) from error

    def filtered(self, rows: Any, value: str) -> Any:
        """Return the rows with a value; raise ``KeyError`` if it is unknown."""
        return rows.filter((self.parameter_name, value))

    def offered(self, names: set[str]) -> list[tuple[str, str]]:
        """Return names to choose from, with the chosen one; none if there is only one."""
        every = sorted(names | ({chosen} if (chosen := self.value()) else set()))
        return [(each, each) for each in every] if len(every) > 1 else []


class StateFilter(Filter):
    """Filter by state."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, state.label) for name, state in STATES.items()]

    def filtered(self, rows: Any, value: str) -> Any:
        return STATES[value].of(rows).order_by()


class WrittenFilter(Filter):
    """Filter by the time written: a range of the ids, which contain it."""

    title = _("written")
    parameter_name = "written"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, label) for name, (label, _length) in PERIODS.items()]

    def filtered(self, rows: Any, value: str) -> Any:
        return rows.filter(pk__gte=least_id(datetime.now(timezone.utc) - PERIODS[value][1]))


class EventTypeFilter(Filter):
    """Event types that have a listener here, and those of recent events.

    A DISTINCT would scan the whole table for every page.
    """

    title = _("event type")
    parameter_name = "event_type"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        newest = model_admin.get_queryset(request).order_by("-pk")
        types = set(newest.values_list("event_type", flat=True)[:TYPES_SCAN_LIMIT])
        types |= {each.event_type for each in registry.listeners() if "*" not in each.event_type}
        return self.offered(types)


class ListenerFilter(Filter):
    """Filter by the titles of the listeners that this process has, if there are several."""

    title = _("listener")
    parameter_name = "listener"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        return self.offered({each.title for each in registry.listeners()})


class QueueFilter(Filter):
    """Filter by the configured queues, if there are several."""

    title = _("queue")
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        return self.offered({*current().queues})
