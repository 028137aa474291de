"""Admin change list of events, at a bounded cost however large the table is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db import connections
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext

from ..conf import current
from ..models import OutboxEvent, OutboxQuerySet
from ..models.fields import IsIndexed
from ..sql import dialect_of
from . import search
from .date_hierarchy import WrittenFilter, span_of
from .list_filters import UP_TO, StateFilter
from .queue_filter import QueueFilter
from .search import Place, SearchError, Term
from .state_filter import STATES, Span, State

COUNT_LIMIT: Final = 10_000  # events; the list does not count further
SCAN_LIMIT: Final = 50_000  # newest events that a filter without an index scans
MATCH_LIMIT: Final = 1000  # newest events that match a search in several columns
LONG_TEXTS: Final = ("payload", "headers", "result", "progress")  # never loaded for a list
# Lookups that a URL may use on a column, in addition to the filters in the sidebar.
ALLOWED_LOOKUPS: Final = {
    "",
    *"exact in isnull gt gte lt lte contains startswith year month day".split(),
}
# The condition of the index by key: all events but those that are done.
PENDING: Final = Q(IsIndexed("status"))
# Name and columns of the index that a project may add to search a column.
INDEXES: Final = {
    "aggregate_id": ("outbox_event_aggregate", ("aggregate_id", "aggregate_type")),
    "key": ("outbox_event_by_key", ("key", "event_id")),
    "tenant_id": ("outbox_event_tenant", ("tenant_id", "event_id")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Where a search stopped although there may be more events."""

    message: str
    next_id: str | None  # id at which the search can be continued; None: it cannot
    missing_index: str = ""  # statement that creates an index, with which nothing is left out


