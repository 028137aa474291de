"""Dead events grouped by event type and error class; each group can be replayed at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.db.models import Q, QuerySet
from django.db.models.functions import Substr
from django.http import HttpRequest, QueryDict
from django.utils.translation import gettext_lazy as _

from ..inspection.status import ERROR_LENGTH, error_class
from ..listeners.progress import entries
from ..models import OutboxEvent
from ..models.fields import begins_with
from . import redaction, state_filter

BATCH_SIZE: Final = 1000  # events per query
MAX_NAMES: Final = 3  # listeners named in one line


@dataclass(slots=True, kw_only=True)
class Group:
    """Dead events of one type that failed with the same class of error."""

    event_type: str
    error: str
    count: int = 0
    newest: datetime | None = None
    oldest: datetime | None = None
    example: str = ""  # text of the newest error
    listeners: set[str] = field(default_factory=set)  # listeners of shared events that are dead

    @property
    def query(self) -> str:
        """Return the URL query with which the list shows this group."""
        found = QueryDict(mutable=True)
        found.update({"state": "dead", "event_type": self.event_type, "error": self.error})
        return found.urlencode()

    @property
    def listener_names(self) -> str:
        """Return the names of at most ``MAX_NAMES`` listeners."""
        names = sorted(self.listeners)
        return ", ".join(names[:MAX_NAMES]) + ", …" * (len(names) > MAX_NAMES)

    def add(self, at: datetime | None, line: str | None, progress: str | None) -> None:
        """Count one more event; events must come newest first."""
        self.count += 1
        if not self.example:
            first_line = (line or "").partition("\n")[0].removeprefix(f"{self.error}:")
            self.example = redaction.hide_in_text(first_line.strip())
        if at is not None:
            self.newest = max(self.newest or at, at)
            self.oldest = min(self.oldest or at, at)
        found = (entries(progress) or {}) if progress else {}
        self.listeners |= {title for title, each in found.items() if each.state == "dead"}


def groups(alias: str) -> tuple[list[Group], bool]:
    """Return the groups of the newest dead events, largest first, and whether these are all."""
    found = state_filter.scan_dead(OutboxEvent.objects.using(alias), (None, None))
    by_cause: dict[tuple[str, str], Group] = {}
    for start in range(0, len(found.ids), BATCH_SIZE):
        for event_type, line, at, progress in _rows(alias, found.ids[start : start + BATCH_SIZE]):
            key = event_type, error_class(line)
            group = by_cause.setdefault(key, Group(event_type=key[0], error=key[1]))
            group.add(at, line, progress)
    return sorted(by_cause.values(), key=lambda each: (-each.count, each.event_type)), found.is_all


def _rows(alias: str, ids: Sequence[str]) -> Any:
    events = OutboxEvent.objects.using(alias).filter(pk__in=ids).dead().order_by("-pk")
    lines = events.annotate(line=Substr("last_error", 1, ERROR_LENGTH))
    return lines.values_list("event_type", "line", "done_at", "progress")


class ErrorFilter(admin.SimpleListFilter):
    """Filter by error class; the links on the page of error groups set it."""

    title = _("error")
    parameter_name = "error"

    def has_output(self) -> bool:
        return self.value() is not None

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return []

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        if (chosen := self.value()) is None:
            return
        remove = changelist.get_query_string(remove=[self.parameter_name])
        yield {"selected": False, "query_string": remove, "display": _("All")}
        here = changelist.get_query_string({self.parameter_name: chosen})
        yield {"selected": True, "query_string": here, "display": chosen or "–"}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        if chosen is None:
            return queryset
        if "\0" in chosen:  # PostgreSQL rejects NUL
            raise IncorrectLookupParameters(self.parameter_name)
        if not chosen:
            return queryset.filter(Q(last_error=None) | Q(last_error=""))
        ends = [Q(begins_with("last_error", f"{chosen}{end}")) for end in (":", "\n")]
        return queryset.filter(ends[0] | ends[1] | Q(last_error=chosen))
