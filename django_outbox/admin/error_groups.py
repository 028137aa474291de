"""Dead events by cause: the page of causes, actions on each, and the filter by cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db import connections
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.urls import URLPattern
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..inspection import causes
from ..inspection.causes import Cause
from ..listeners.error_texts import error_class
from ..models import OutboxEvent
from ..sql import dialect_of
from . import bulk_actions, display, redaction
from .actions import DISCARD, REPLAY, EventAction
from .changelist import LONG_TEXTS
from .confirmation import EVENTS_SHOWN, ConfirmationAdmin
from .read_only import may

MAX_CAUSES: Final = 20  # causes on the page
MAX_NAMES: Final = 5  # event types, and as many listeners, that are named of one cause

Path = Callable[[str, str, Any], URLPattern]  # of a route, a name and a view


def shown_title(cause: Cause) -> tuple[str, str]:
    """Return class and message of a cause. REDACT hides values, also across the colon between."""
    title = redaction.hide_in_text(cause.title)
    error = error_class(title)
    return error, title.removeprefix(error).removeprefix(":").strip()


def shown_example(cause: Cause) -> str:
    """Return the message of the newest event of a cause; REDACT hides values."""
    example = redaction.hide_in_text(cause.example)
    return example.removeprefix(f"{cause.error}:").strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseLine:
    """What the page shows of one cause."""

    cause: Cause
    error: str
    message: str
    example: str  # empty if it is the same as the message
    types: list[tuple[str, int, str]]  # event type, count, URL of its events
    further_types: int
    listeners: str
    newest: str | SafeString
    oldest: str | SafeString
    actions: list[tuple[EventAction, str]]  # with the URL of each
    pauses: list[dict[str, str]]


class CausesAdmin(ConfirmationAdmin):
    """The page of causes, and what can be done about each of them."""

    def cause_urls(self, path: Path) -> list[URLPattern]:
        return [
            path("groups/", "groups", self.groups_view),
            *(
                path(
                    f"groups/<slug:digest>/{each.name}/",
                    f"{each.name}_cause",
                    partial(self.cause_view, action=each),
                )
                for each in (REPLAY, DISCARD)
            ),
        ]

    def groups_view(self, request: HttpRequest) -> HttpResponse:
        """Show the causes of dead events."""
        if not self.has_view_or_change_permission(request):
            raise PermissionDenied
        found = causes.load_causes(self.alias, MAX_CAUSES)
        now = self._now()
        context = {
            "title": gettext("Dead events by cause"),
            "lines": [self._line(request, each, now) for each in found.causes],
            "found": found,
        }
        return self.render_page(request, "groups.html", REPLAY, context)

    def cause_view(self, request: HttpRequest, digest: str, *, action: EventAction) -> HttpResponse:
        """Ask for confirmation on GET; each POST acts for a few seconds, until all are done."""
        self.require_permission(request, action)
        back = {"back_url": self.url(request, "groups")}
        if request.method != "POST":
            if (cause := causes.find_cause(self.alias, digest)) is None:
                return self._gone(request)
            context = self._confirmation(cause, action) | back
            return self.render_page(request, "confirm.html", action, context)
        only = partial(causes.only_of_cause, self.alias, digest)
        events = OutboxEvent.objects.using(self.alias)
        return self.advance(request, action, events, back_url=back["back_url"], only=only)

    def _gone(self, request: HttpRequest) -> HttpResponse:
        text = gettext("No dead event has this cause any more.")
        self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(self.url(request, "groups"))

    def _now(self) -> datetime:
        return dialect_of(connections[self.alias]).clock(connections[self.alias])

    def _confirmation(self, cause: Cause, action: EventAction) -> dict[str, Any]:
        newest = [*cause.newest_ids.values()][:EVENTS_SHOWN]
        events = OutboxEvent.objects.using(self.alias).filter(pk__in=newest).order_by("-pk")
        error, message = shown_title(cause)
        filters = [f"{error}: {message}", *(f"{k}: {n}" for k, n in cause.types.items())]
        progress = bulk_actions.begin(self.alias, total=cause.count, is_all=True, about=filters[:1])
        return {
            "question": action.question % cause.count,
            "is_all": True,
            "events": events.defer(*LONG_TEXTS),
            "further": cause.count - len(newest),
            "filters": filters,
            "is_possible": True,
            "hidden": {"progress": [progress.token]},
        }

    def _line(self, request: HttpRequest, cause: Cause, now: datetime) -> CauseLine:
        (error, message), example = shown_title(cause), shown_example(cause)
        names, digest = [*cause.types][:MAX_NAMES], cause.digest
        acts = [
            (each, self.url(request, f"{each.name}_cause", digest))
            for each in (REPLAY, DISCARD)
            if may(request, each.permission)
        ]
        return CauseLine(
            cause=cause,
            error=error,
            message=message,
            example="" if example == message else example,
            types=[
                (each, cause.types[each], self._list_url(request, digest, each)) for each in names
            ],
            further_types=len(cause.types) - len(names),
            listeners=", ".join(sorted(cause.listeners)[:MAX_NAMES]),
            newest=display.since(gettext("%s ago"), cause.newest, now),
            oldest=display.since(gettext("%s ago"), cause.oldest, now),
            actions=acts,
            pauses=[
                *(link for each in names for link in self.pause_links(request, event_type=each)),
                *(
                    link
                    for each in sorted(cause.listeners)[:MAX_NAMES]
                    for link in self.pause_links(request, listener=each)
                ),
            ],
        )

    def _list_url(self, request: HttpRequest, digest: str, event_type: str) -> str:
        query = QueryDict(mutable=True)
        query.update({"state": "dead", "event_type": event_type, "cause": digest})
        return f"{self.url(request, 'changelist')}?{query.urlencode()}"


class CauseFilter(admin.SimpleListFilter):
    """Filter by the digest of a cause.

    Links elsewhere set it; the list only shows it, to take it away.
    """

    title = _("cause")
    parameter_name = "cause"

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
        text = gettext("one cause: at most %d of its newest events") % causes.MAX_LISTED
        yield {"selected": True, "query_string": here, "display": text}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        digest = self.value()
        if digest is None:
            return queryset
        up_to = request.GET.get("up_to")
        if "\0" in (up_to or ""):  # PostgreSQL rejects NUL
            raise IncorrectLookupParameters(self.parameter_name)
        return queryset.filter(
            pk__in=causes.newest_of_cause(queryset.db, digest, span=(None, up_to))
        )