class EventList(ChangeList):
    """Change list that does not load the large columns: fifty payloads may take 50 MiB."""

    problem = ""  # why no event is listed, although some may match
    notes: list[str]
    state: State | None = None
    state_name = ""
    truncation: Truncation | None = None
    span: Span = (None, None)
    matching: Any  # all events that match the filters; may take long to read
    scannable: OutboxQuerySet  # all events, or those of the chosen queue, for an index scan

    def get_filters(self, request: HttpRequest) -> Any:
        """Reject lookups that guess hidden values letter by letter, or that break the query."""
        hidden = (*LONG_TEXTS, "last_error") if current().REDACT else LONG_TEXTS
        for name in self.get_filters_params():
            column, _sep, lookup = name.partition("__")
            if column in hidden or lookup not in ALLOWED_LOOKUPS:
                raise IncorrectLookupParameters(name)
        return super().get_filters(request)

    def get_queryset(self, request: HttpRequest, *args: Any, **options: Any) -> Any:
        """Return the events to list; none of them if a filter or the search is not valid."""
        self.notes = []
        try:
            found = self._filtered(request, *args, **options)
        except SearchError as error:
            return self._nothing(str(error))
        except IncorrectLookupParameters as error:
            return self._nothing(_describe(error, self.filter_params))
        self.scannable = OutboxEvent.objects.using(found.db)
        if queue := request.GET.get(QueueFilter.parameter_name):
            self.scannable = self.scannable.filter(queue=queue)
        self.matching = found.filter(*(each.condition for each in self.search.terms))
        return self._bounded(found).defer(*LONG_TEXTS)

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

    def _filtered(self, request: HttpRequest, *args: Any, **options: Any) -> QuerySet[Any]:
        """Return the events that match the filters and the search, except for its terms."""
        self.search = search.parse(request.GET.get("q", ""))
        name = self.search.state or request.GET.get(StateFilter.parameter_name)
        is_implied = self.search.has_error and not name
        self.state_name = "dead" if is_implied else name or ""
        self.state = STATES.get(self.state_name)
        self.span = self._span(request)
        found = _within(super().get_queryset(request, *args, **options), self.span)
        if not is_implied:
            return found
        self.notes.append(
            gettext("“error:” searches dead events. Add state:retrying for those that are retried.")
        )
        return found.filter(STATES["dead"].where)

    def _nothing(self, problem: str) -> QuerySet[Any]:
        """List no event, and no filters either, because one of them is not valid."""
        self.problem, self.truncation = problem, None
        self.filter_specs, self.has_filters, self.has_active_filters = [], False, True
        self.clear_all_filters_qs = "?"
        self.matching = self.root_queryset.none()
        self.scannable = OutboxEvent.objects.none()
        return self.root_queryset.none()

    def _bounded(self, found: Any) -> Any:
        """Apply the search's terms, and restrict the query to what a bounded search reads."""
        terms = self.search.terms
        indexed = self._indexed_columns() if terms else frozenset()
        for term in terms:
            if (condition := self._complete(term, indexed)) is not None:
                return self.matching.filter(condition)
        if self.state is not None and self.state.scan is not None:
            return self._by_index_scan(self.matching, self.state)
        if terms:
            first, *others = terms
            return self._by_term(found.filter(*(each.condition for each in others)), first, indexed)
        return self._among_newest(found) if found.query.where else found

    def _indexed_columns(self) -> frozenset[str]:
        connection = connections[self.root_queryset.db]
        return dialect_of(connection).indexed_columns(connection)

    def _complete(self, term: Term, indexed: frozenset[str]) -> Q | None:
        """Return a condition by which an index finds all events of a term, or None."""
        place, *others = term.places
        has_scan = self.state is not None and self.state.scan is not None
        if others or (place.column == "tenant_id" and has_scan):  # a tenant may have most events
            return None
        if place.column in indexed:
            return place.condition
        return place.condition & PENDING if place.column == "key" and has_scan else None

    def _by_term(self, found: Any, term: Term, indexed: frozenset[str]) -> Any:
        """Restrict the query to the newest events of a term, from each index that finds some.

        Search the columns without an index among the newest events.
        """
        if term.exact is not None and found.filter(term.exact).exists():
            self.matching = found.filter(term.exact)
            return self.matching
        rows = found.order_by("-pk").values_list("pk", flat=True)
        parts = [each.condition for each in term.places if each.column in indexed]
        missing = [each for each in term.places if each.column not in indexed]
        parts += [each.condition & PENDING for each in missing if each.column == "key"]
        next_id = self._next_id() if missing else None
        if missing:
            after = Q() if next_id is None else Q(pk__gt=next_id)
            parts.append(after & search.either(missing))
        ids = sorted({pk for each in parts for pk in rows.filter(each)[: MATCH_LIMIT + 1]})[::-1]
        if len(ids) > MATCH_LIMIT:
            text = gettext("Only the newest %d events that match were searched.") % MATCH_LIMIT
            self.truncation = Truncation(message=text, next_id=ids[MATCH_LIMIT])
        elif next_id is not None:
            self.truncation = self._newest_only(next_id, missing)
        return found.filter(pk__in=ids[:MATCH_LIMIT])

    def _by_index_scan(self, found: QuerySet[Any], state: State) -> QuerySet[Any]:
        assert state.scan is not None
        result = state.scan(self.scannable, self.span)
        if not result.is_all:
            text = gettext("Only the first %d events were searched.")
            if result.next_id is not None:
                text = gettext("Only the newest %d events were searched.")
            self.truncation = Truncation(message=text % result.scanned, next_id=result.next_id)
        return found.filter(result.where)

    def _among_newest(self, found: QuerySet[Any]) -> QuerySet[Any]:
        """Restrict the query to the newest ``SCAN_LIMIT`` events; no index supports the filters."""
        if (next_id := self._next_id()) is None:
            return found
        self.truncation = self._newest_only(next_id)
        return found.filter(pk__gt=next_id)

    def _next_id(self) -> str | None:
        """Return the id of the event after the newest ``SCAN_LIMIT``, at which to continue."""
        ids = _within(OutboxEvent.objects.using(self.root_queryset.db), self.span).order_by("-pk")
        rest = ids.values_list("pk", flat=True)[SCAN_LIMIT : SCAN_LIMIT + 1]
        return next(iter(rest), None)

    def _newest_only(self, next_id: str, missing: Sequence[Place] = ()) -> Truncation:
        """Say that only the newest events were searched, and which index would find the others."""
        columns = {each.column for each in missing}
        column = next((each for each in INDEXES if each in columns), None)
        statement = ""
        if column is not None:
            connection = connections[self.root_queryset.db]
            statement = dialect_of(connection).create_index_statement(connection, *INDEXES[column])
        text = gettext("Only the newest %d events were searched.") % SCAN_LIMIT
        return Truncation(message=text, next_id=next_id, missing_index=statement)

    def _span(self, request: HttpRequest) -> Span:
        low, high = span_of(request.GET.get(WrittenFilter.parameter_name))
        up_to = request.GET.get(UP_TO)
        return low, min(filter(None, (high, up_to)), default=None)


def _describe(error: IncorrectLookupParameters, params: Any) -> str:
    """Say which filter is not valid: the one that the error names, or else all."""
    name = error.args[0] if error.args and isinstance(error.args[0], str) else None
    shown = {name: params[name]} if name in params else params
    filters = ", ".join(f"{key}={value}" for key, each in shown.items() for value in each)
    return gettext("No event is listed, because this filter is not possible: %s.") % filters


def _within(rows: QuerySet[Any], span: Span) -> QuerySet[Any]:
    low, high = span
    rows = rows if low is None else rows.filter(pk__gte=low)
    return rows if high is None else rows.filter(pk__lte=high)


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
