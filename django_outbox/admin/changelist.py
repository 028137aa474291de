"""Admin change list of events, at a bounded cost however large the table is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.core.paginator import Paginator
from django.db import OperationalError, connections
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext

from ..conf import current
from ..models import OutboxEvent, OutboxQuerySet
from ..sql import dialect_of
from .list_filters import CAUSE, UP_TO, QueueFilter, StateFilter
from .state_filter import STATES, Span, State

COUNT_LIMIT: Final = 10_000  # events; the list does not count further
SCAN_SECONDS: Final = 2.0  # that a list may scan the table for filters which no index serves
SCAN_LIMIT: Final = 50_000  # newest events that it scans if that takes longer
MATCH_LIMIT: Final = 1000  # events that such filters list
LONG_TEXTS: Final = ("payload", "headers", "result", "history")  # never in a list
# Lookups that a URL may use on a column, in addition to the filters in the sidebar.
ALLOWED_LOOKUPS: Final = {
    "",
    *"exact in isnull gt gte lt lte contains startswith year month day".split(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Where a search stopped although there may be more events."""

    message: str
    next_id: str | None  # id at which the search can be continued; None: it cannot


class EventList(ChangeList):
    """Change list that does not load the large columns: fifty payloads may take 50 MiB."""

    problem = ""  # why no event is listed, although some may match
    state: State | None = None
    state_name = ""
    truncation: Truncation | None = None
    span: Span = (None, None)
    matching: Any  # all events that match the filters; may take long to read
    scannable: OutboxQuerySet  # all events, or those of the chosen queue, for an index scan

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
        """Return the events to list; none of them if a filter or the search is not valid."""
        if "\0" in request.GET.get(SEARCH_VAR, ""):  # PostgreSQL rejects NUL
            return self._nothing(gettext("No event has the character that this search contains."))
        self.state_name = request.GET.get(StateFilter.parameter_name, "")
        self.state = STATES.get(self.state_name)
        self.span = None, request.GET.get(UP_TO)
        try:
            self.matching = super().get_queryset(request, *args, **options)
        except IncorrectLookupParameters as error:
            return self._nothing(_describe(error, self.filter_params))
        self.scannable = OutboxEvent.objects.using(self.matching.db)
        if queue := request.GET.get(QueueFilter.parameter_name):
            self.scannable = self.scannable.filter(queue=queue)
        return self._bounded().defer(*LONG_TEXTS)

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        if self.state is None or "o" in self.params:
            return super().get_ordering(request, queryset)
        return [*self.state.ordering]

    def get_results(self, request: HttpRequest) -> None:
        try:
            super().get_results(request)
        except IncorrectLookupParameters:
            text = gettext("There is no page %d of this list.") % self.page_num
            self.queryset, self.page_num = self._nothing(text), 1
            super().get_results(request)
        if self.paginator.single_page is not None:
            self.result_list = self.paginator.single_page

    @property
    def older_url(self) -> str:
        """Return the URL of the same list, continued where this search stopped."""
        assert self.truncation is not None
        return self.get_query_string({UP_TO: self.truncation.next_id}, remove=["p"])

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
        return [*texts, *([f"{title}: {self.query}"] if self.query else [])]

    def _nothing(self, problem: str) -> QuerySet[Any]:
        """List no event, and no filters either, because one of them is not valid."""
        self.problem, self.truncation = problem, None
        self.filter_specs, self.has_filters, self.has_active_filters = [], False, True
        self.clear_all_filters_qs = "?"
        self.matching = self.root_queryset.none()
        self.scannable = OutboxEvent.objects.none()
        return self.root_queryset.none()

    def _bounded(self) -> Any:
        """Restrict the query to what a bounded search reads."""
        if self.state is not None and self.state.scan is not None:
            return self._by_index_scan(self.state)
        if not self.matching.query.where:
            return self.matching
        newest = self.matching.order_by("-pk").values_list("pk", flat=True)
        connection = connections[self.matching.db]
        try:
            with dialect_of(connection).time_limit(SCAN_SECONDS):
                ids = [*newest[: MATCH_LIMIT + 1]]
        except OperationalError:  # if it is not the time, the next query raises the same
            return self._among_newest()
        if len(ids) > MATCH_LIMIT:
            text = gettext("Only the newest %d deliveries that match are listed.") % MATCH_LIMIT
            self.truncation = Truncation(message=text, next_id=ids.pop())
        found = self.root_queryset.filter(pk__in=ids)  # which need not be compared again
        return found.order_by(*self.matching.query.order_by)

    def _by_index_scan(self, state: State) -> QuerySet[Any]:
        assert state.scan is not None
        result = state.scan(self.scannable, self.span)
        if not result.is_all:
            text = gettext("Only the first %d deliveries were searched.")
            if result.next_id is not None:
                text = gettext("Only the newest %d deliveries were searched.")
            self.truncation = Truncation(message=text % result.scanned, next_id=result.next_id)
        return cast("QuerySet[Any]", self.matching.filter(result.where))

    def _among_newest(self) -> Any:
        """Restrict the query to the newest ``SCAN_LIMIT`` events."""
        rows = OutboxEvent.objects.using(self.matching.db).order_by("-pk")
        if up_to := self.span[1]:
            rows = rows.filter(pk__lte=up_to)
        for next_id in rows.values_list("pk", flat=True)[SCAN_LIMIT : SCAN_LIMIT + 1]:
            text = gettext("Only the newest %d deliveries were searched.") % SCAN_LIMIT
            self.truncation = Truncation(message=text, next_id=next_id)
            return self.matching.filter(pk__gt=next_id)
        return self.matching


def _describe(error: IncorrectLookupParameters, params: Any) -> str:
    """Say which filter is not valid: the one that the error names, or else all."""
    name = error.args[0] if error.args and isinstance(error.args[0], str) else None
    shown = {name: params[name]} if name in params else params
    filters = ", ".join(f"{key}={value}" for key, each in shown.items() for value in each)
    return gettext("Nothing is listed, because this filter is not possible: %s.") % filters


class EventSelection(EventList):
    """The events that match the list's filters, for an action on all of them; nothing is shown."""

    def get_results(self, request: HttpRequest) -> None:
        """Read and count no events."""


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts up to ``COUNT_LIMIT`` and no further; the list then shows that there are more."""

    @cached_property
    def single_page(self) -> list[Any] | None:
        """Return all rows if they fit on one page; a search for rare rows then scans only once."""
        rows = list(self.object_list[: self.per_page + 1])
        return rows if len(rows) <= self.per_page else None

    @cached_property
    def count(self) -> int:
        return min(self._counted, COUNT_LIMIT)

    @property
    def is_capped(self) -> bool:
        return self._counted > COUNT_LIMIT

    @cached_property
    def _counted(self) -> int:
        if self.single_page is not None:
            return len(self.single_page)
        rows: Any = self.object_list
        return int(rows.order_by()[: COUNT_LIMIT + 1].count())
