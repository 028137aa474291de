"""Admin change lists that read a bounded number of rows, however large the table is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.db import OperationalError, connections
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext

from ..conf import current
from ..inspection.fate import fates_of_rows
from ..models.queryset import by_death
from ..sql import dialect_of
from .list_filters import CAUSE, STATES, StateFilter

T = TypeVar("T")

SCAN_SECONDS: Final = 2.0  # that a list may scan the table for what no index serves
MATCH_LIMIT: Final = 1000  # rows that a list has at most
LONG_TEXTS: Final = ("payload", "headers", "result", "history")  # never in a list
# Lookups that a URL may use on a column, in addition to the filters in the sidebar.
ALLOWED_LOOKUPS: Final = {
    "",
    *"exact in isnull gt gte lt lte contains startswith year month day".split(),
}


def within_time(rows: QuerySet[Any], read: Callable[[], T]) -> T | None:
    """Return what ``read`` reads from the table of these rows; None if that takes too long."""
    try:
        with dialect_of(connections[rows.db]).time_limit(SCAN_SECONDS):
            return read()
    except OperationalError:
        rows.order_by()[:1].exists()  # raises the same, if it is not the time
        return None


class BoundedList(ChangeList):
    """Change list of the first rows that match; it says why if it lists none or not all."""

    problem = ""  # why no row is listed, although some may match
    is_cut = False  # there are more than MATCH_LIMIT
    matching: Any  # all rows that match the filters; may take long to read

    def get_queryset(self, request: HttpRequest, *args: Any, **options: Any) -> Any:
        """Return the rows to list; none of them if a filter or the search is not valid."""
        if "\0" in request.GET.get(SEARCH_VAR, ""):  # PostgreSQL rejects NUL
            return self._nothing(gettext("No row has the character that this search contains."))
        try:
            self.matching = super().get_queryset(request, *args, **options)
        except IncorrectLookupParameters:
            given = ", ".join(
                f"{name}={', '.join(each)}" for name, each in self.filter_params.items()
            )
            text = gettext("Nothing is listed, because this filter is not possible: %s.")
            return self._nothing(text % given)
        first = within_time(self.root_queryset, lambda: self.first(self.matching))
        if first is not None:
            return first
        text = gettext("The search was not finished after %d seconds.") % SCAN_SECONDS
        advice = gettext("Narrow it by the time written, or search for a whole id.")
        return self._nothing(f"{text} {advice}")

    def first(self, matching: Any) -> Any:
        """Return the first rows, by their primary keys: they need not be searched again."""
        ids = [*matching.values_list("pk", flat=True)[: MATCH_LIMIT + 1]]
        self.is_cut = len(ids) > MATCH_LIMIT
        rows = self.root_queryset.filter(pk__in=ids[:MATCH_LIMIT])
        return rows.order_by(*matching.query.order_by)

    def get_results(self, request: HttpRequest) -> None:
        try:
            super().get_results(request)
        except IncorrectLookupParameters:
            text = gettext("There is no page %d of this list.") % self.page_num
            self.queryset, self.page_num = self._nothing(text), 1
            super().get_results(request)

    def _nothing(self, problem: str) -> Any:
        """List no row, and no filters either, because one of them is not valid."""
        self.problem, self.is_cut = problem, False
        self.filter_specs, self.has_filters, self.has_active_filters = [], False, True
        self.clear_all_filters_qs = "?"
        self.matching = self.root_queryset.none()
        return self.matching


class EventList(BoundedList):
    """List of deliveries, without the large columns: fifty payloads may take 50 MiB."""

    state_name = ""
    bulk_links: list[dict[str, Any]]  # to the actions on all that match

    def get_filters(self, request: HttpRequest) -> Any:
        """Reject lookups that guess hidden values letter by letter, or that break the query."""
        hidden = {*LONG_TEXTS, *(("last_error", "cause") if current().REDACT else ())}
        for name in self.get_filters_params():
            column, _sep, lookup = name.partition("__")
            is_probe = column in hidden and name != CAUSE  # which is a digest
            if is_probe or lookup not in ALLOWED_LOOKUPS:
                raise IncorrectLookupParameters(name)
        return super().get_filters(request)

    def get_queryset(self, request: HttpRequest, *args: Any, **options: Any) -> Any:
        self.state_name = request.GET.get(StateFilter.parameter_name, "")
        return super().get_queryset(request, *args, **options).defer(*LONG_TEXTS)

    def first(self, matching: Any) -> Any:
        return super().first(by_death(matching) if self.state_name == "dead" else matching)

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        if self.state_name not in STATES or "o" in self.params:
            return super().get_ordering(request, queryset)
        return [*STATES[self.state_name].ordering]

    def get_results(self, request: HttpRequest) -> None:
        """Give each delivery its fate, with a few queries for all of them."""
        super().get_results(request)
        self.result_list = [*self.result_list]
        fates = fates_of_rows(self.result_list, self.root_queryset.db)
        for each, fate in zip(self.result_list, fates, strict=True):
            each.fate = fate
        admin: Any = self.model_admin
        self.bulk_links = admin.bulk_links(request, self)

    def describe_filters(self) -> list[str]:
        """Describe the active filters to a user who is about to act on all matching events."""
        specs = cast("list[admin.SimpleListFilter]", self.filter_specs)
        texts = [
            f"{each.title}: {choice['display']}"
            for each in specs
            for choice in each.choices(self)
            if choice["selected"] and each.value() is not None
        ]
        names = {each.parameter_name for each in specs}
        others = {name: each for name, each in self.filter_params.items() if name not in names}
        texts += [f"{name}: {', '.join(map(str, each))}" for name, each in others.items()]
        title = gettext("Search")
        return [*texts, f"{title}: {self.query}"] if self.query else texts


class EventSelection(EventList):
    """The events that match the list's filters, for an action on all of them; nothing is shown."""

    def first(self, matching: Any) -> Any:
        return self.root_queryset.none()

    def get_results(self, request: HttpRequest) -> None:
        """Read and count no events."""
