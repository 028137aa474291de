"""The list of events, at a bounded cost however large the table is."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Final

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from .. import registry

LIMIT: Final = 10_000  # events that the list counts, and that one action takes, at most
RECENT: Final = 1000  # newest events whose types the filter offers
LONG: Final = ("payload", "headers", "result", "progress")  # columns that no list shows


class EventList(ChangeList):
    """A page of events without their long texts: fifty payloads may be as many MiB."""

    def get_queryset(self, request: HttpRequest, *args: Any, **options: Any) -> QuerySet[Any]:
        return super().get_queryset(request, *args, **options).defer(*LONG)

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        if self.paginator.few is not None:
            self.result_list = self.paginator.few


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts up to LIMIT and no further; the list says so."""

    @cached_property
    def few(self) -> list[Any] | None:
        """All rows, if they fit on a page: the search for a rare one then reads the table once."""
        rows = list(self.object_list[: self.per_page + 1])
        return rows if len(rows) <= self.per_page else None

    @cached_property
    def count(self) -> int:
        return min(self._counted, LIMIT)

    @property
    def is_capped(self) -> bool:
        return self._counted > LIMIT

    @cached_property
    def _counted(self) -> int:
        if self.few is not None:
            return len(self.few)
        rows: QuerySet[Any] = self.object_list  # type: ignore[assignment]
        return rows.order_by()[: LIMIT + 1].count()


class EventTypeFilter(admin.SimpleListFilter):
    """The types that somebody listens to and those of recent events.

    A DISTINCT would read the whole table for every page.
    """

    title = _("event type")
    parameter_name = "event_type"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        newest = model_admin.get_queryset(request).order_by("-pk")
        types = set(newest.values_list("event_type", flat=True)[:RECENT])
        types |= {each.event_type for each in registry.listeners() if "*" not in each.event_type}
        if chosen := self.value():
            types.add(chosen)
        return [(each, each) for each in sorted(types)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        if chosen is None:
            return queryset
        if "\0" in chosen:  # PostgreSQL refuses it
            raise IncorrectLookupParameters("event_type")
        return queryset.filter(event_type=chosen)
