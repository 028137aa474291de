"""Filters of the event list by state, by event type, and by the id of the newest event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..listeners import registry
from .state_filter import STATES

TYPES_SCAN_LIMIT: Final = 1000  # newest events whose types the filter offers
UP_TO: Final = "up_to"  # URL parameter: the id of the newest event to search


class StateFilter(admin.SimpleListFilter):
    """Filter by state; ``EventList`` finds the events of a state with its own index scan."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, state.label) for name, state in STATES.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        name = self.value()
        if name is None:
            return queryset
        if name not in STATES:
            raise IncorrectLookupParameters(self.parameter_name)
        return queryset.filter(STATES[name].where)


class UpToFilter(admin.SimpleListFilter):
    """Invisible filter that accepts ``up_to``, the parameter of the link to older events."""

    title = ""
    parameter_name = UP_TO

    def has_output(self) -> bool:
        return self.value() is not None  # Django applies only filters that have output

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return []

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        return iter(())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if "\0" in (self.value() or ""):  # PostgreSQL rejects NUL
            raise IncorrectLookupParameters(self.parameter_name)
        return queryset


class EventTypeFilter(admin.SimpleListFilter):
    """Event types that have a listener here, and those of recent events.

    A DISTINCT would scan the whole table for every page.
    """

    title = _("event type")
    parameter_name = "event_type"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        newest = model_admin.get_queryset(request).order_by("-pk")
        types = set(newest.values_list("event_type", flat=True)[:TYPES_SCAN_LIMIT])
        types |= {each.event_type for each in registry.listeners() if "*" not in each.event_type}
        if chosen := self.value():
            types.add(chosen)
        return [(each, each) for each in sorted(types)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        if chosen is None:
            return queryset
        if "\0" in chosen:  # PostgreSQL rejects NUL
            raise IncorrectLookupParameters("event_type")
        return queryset.filter(event_type=chosen)
