"""Admin of streams, the events of one key: which are blocked, and by what event."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar, Final

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..listeners.outcomes import Status
from ..models import OutboxStream, StreamQuerySet
from ..models.stream_queryset import MAX_BACKLOG, with_summaries
from . import columns, display, links
from .changelist import BoundedList
from .list_filters import Filter, State
from .read_only import ReadOnlyAdmin

HEAD_STATES: Final = {Status.NEW: "waiting", Status.RETRY: "retrying", Status.DEAD: "dead"}
STATES: Final = {
    "blocked": State(_("Blocked"), StreamQuerySet.blocked),
    "due": State(_("Due"), StreamQuerySet.due),
    "leased": State(_("Leased"), StreamQuerySet.leased),
    "all": State(_("All"), StreamQuerySet.all),
}


class StateFilter(Filter):
    """Filter by state; the default is the blocked streams."""

    title = _("state")
    parameter_name = "state"
    states = STATES

    def value(self) -> str:
        return super().value() or "blocked"

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        return islice(super().choices(changelist), 1, None)  # without a choice of no state


class StreamList(BoundedList):
    """Change list of streams, each with its first event (head) and its backlog."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.result_list = with_summaries(OutboxStream.objects, self.result_list)


@admin.display(description=_("key"), ordering="stream")
def key(stream: OutboxStream) -> str:
    return str(stream.key)


@admin.display(description=_("head event"))
def head(stream: Any) -> str:
    """Show the first event with its status and error; its page has what unblocks the stream."""
    if (event := stream.summary.head) is None:
        return ""
    return format_html(
        "{} {} {} {}",
        links.event(event.pk, display.delivery(event)),
        display.badge(HEAD_STATES[event.status]),
        display.technical(event.pk),
        display.first_line(event.last_error),
    )


@admin.display(description=_("waiting"))
def backlog(stream: Any) -> str:
    return f"{stream.summary.backlog}{'+' * (stream.summary.backlog >= MAX_BACKLOG)}"


@admin.display(description=_("next try"))
def next_try(stream: Any) -> Any:
    due, now = stream.due_at, stream.seen_at
    if due is None:
        return _("not automatically") if stream.summary.backlog else _("idle")
    if due <= now:
        return display.since(gettext("due for %s"), due, now)
    phrase = gettext("leased for another %s") if stream.locked_by else gettext("in %s")
    return display.since(phrase, due, now)


class OutboxStreamAdmin(ReadOnlyAdmin):
    """Admin of streams, read-only: the page of a head has the actions that unblock its stream."""

    list_display = [key, columns.queue, head, backlog, next_try]
    fields: ClassVar[Any] = list_display
    list_filter = [StateFilter]
    list_per_page = 25
    list_max_show_all = 25
    ordering = ["stream"]  # the primary key, whichever state is chosen
    search_fields = ["stream__of_key"]
    search_help_text = _("The complete key of a stream.")

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        stream = super().get_object(request, object_id, from_field)
        return stream and with_summaries(OutboxStream.objects, [stream])[0]

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[StreamList]:
        return StreamList
