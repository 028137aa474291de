"""Admin change list of events, at a bounded cost however large the table is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..conf import current
from ..listeners import registry
from ..models import OutboxEvent, OutboxQuerySet
from .date_hierarchy import WrittenFilter, span_of
from .queue_filter import QueueFilter
from .state_filter import STATES, Span, State

COUNT_LIMIT: Final = 10_000  # events; the list does not count further
SCAN_LIMIT: Final = 50_000  # newest events that a filter without an index scans
TYPES_SCAN_LIMIT: Final = 1000  # newest events whose types the filter offers
LONG_TEXTS: Final = ("payload", "headers", "result", "progress")  # never loaded for a list
# Lookups that a URL may use on a column, in addition to the filters in the sidebar.
ALLOWED_LOOKUPS: Final = {
    "",
    *"exact in isnull gt gte lt lte contains startswith year month day".split(),
}
# URL parameters that filter no further: the list is then exactly the ids of an index scan.
SCAN_PARAMETERS: Final = {"state", "written", "up_to", "p", "all"}
UP_TO: Final = "up_to"  # URL parameter: the id of the newest event to scan


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Where a scan stopped although there may be more events."""

    scanned: int
    next_id: str | None  # id at which the scan can be continued; None: it cannot


class EventList(ChangeList):
    """Change list that does not load the large columns: fifty payloads may take 50 MiB."""

    truncation: Truncation | None = None
    scanned_rows: ScannedRows | None = None
    span: Span
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

    def get_queryset(self, request: HttpRequest, *args: Any, **options: Any) -> QuerySet[Any]:
        found = super().get_queryset(request, *args, **options)
        is_filtered = bool(found.query.where)
        state, self.span = state_of(request), self._span(request)
        self.matching = found = _within(found, self.span)
        self.scannable = OutboxEvent.objects.using(found.db)
        if queue := request.GET.get(QueueFilter.parameter_name):
            self.scannable = self.scannable.filter(queue=queue)
        if state is not None and state.scan is not None:
            found = self._by_index_scan(found, state)
        elif is_filtered:
            found = self._among_newest(found)
        return found.defer(*LONG_TEXTS)

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        state = state_of(request)
        if state is None or "o" in self.params:
            return super().get_ordering(request, queryset)
        return [*state.ordering]

    def get_results(self, request: HttpRequest) -> None:
        if self.scanned_rows is not None:
            self.queryset = cast("Any", self.scanned_rows)
        super().get_results(request)
        if self.paginator.single_page is not None:
            self.result_list = self.paginator.single_page

    @property
    def older_url(self) -> str:
        """Return the URL of the same list, continued where this scan stopped."""
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

    def _by_index_scan(self, found: QuerySet[Any], state: State) -> QuerySet[Any]:
        assert state.scan is not None
        result = state.scan(self.scannable, self.span)
        if not result.is_all:
            can_continue = state is STATES["dead"]  # other scans are not in the order of the ids
            next_id = result.ids[-1] if can_continue else None
            self.truncation = Truncation(scanned=len(result.ids), next_id=next_id)
        low, high = self.span
        ids = [pk for pk in result.ids if (low or "") <= pk and (high is None or pk <= high)]
        found = found.filter(pk__in=ids)
        if (
            result.is_sorted
            and {*self.params, *self.filter_params} <= SCAN_PARAMETERS
            and not self.query
        ):
            self.scanned_rows = ScannedRows(self.root_queryset.defer(*LONG_TEXTS), ids)
        return found

    def _among_newest(self, found: QuerySet[Any]) -> QuerySet[Any]:
        """Restrict the query to the newest ``SCAN_LIMIT`` events; no index supports the filters."""
        ids = _within(OutboxEvent.objects.using(found.db), self.span).order_by("-pk")
        next_ids = ids.values_list("pk", flat=True)[SCAN_LIMIT : SCAN_LIMIT + 1]
        for next_id in next_ids:
            self.truncation = Truncation(scanned=SCAN_LIMIT, next_id=next_id)
            found = found.filter(pk__gt=next_id)
        return found

    def _span(self, request: HttpRequest) -> Span:
        low, high = span_of(request.GET.get(WrittenFilter.parameter_name))
        up_to = request.GET.get(UP_TO)
        return low, min(filter(None, (high, up_to)), default=None)


def state_of(request: HttpRequest) -> State | None:
    return STATES.get(request.GET.get(StateFilter.parameter_name, ""))


def _within(rows: QuerySet[Any], span: Span) -> QuerySet[Any]:
    low, high = span
    rows = rows if low is None else rows.filter(pk__gte=low)
    return rows if high is None else rows.filter(pk__lte=high)


class ScannedRows:
    """Rows found by a state's index scan alone; read page by page and not counted again."""

    def __init__(self, rows: QuerySet[Any], ids: list[str]) -> None:
        self._rows, self._ids = rows, ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, part: slice) -> list[Any]:
        ids = self._ids[part]
        found = {each.pk: each for each in self._rows.filter(pk__in=ids)}
        return [found[pk] for pk in ids if pk in found]

    def _clone(self) -> list[Any]:  # ChangeList calls it if all rows fit on one page
        return self[:]


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
        if isinstance(rows, ScannedRows):
            return len(rows)
        return int(rows.order_by()[: COUNT_LIMIT + 1].count())


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
