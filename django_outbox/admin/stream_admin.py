"""Admin of streams, the events of one key: show which are blocked, by what, and unblock them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, cast

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import OutboxStream, StreamQuerySet
from ..models.fields import DatabaseNow
from ..models.stream_queryset import MAX_BACKLOG
from . import columns, display
from .actions import DISCARD, REPLAY, RUN_NOW, SKIP
from .confirmation import ConfirmationAdmin
from .queue_filter import StreamQueueFilter, has_queues

STATES: Final = {"blocked": _("Blocked"), "due": _("Due"), "leased": _("Leased"), "all": _("All")}


class StateFilter(admin.SimpleListFilter):
    """Filter by state; the default is the blocked streams."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [*STATES.items()]

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        for name, label in STATES.items():
            yield {
                "selected": (self.value() or "blocked") == name,
                "query_string": changelist.get_query_string({self.parameter_name: name}),
                "display": label,
            }

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        name = self.value() or "blocked"
        if name not in STATES:
            raise IncorrectLookupParameters(self.parameter_name)
        return queryset if name == "all" else getattr(queryset, name)().order_by()


class StreamList(ChangeList):
    """Change list of streams, each with its first event (head) and its backlog."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        if self.paginator.single_page is not None:
            self.result_list = self.paginator.single_page
        set_summaries(list(self.result_list))


def set_summaries(streams: list[Any]) -> None:
    """Set the head and backlog of these streams, with one lookup for all of them."""
    summaries = OutboxStream.objects.summaries([stream.key for stream in streams])
    for stream in streams:
        stream.summary = summaries[stream.key]


@admin.display(description=_("key"), ordering="key")
def key(stream: OutboxStream) -> str:
    return str(stream.key)


@admin.display(description=_("head event"))
def head(stream: Any) -> str:
    if (event := stream.summary.head) is None:
        return ""
    url = reverse("admin:django_outbox_outboxevent_change", args=[quote(event.pk)])
    return format_html(
        '<a href="{}">{} <span class="outbox-id">{}</span></a>', url, event.event_type, event.pk
    )


@admin.display(description=_("status"))
def status(stream: Any) -> str:
    event = stream.summary.head
    return "" if event is None else display.badge(event)


@admin.display(description=_("failed attempts"))
def attempts(stream: Any) -> Any:
    event = stream.summary.head
    return "" if event is None else event.attempts


@admin.display(description=_("last error"))
def error(stream: Any) -> str:
    event = stream.summary.head
    return "" if event is None else display.first_line(event.last_error)


@admin.display(description=_("first due"))
def age(stream: Any) -> Any:
    event = stream.summary.head
    return (
        ""
        if event is None
        else display.since(gettext("%s ago"), event.first_due_at, stream.seen_at)
    )


@admin.display(description=_("waiting"))
def backlog(stream: Any) -> str:
    return f"{stream.summary.backlog}{'+' * (stream.summary.backlog >= MAX_BACKLOG)}"


@admin.display(description=_("next try"), ordering="due_at")
def next_try(stream: Any) -> Any:
    due, now = stream.due_at, stream.seen_at
    if due is None:
        return _("not automatically") if stream.summary.backlog else _("idle")
    if due <= now:
        return display.since(gettext("due for %s"), due, now)
    phrase = gettext("leased for another %s") if stream.locked_by else gettext("in %s")
    return display.since(phrase, due, now)


@admin.display(description=_("due at"))
def due_at(stream: OutboxStream) -> str:
    return display.exact(stream.due_at) or "–"


# A stream's fields have no titles of their own; those of an event's fields mean the same.
LEASE: Final = [
    (columns.column("seq", str), columns.queue),
    (
        columns.column("locked_by", lambda owner: owner or "–"),
        columns.column("locked_at", lambda instant: display.exact(instant) or "–"),
    ),
    due_at,
]
SECTIONS: Final[Any] = [
    (None, {"fields": [key, (head, status, attempts), error, (backlog, next_try, age)]}),
    (_("Lease"), {"fields": LEASE}),
]


class OutboxStreamAdmin(ConfirmationAdmin):
    """Admin of streams: replay or discard a dead head, retry a waiting one now, or skip it."""

    list_display = [key, head, columns.queue, status, attempts, error, age, backlog, next_try]
    list_filter = [StateFilter, StreamQueueFilter]
    list_per_page = 25
    list_max_show_all = 25
    ordering = ["key"]  # the primary key, whichever state is chosen
    search_fields = ["key"]  # compared exactly; see get_search_results
    search_help_text = _("The complete key of a stream.")
    actions = ["replay", "run_now", "discard", "skip"]

    def get_queryset(self, request: HttpRequest) -> StreamQuerySet:
        """Annotate ``seen_at``, the database's current time."""
        streams = cast("StreamQuerySet", super().get_queryset(request))
        return streams.streams_only().annotate(seen_at=DatabaseNow())

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        stream = super().get_object(request, object_id, from_field)
        if stream is not None:
            set_summaries([stream])
        return stream

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        return SECTIONS

    def get_list_display(self, request: HttpRequest) -> Any:
        return [each for each in self.list_display if has_queues() or each is not columns.queue]

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[StreamList]:
        return StreamList

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        term = search_term.strip()
        return (queryset.filter(pk=term) if term else queryset), False

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        context["outbox_pauses"] = self.pause_links(request, stream=context["original"].key)
        return super().render_change_form(request, context, *args, **options)

    @admin.action(permissions=["replay"], description=_("Replay the dead head"))
    def replay(self, request: HttpRequest, queryset: StreamQuerySet) -> HttpResponse | None:
        return self.apply_or_confirm(request, REPLAY, self._heads(queryset))

    @admin.action(permissions=["replay"], description=_("Try the head now"))
    def run_now(self, request: HttpRequest, queryset: StreamQuerySet) -> HttpResponse | None:
        return self.apply_or_confirm(request, RUN_NOW, self._heads(queryset))

    @admin.action(permissions=["discard"], description=_("Discard the dead head"))
    def discard(self, request: HttpRequest, queryset: StreamQuerySet) -> HttpResponse | None:
        return self.apply_or_confirm(request, DISCARD, self._heads(queryset))

    @admin.action(
        permissions=["discard"], description=_("Skip the head: it becomes dead, others continue")
    )
    def skip(self, request: HttpRequest, queryset: StreamQuerySet) -> HttpResponse | None:
        return self.apply_or_confirm(request, SKIP, self._heads(queryset))

    def _heads(self, streams: StreamQuerySet) -> list[str]:
        """Return the ids of these streams' heads, for at most as many as a page may show."""
        keys = [*streams.order_by("pk").values_list("pk", flat=True)[: self.list_max_show_all]]
        summaries = streams.summaries(keys).values()
        return [each.head.pk for each in summaries if each.head is not None]
