"""Filters of the list: state, event type, listener, queue, time written, and the newest id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, Final

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..conf import current
from ..events import least_id
from ..listeners import registry
from .state_filter import STATES

TYPES_SCAN_LIMIT: Final = 1000  # newest events whose types the filter offers
UP_TO: Final = "up_to"  # URL parameter: the id of the newest event to search
CAUSE: Final = "cause"  # URL parameter: the digest of a cause
PERIODS: Final = {
    "hour": (_("Last hour"), timedelta(hours=1)),
    "day": (_("Last 24 hours"), timedelta(days=1)),
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
            return queryset.filter(self.condition(value))
        except KeyError as error:
            raise IncorrectLookupParameters(self.parameter_name) from error

    def condition(self, value: str) -> Any:
        """Return the condition of a value; raise ``KeyError`` if it is unknown."""
        return Q((self.parameter_name, value))


class StateFilter(Filter):
    """Filter by state; ``EventList`` finds the events of a state with its own index scan."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, state.label) for name, state in STATES.items()]

    def condition(self, value: str) -> Any:
        return STATES[value].where


class WrittenFilter(Filter):
    """Filter by the time written: a range of the ids, which contain it."""

    title = _("written")
    parameter_name = "written"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, label) for name, (label, _length) in PERIODS.items()]

    def condition(self, value: str) -> Any:
        return Q(pk__gte=least_id(datetime.now(timezone.utc) - PERIODS[value][1]))


class UpToFilter(Filter):
    """Invisible filter that accepts ``up_to``, the parameter of the link to older events."""

    title = ""
    parameter_name = UP_TO

    def has_output(self) -> bool:
        return self.value() is not None  # Django applies only filters that have output

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        return iter(())

    def condition(self, value: str) -> Any:
        return Q(pk__lte=value)


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
        if chosen := self.value():
            types.add(chosen)
        return [(each, each) for each in sorted(types)]


class ListenerFilter(Filter):
    """Filter by the titles of the listeners that this process has, if there are several."""

    title = _("listener")
    parameter_name = "listener"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        titles = {each.title for each in registry.listeners()}
        if chosen := self.value():
            titles.add(chosen)
        return [(each, each) for each in sorted(titles)] if len(titles) > 1 else []


class QueueFilter(Filter):
    """Filter by the configured queues, if there are several."""

    title = _("queue")
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        names = [*current().queues]
        if (chosen := self.value()) and chosen not in names:
            names.append(chosen)
        return [(each, each) for each in names] if len(names) > 1 else []
