"""Admin of deliveries: list and show them; replay, discard, run now, or skip."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, cast

from django.contrib import admin, messages
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import unquote
from django.db import connections
from django.db.models import Exists
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .. import doorbell
from ..conf import current
from ..events import aggregate_label, spellings
from ..inspection.fate import fates_of
from ..models import OutboxEvent, OutboxOperation, OutboxQuerySet
from ..sql import dialect_of
from . import columns, display, error_groups, links
from .actions import ACTIONS, BULK_ACTIONS, DISCARD, REPLAY, RUN_NOW, EventAction
from .changelist import LONG_TEXTS, EventList, EventSelection
from .confirmation import PaceForm, question
from .list_filters import EventTypeFilter, ListenerFilter, QueueFilter, StateFilter, WrittenFilter
from .read_only import may

NEIGHBOURS: Final = 3  # deliveries of its key on either side that the page of one shows
NEAR: Final = 5000  # rows written before one, and after it, among which done ones are searched
SEARCHED: Final = ("unique_key", "aggregate_id", "tenant_id")
# Actions offered above the list for all matching events, by the value of the state filter.
BULK_ACTIONS_BY_STATE: Final = {
    "": (REPLAY,),
    "dead": (REPLAY, DISCARD),
    "scheduled": (RUN_NOW,),
    "retrying": (RUN_NOW,),
}


class OutboxEventAdmin(error_groups.CausesAdmin):
    """Admin of deliveries: read-only pages, and actions that each need a permission."""

    list_display = columns.LIST_COLUMNS
    list_filter = [
        StateFilter,
        error_groups.CauseFilter,
        EventTypeFilter,
        ListenerFilter,
        QueueFilter,
        WrittenFilter,
    ]
    list_per_page = 50
    list_max_show_all = 200
    ordering = ["-id"]
    search_fields = ["id__of_event", *(f"{each}__exact" for each in SEARCHED), "stream__of_key"]
    search_help_text = _("A whole id, unique key, key, object id or tenant; or several of them.")
    actions = ["replay", "run_now", "discard"]

    # --- reading ------------------------------------------------------------------------------

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        """Find an id of ours by the primary key, in either case; search for all else."""
        named = spellings(search_term.strip())
        for event_id in named if len(named) > 1 else ():  # it is as long as an id of ours
            found = queryset.filter(id__of_event=event_id)
            if found.exists():
                return found, False
        return super().get_search_results(request, queryset, search_term)

    def get_list_display(self, request: HttpRequest) -> Any:
        has_queues = len(current().queues) > 1
        return [each for each in self.list_display if has_queues or each is not columns.queue]

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[EventList]:
        match = request.resolver_match
        is_list = match is None or str(match.url_name).endswith("_changelist")
        return EventList if is_list else EventSelection

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        return columns.sections(obj) if obj else ()

    # --- actions ----------------------------------------------------------------------------------

    def has_replay_permission(self, request: HttpRequest) -> bool:
        return may(request, "replay_outboxevent")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return may(request, "discard_outboxevent")

    @admin.action(permissions=["replay"], description=_("Replay dead deliveries"))
    def replay(self, request: HttpRequest, queryset: OutboxQuerySet) -> HttpResponse | None:
        return self._apply_to_ticked(request, REPLAY)

    @admin.action(permissions=["replay"], description=_("Run waiting deliveries now"))
    def run_now(self, request: HttpRequest, queryset: OutboxQuerySet) -> HttpResponse | None:
        return self._apply_to_ticked(request, RUN_NOW)

    @admin.action(permissions=["discard"], description=_("Discard dead deliveries"))
    def discard(self, request: HttpRequest, queryset: OutboxQuerySet) -> HttpResponse | None:
        return self._apply_to_ticked(request, DISCARD)

    def _apply_to_ticked(self, request: HttpRequest, action: EventAction) -> HttpResponse | None:
        """Apply the action to the ticked ids, not to the filtered list.

        The result then also counts an event that has just left the state "dead".
        """
        if request.POST.get("select_across") == "1":
            return HttpResponseRedirect(self._bulk_url(request, action))
        return self.apply_or_confirm(request, action)

    def get_urls(self) -> list[URLPattern]:
        pages: list[Any] = [("groups/", "groups", self.groups_view)]
        for each in BULK_ACTIONS:
            view = partial(self.bulk_view, action=each)
            pages.append((f"all/{each.name}/", f"{each.name}_all", view))
        for each in ACTIONS:
            view = partial(self.event_view, action=each)
            pages.append((f"<path:object_id>/{each.name}/", each.name, view))
        own = [self.page(*each, "GET", "HEAD", "POST") for each in pages]
        return [*own, *super().get_urls()]

    def event_view(
        self, request: HttpRequest, object_id: str, *, action: EventAction
    ) -> HttpResponse:
        """Ask for confirmation on GET, act on one delivery on POST."""
        self.require_permission(request, action)
        event_id = unquote(object_id)
        exists = self.get_object(request, event_id) is not None
        if request.method != "POST" and exists:
            context = {"back_url": self.url(request, "change", event_id)}
            return self.confirm(request, action, [event_id], **context)
        if request.method == "POST":
            self.apply(request, action, [event_id])
            exists = self.get_object(request, event_id) is not None
        page = ("change", event_id) if exists else ("changelist",)
        return HttpResponseRedirect(self.url(request, *page))

    def bulk_view(self, request: HttpRequest, *, action: EventAction) -> HttpResponse:
        """Ask for confirmation on GET; on POST, have a worker act on all that match."""
        self.require_permission(request, action)
        listed = cast("EventList", self.get_changelist_instance(request))
        back = f"{self.url(request, 'changelist')}?{request.GET.urlencode()}"
        if listed.problem:
            return HttpResponseRedirect(back)
        if error_groups.CauseFilter.parameter_name in request.GET:
            back = self.url(request, "groups")
        asked, filters = question(action, action.found(listed.matching)), listed.describe_filters()
        data = request.POST if request.method == "POST" else None
        form = PaceForm(data, action=action, is_bulk=True)
        if not form.is_valid():
            context = {**asked, "filters": filters, "back_url": back, "form": form}
            return self.render_page(request, "confirm.html", action, context)
        try:
            OutboxOperation.objects.using(self.alias).begin(
                action.kind,
                listed.matching,
                by=request.user.get_username(),
                about="; ".join(map(str, filters)),
                matched=asked["count"],
                **form.cleaned_data,
            )
        except ValueError:  # such as of a state that other tables decide
            text = gettext("No worker can do this to what the list shows: choose other filters.")
            self.message_user(request, text, messages.ERROR)
            return HttpResponseRedirect(back)
        doorbell.ring(connections[self.alias])
        operations = links.url("outboxoperation_changelist")
        return HttpResponseRedirect(back if operations == "#" else operations)

    def _bulk_url(self, request: HttpRequest, action: EventAction) -> str:
        return f"{links.url(f'outboxevent_{action.name}_all')}?{request.GET.urlencode()}"

    def bulk_links(self, request: HttpRequest, listed: EventList) -> list[dict[str, Any]]:
        """Return links to the actions on all events of the listed state."""
        if listed.problem:
            return []
        return [
            {"action": action, "url": self._bulk_url(request, action)}
            for action in BULK_ACTIONS_BY_STATE.get(listed.state_name, ())
            if may(request, action.permission)
        ]

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Give the delivery its fate, and those of its event's other deliveries."""
        if (event := super().get_object(request, object_id, from_field)) is not None:
            event.fates = fates_of(event.event_id, self.alias)
            event.fate = next(each for each in event.fates if each.id == event.pk)
        return event

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        event, itself = context["original"], OutboxEvent.objects.using(self.alias)
        itself = itself.filter(pk=context["original"].pk)
        fit = {each.name: Exists(each.applicable(itself)) for each in ACTIONS}
        allowed: Any = itself.values(**fit).first()
        pause = display.pause_of(event.fate)
        context["outbox_actions"] = [
            {"action": action, "url": self.url(request, action.name, event.pk)}
            for action in ACTIONS
            if allowed[action.name] and may(request, action.permission)
            if not (action is RUN_NOW and pause)  # which would still hold it
        ]
        names = [(each, getattr(event, each)) for each in ("event_type", "queue", "listener")]
        names.append(("stream", event.key))
        context |= {
            "outbox_pauses": [] if pause else self.pause_links(request, names),
            "outbox_pause": pause,
            "outbox_next": display.what_next(event.fate),
            "outbox_related": [*related_links(request, event, self.admin_site)],
            "outbox_neighbours": neighbours(event),
        }
        return super().render_change_form(request, context, *args, **options)


