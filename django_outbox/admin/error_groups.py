"""Dead events by cause: the page of causes, and the filter by cause, which their actions use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final

from django.contrib.admin.views.main import ChangeList
from django.db import connections
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..inspection import causes
from ..inspection.causes import Cause
from ..inspection.sentences import clock, number
from ..listeners.history import error_class
from ..listeners.outcomes import Status
from ..sql import dialect_of
from . import display, links, redaction
from .actions import DISCARD, REPLAY
from .confirmation import ConfirmationAdmin
from .list_filters import CAUSE, Filter
from .read_only import may

MAX_CAUSES: Final = 20  # causes on the page
MAX_NAMES: Final = 5  # event types, and as many listeners, that are named of one cause


def shown_title(cause: Cause) -> tuple[str, str]:
    """Return class and message of a cause. REDACT hides values, also across the colon between."""
    title = redaction.hide_in_text(cause.title)
    error = error_class(title)
    return error, title.removeprefix(error).removeprefix(":").strip()


class CauseFilter(Filter):
    """Filter by the digest of a cause: links elsewhere set it, the list can take it away."""

    title = _("cause")
    parameter_name = CAUSE
    _found: Cause | None = None

    def has_output(self) -> bool:
        return self.value() is not None

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        remove = changelist.get_query_string(remove=[self.parameter_name])
        yield {"selected": False, "query_string": remove, "display": _("All")}
        here = changelist.get_query_string({self.parameter_name: self.value()})
        text = ": ".join(shown_title(self._found)) if self._found else gettext("none any more")
        yield {"selected": True, "query_string": here, "display": text}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if (digest := self.value()) is None:
            return queryset
        self._found = causes.find_cause(queryset.db, digest)
        if self._found is None:
            return queryset.none()
        return queryset.filter(self._found.condition, status=Status.DEAD)


class CausesAdmin(ConfirmationAdmin):
    """The page of causes, with what can be done about each of them."""

    def groups_view(self, request: HttpRequest) -> HttpResponse:
        """Show the causes of dead events."""
        found = causes.load_causes(self.alias, MAX_CAUSES)
        causes.add_examples(self.alias, found.causes)
        now = dialect_of(connections[self.alias]).clock()
        context = {
            "title": gettext("Dead events by cause"),
            "lines": [self._line(request, each, now) for each in found.causes],
            "others": number(found.others) if found.others else "",
        }
        return self.render_page(request, "groups.html", REPLAY, context)

    def _line(self, request: HttpRequest, cause: Cause, now: datetime) -> dict[str, Any]:
        (error, message), chosen = shown_title(cause), {"state": "dead", "cause": cause.digest}
        example = redaction.hide_in_text(cause.example).removeprefix(f"{cause.error}:").strip()
        since = now - timedelta(seconds=causes.LATELY)
        types, listeners = _most(cause.types), _most(cause.listeners)
        names = [("event_type", each) for each, _count in types]
        names += [("listener", each) for each, _count in listeners]
        return {
            "cause": cause,
            "error": error,
            "message": message,
            "texts": number(cause.texts) if len(cause.key) > 1 else "",
            "count": number(cause.count),
            "lately": number(cause.lately),
            "example": "" if example == message else example,
            "types": [
                (each, count, links.url("outboxevent_changelist", **chosen, event_type=each))
                for each, count in types
            ],
            "further_types": max(len(cause.types) - MAX_NAMES, 0),
            "listeners": listeners,
            "further_listeners": max(len(cause.listeners) - MAX_NAMES, 0),
            "newest": display.since(gettext("%s ago"), cause.newest, now),
            "oldest": display.since(gettext("%s ago"), cause.oldest, now),
            "new_since": clock(cause.oldest, now) if cause.oldest and cause.oldest >= since else "",
            "actions": [
                (each, links.url(f"outboxevent_{each.name}_all", **chosen))
                for each in (REPLAY, DISCARD)
                if may(request, each.permission)
            ],
            "pauses": self.pause_links(request, names),
        }


def _most(counts: Counter[str]) -> list[tuple[str, str]]:
    return [(each, number(count)) for each, count in counts.most_common(MAX_NAMES)]
