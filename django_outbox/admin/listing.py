"""The list of events, at a bounded cost however large the table is."""

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

from .. import registry
from ..models import OutboxEvent
from .states import STATES, Span, State
from .written import WrittenFilter, span_of

LIMIT: Final = 10_000  # events that the list counts, at most
NEWEST: Final = 50_000  # events that a filter without an index looks at
RECENT: Final = 1000  # newest events whose types the filter offers
LONG: Final = ("payload", "headers", "result", "progress")  # columns that no list shows
# What a URL may ask of a column, beside the filters that are offered.
LOOKUPS: Final = {"", *"exact in isnull gt gte lt lte contains startswith year month day".split()}
LOOKED: Final = {"state", "written", "up_to", "p", "all"}  # parameters that a look heeds
UP_TO: Final = "up_to"  # the parameter that names the newest event to look at


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a look has ended, though there may be more."""

    looked_at: int
    older: str | None  # the id at which a look at older events begins; None: there is none


class EventList(ChangeList):
    """A page of events without their long texts: fifty payloads may be as many MiB."""

    cut: Cut | None = None
    looked: Looked | None = None
    span: Span
    matching: Any  # all that the filters name, however long it takes to read

    def get_filters(self, request: HttpRequest) -> Any:
        """Refuse what would ask for hidden values letter by letter, or break the statement."""
        for name in self.get_filters_params():
            column, _sep, lookup = name.partition("__")
            if column in LONG or lookup not in LOOKUPS:
                raise IncorrectLookupParameters(name)
        return super().get_filters(request)

    def get_queryset(self, request: HttpRequest, *args: Any, **options: Any) -> QuerySet[Any]:
        found = super().get_queryset(request, *args, **options)
        is_filtered = bool(found.query.where)
        state, self.span = state_of(request), self._span(request)
        self.matching = found = _within(found, self.span)
        if state is not None and state.look is not None:
            found = self._by_look(found, state)
        elif is_filtered:
            found = self._newest(found)
        return found.defer(*LONG)

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        state = state_of(request)
        if state is None or "o" in self.params:
            return super().get_ordering(request, queryset)
        return [*state.ordering]

    def get_results(self, request: HttpRequest) -> None:
        if self.looked is not None:
            self.queryset = cast("Any", self.looked)
        super().get_results(request)
        if self.paginator.few is not None:
            self.result_list = self.paginator.few

    @property
    def older_url(self) -> str:
        """The same list, from where this one's look has ended."""
        assert self.cut is not None
        return self.get_query_string({UP_TO: self.cut.older}, remove=["p"])

    def said_filters(self) -> list[str]:
        """Say what the list was filtered by, to somebody about to act upon all of it."""
        specs = cast("list[admin.SimpleListFilter]", self.filter_specs)
        said = [
            f"{each.title}: {choice['display']}"
            for each in specs
            for choice in each.choices(self)
            if choice["selected"] and each.value() is not None
        ]
        names = {each.parameter_name for each in specs}
        rest = {name: each for name, each in self.filter_params.items() if name not in names}
        said += [f"{name}: {', '.join(map(str, each))}" for name, each in rest.items()]
        title = gettext("Search")
        return [*said, *([f"{title}: {self.query}"] if self.query else [])]

    def _by_look(self, found: QuerySet[Any], state: State) -> QuerySet[Any]:
        assert state.look is not None
        looked = state.look(found.db, self.span)
        if not looked.is_all:
            goes_on = state is STATES["dead"]  # the others are not in the order of their ids
            older = looked.ids[-1] if goes_on else None
            self.cut = Cut(looked_at=len(looked.ids), older=older)
        found = found.filter(pk__in=looked.ids)
        if looked.is_sorted and {*self.params, *self.filter_params} <= LOOKED and not self.query:
            self.looked = Looked(self.root_queryset.defer(*LONG), looked.ids)
        return found

    def _newest(self, found: QuerySet[Any]) -> QuerySet[Any]:
        """Look at the newest events alone: no index helps to find what was asked for."""
        ids = _within(OutboxEvent.objects.using(found.db), self.span).order_by("-pk")
        mark = ids.values_list("pk", flat=True)[NEWEST : NEWEST + 1]
        for older in mark:
            self.cut = Cut(looked_at=NEWEST, older=older)
            found = found.filter(pk__gt=older)
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


class Looked:
    """The rows that a look by state alone has found: read page by page, and not counted again."""

    def __init__(self, rows: QuerySet[Any], ids: list[str]) -> None:
        self._rows, self._ids = rows, ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, part: slice) -> list[Any]:
        ids = self._ids[part]
        found = {each.pk: each for each in self._rows.filter(pk__in=ids)}
        return [found[pk] for pk in ids if pk in found]

    def _clone(self) -> list[Any]:  # as a list asks of a queryset whose rows all stand on one page
        return self[:]


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
        rows: Any = self.object_list
        if isinstance(rows, Looked):
            return len(rows)
        return int(rows.order_by()[: LIMIT + 1].count())


class StateFilter(admin.SimpleListFilter):
    """What is due, held, waiting, dead; by looks of their own, see ``EventList``."""

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


class UpTo(admin.SimpleListFilter):
    """Takes the parameter by which the list goes on to older events; shows nothing."""

    title = ""
    parameter_name = UP_TO

    def has_output(self) -> bool:
        return self.value() is not None  # its value is looked at only then

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return []

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        return iter(())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if "\0" in (self.value() or ""):  # PostgreSQL refuses it
            raise IncorrectLookupParameters(self.parameter_name)
        return queryset


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
