"""Filters of the list: state, event type, listener, queue, and time written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
BY_DUE_TIME: Final = ("available_at", "id")  # the earliest due time comes first
NEWEST: Final = ("-id",)
WAITING: Final = Q(available_at__gt=DatabaseNow(), locked_by=None)


class State(NamedTuple):
    """A state of rows that a list's filter offers; an index finds each of them."""

    label: Any  # lazily translated
    of: Callable[[Any], Any]  # selects the rows in it
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


def _within(**length: int) -> Callable[[OutboxQuerySet], OutboxQuerySet]:
    """Return what selects the events written in such a time: a range of the ids, which have it."""

    def select(rows: OutboxQuerySet) -> OutboxQuerySet:
        return rows.filter(pk__gte=least_id(datetime.now(timezone.utc) - timedelta(**length)))

    return select


PERIODS: Final = {
    "hour": State(_("Last hour"), _within(hours=1)),
    "day": State(_("Last 24 hours"), _within(days=1)),
    "week": State(_("Last 7 days"), _within(days=7)),
    "month": State(_("Last 30 days"), _within(days=30)),
}


class Filter(admin.SimpleListFilter):
    """Filter that lists nothing for a value that it does not know, and says so."""

    states: Mapping[str, State] = {}  # by value; empty: the values of the column

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, Any]]:
        return [(name, state.label) for name, state in self.states.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        if value is None:
            return queryset
        if "\0" in value:  # PostgreSQL rejects NUL
            raise IncorrectLookupParameters(self.parameter_name)
        try:
            select = self.states[value].of if self.states else None
        except KeyError as error:
            raise IncorrectLookupParameters(self.parameter_name) from error
        return select(queryset) if select else queryset.filter((self.parameter_name, value))

    def offered(self, names: set[str]) -> list[tuple[str, str]]:
        """Return names to choose from, with the chosen one; none if there is only one."""
        every = sorted(names | ({chosen} if (chosen := self.value()) else set()))
        return [(each, each) for each in every] if len(every) > 1 else []


class StateFilter(Filter):
    """Filter by state."""

    title = _("state")
    parameter_name = "state"
    states = STATES


class WrittenFilter(Filter):
    """Filter by the time written."""

    title = _("written")
    parameter_name = "written"
    states = PERIODS


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