# --- related objects ------------------------------------------------------------------------------


def neighbours(event: OutboxEvent) -> list[Any]:
    """Return the deliveries before and after this one in its stream, in order."""
    if event.stream is None or event.seq is None:
        return []
    rows = OutboxEvent.objects.using(event._state.db)
    place = {"stream": event.stream, "seq": event.seq, "row_id": event.pk}
    dialect = dialect_of(connections[rows.db])
    found = dialect.neighbours(**place, most=NEIGHBOURS, near=NEAR)
    events = rows.defer(*LONG_TEXTS).in_bulk([pk for _, pk in found])
    return [events[pk] for _, pk in found if pk in events]


def related_links(
    request: HttpRequest, event: OutboxEvent, site: AdminSite
) -> Iterator[tuple[str, str]]:
    """Yield links to the event's object, and to the lists of the events related to it."""
    about = aggregate_label(event.aggregate_type, event.aggregate_id)
    if url := _object_url(request, event, site):
        yield gettext("Object %s") % about, url
    if event.aggregate_id is not None:
        same = {"aggregate_type": event.aggregate_type, "aggregate_id": event.aggregate_id}
        yield gettext("Events of %s") % about, links.url("outboxevent_changelist", **same)
    if event.key is not None:
        of_key = links.url("outboxevent_changelist", stream=event.stream)
        yield gettext("Events of key %s") % event.key, of_key


def _object_url(request: HttpRequest, event: OutboxEvent, site: AdminSite) -> str | None:
    """Return the admin page of the object, if its type is a model that the user may see there.

    ``write`` stores the label of the model, such as ``shop.Order``, if it is given ``aggregate=``.
    """
    model = {each._meta.label: each for each in site._registry}.get(event.aggregate_type)
    if event.aggregate_id is None or model is None:
        return None
    if not site.get_model_admin(model).has_view_permission(request):
        return None
    page = f"{model._meta.model_name}_change"
    return links.url(page, event.aggregate_id, app=model._meta.app_label)
