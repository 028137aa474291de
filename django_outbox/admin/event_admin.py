"""Admin of events: list and show them; replay, discard, run now, skip, or edit and replay."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, cast

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_http_methods

from ..listeners.outcomes import Status
from ..models import OutboxEvent, OutboxQuerySet
from ..models.fields import DatabaseNow
from ..sql import dialect_of
from . import bulk_actions, columns, display, editing, error_groups
from .actions import (
    ACTIONS,
    BULK_ACTIONS,
    DISCARD,
    EDIT,
    REPLAY,
    RUN_NOW,
    ActionResult,
    EventAction,
)
from .changelist import LONG_TEXTS, EventList, EventTypeFilter, StateFilter, UpToFilter
from .confirmation import EVENTS_SHOWN, ConfirmationAdmin
from .date_hierarchy import WrittenFilter
from .queue_filter import QueueFilter, has_queues
from .read_only import may

# Actions offered above the list for all matching events, by the value of the state filter.
BULK_ACTIONS_BY_STATE: Final = {
    "": (REPLAY,),
    "dead": (REPLAY, DISCARD),
    "scheduled": (RUN_NOW,),
    "retrying": (RUN_NOW,),
}


class OutboxEventAdmin(ConfirmationAdmin):
    """Admin of events: read-only pages, and actions that each need a permission."""

    list_display = columns.LIST_COLUMNS
    list_filter = [
        StateFilter,
        error_groups.ErrorFilter,
        EventTypeFilter,
        QueueFilter,
        WrittenFilter,
        UpToFilter,
    ]
    list_per_page = 50
    list_max_show_all = 200
    ordering = ["-event_id"]
    search_fields = ["event_id"]  # and others, compared exactly; see get_search_results
    search_help_text = _("A complete event id, unique key, aggregate id or key.")
    actions = ["replay", "run_now", "discard"]

    # --- reading ------------------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> OutboxQuerySet:
        """Annotate ``seen_at``, the database's current time."""
        events = cast("OutboxQuerySet", super().get_queryset(request))
        return events.annotate(seen_at=DatabaseNow())

    def get_list_display(self, request: HttpRequest) -> Any:
        return [each for each in self.list_display if has_queues() or each is not columns.queue]

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[EventList]:
        return EventList

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        """Match the whole search term, which may contain spaces.

        Search the columns without an index only if the indexed ones have no match.
        """
        if term := search_term.strip():
            found = queryset.filter(Q(event_id=term) | Q(unique_key=term))
            unindexed = Q(aggregate_id=term) | Q(key=term)
            queryset = found if found.exists() else queryset.filter(unindexed)
        return queryset, False

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        return columns.sections(obj) if obj else ()

    # --- actions ----------------------------------------------------------------------------------

    @admin.action(permissions=["replay"], description=_("Replay dead events"))
    def replay(self, request: HttpRequest, queryset: OutboxQuerySet) -> HttpResponse | None:
        return self._apply_to_ticked(request, REPLAY)

    @admin.action(permissions=["replay"], description=_("Run waiting events now"))
    def run_now(self, request: HttpRequest, queryset: OutboxQuerySet) -> HttpResponse | None:
        return self._apply_to_ticked(request, RUN_NOW)

    @admin.action(permissions=["discard"], description=_("Discard dead events"))
    def discard(self, request: HttpRequest, queryset: OutboxQuerySet) -> HttpResponse | None:
        return self._apply_to_ticked(request, DISCARD)

    def _apply_to_ticked(self, request: HttpRequest, action: EventAction) -> HttpResponse | None:
        """Apply the action to the ticked ids, not to the filtered list.

        The result then also counts an event that has just left the state "dead".
        """
        if request.POST.get("select_across") == "1":
            return HttpResponseRedirect(self._bulk_url(request, action))
        return self.apply_or_confirm(request, action, request.POST.getlist(ACTION_CHECKBOX_NAME))

    def get_urls(self) -> list[URLPattern]:
        return [
            *(self._path(f"all/{each.name}/", f"{each.name}_all",
                         partial(self.bulk_view, action=each)) for each in BULK_ACTIONS),
            *(self._path(f"<path:object_id>/{each.name}/", each.name,
                         partial(self.event_view, action=each)) for each in ACTIONS),
            self._path("<path:object_id>/edit/", "edit", self.edit_view),
            self._path("groups/", "groups", self.groups_view),
            *super().get_urls(),
        ]  # fmt: skip

    def _path(self, route: str, name: str, view: Any) -> URLPattern:
        """Return a URL pattern whose view ignores ATOMIC_REQUESTS, because batches commit."""
        allowed = require_http_methods(["GET", "HEAD", "POST"])(view)
        guarded = transaction.non_atomic_requests(self.admin_site.admin_view(allowed))
        name = f"{self.opts.app_label}_{self.opts.model_name}_{name}"
        return cast("URLPattern", path(route, guarded, name=name))

    def event_view(
        self, request: HttpRequest, object_id: str, *, action: EventAction
    ) -> HttpResponse:
        """Ask for confirmation on GET, act on one event on POST."""
        self.require_permission(request, action)
        event_id = unquote(object_id)
        exists = self.get_object(request, event_id) is not None
        if request.method != "POST" and exists:
            context = {"back_url": self.url(request, "change", object_id)}
            return self.confirm(request, action, [event_id], hidden={}, **context)
        if request.method == "POST":
            self.apply(request, action, [event_id])
            exists = self.get_object(request, event_id) is not None
        page = ("change", object_id) if exists else ("changelist",)
        return HttpResponseRedirect(self.url(request, *page))

    def bulk_view(self, request: HttpRequest, *, action: EventAction) -> HttpResponse:
        """Ask for confirmation on GET; each POST acts for a few seconds, until all are done."""
        self.require_permission(request, action)
        try:
            listed = cast("EventList", self.get_changelist_instance(request))
        except IncorrectLookupParameters:
            return HttpResponseRedirect(f"{self.url(request, 'changelist')}?e=1")
        back = {"back_url": f"{self.url(request, 'changelist')}?{request.GET.urlencode()}"}
        if request.method != "POST":
            context = bulk_confirmation(listed, action, self.alias) | back
            return self.render_page(request, "confirm.html", action, context)
        progress = bulk_actions.resume(request.POST.get("progress", ""))
        progress = bulk_actions.advance(progress, action, listed.matching, user_id=request.user.pk)
        if not progress.is_finished:
            context = {"progress": progress, "message": action.result_message % progress.done}
            return self.render_page(request, "bulk_action.html", action, context | back)
        result = ActionResult(action=action, done=progress.done, unavailable=progress.skipped)
        self.show_result(request, result)
        return HttpResponseRedirect(back["back_url"])

    def edit_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show payload and headers of a dead event in a form; save them and replay it."""
        self.require_permission(request, EDIT)
        event = self.get_object(request, unquote(object_id))
        if event is None or event.status != Status.DEAD or not editing.can_be_edited(event):
            text = gettext(
                "Only a dead event can be edited, and only if its payload is not too long."
            )
            self.message_user(request, text, messages.WARNING)
            return HttpResponseRedirect(self.url(request, "changelist"))
        form = editing.EventForm(event, request.POST or None)
        back = self.url(request, "change", object_id)
        if not (request.method == "POST" and form.is_valid()):
            return self.render_page(
                request, "edit.html", EDIT, {"form": form, "event": event, "back_url": back}
            )
        user_id = request.user.pk
        if editing.save(event.pk, form, action=REPLAY, alias=self.alias, user_id=user_id):
            self.show_result(request, ActionResult(action=EDIT, done=1, unavailable=0))
        else:
            self.show_result(request, ActionResult(action=EDIT, done=0, unavailable=1))
        return HttpResponseRedirect(back)

    def groups_view(self, request: HttpRequest) -> HttpResponse:
        """Show dead events grouped by error."""
        if not self.has_view_or_change_permission(request):
            raise PermissionDenied
        found, is_all = error_groups.groups(self.alias)
        now = dialect_of(connections[self.alias]).clock(connections[self.alias])
        lines = [
            {
                "group": each,
                "newest": display.since(gettext("%s ago"), each.newest, now),
                "oldest": display.since(gettext("%s ago"), each.oldest, now),
                "pauses": self.pause_links(request, event_type=each.event_type),
            }
            for each in found
        ]
        context = {
            "title": gettext("Dead events by error"),
            "lines": lines,
            "counted": None if is_all else sum(each.count for each in found),
            "may_replay": may(request, REPLAY.permission),
            "list_url": self.url(request, "changelist"),
            "replay_url": self.url(request, "replay_all"),
        }
        return self.render_page(request, "groups.html", REPLAY, context)

    def _bulk_url(self, request: HttpRequest, action: EventAction) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{action.name}_all"
        url = reverse(name, current_app=self.admin_site.name)
        return f"{url}?{request.GET.urlencode()}"

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        bulk_links = [
            {"action": action, "url": self._bulk_url(request, action)}
            for action in BULK_ACTIONS_BY_STATE.get(request.GET.get("state", ""), ())
            if may(request, action.permission)
        ]
        own = {"outbox_actions": bulk_links, "outbox_groups": self.url(request, "groups")}
        return super().changelist_view(request, {**(extra_context or {}), **own})

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        event = context["original"]
        itself = OutboxEvent.objects.using(self.alias).filter(pk=event.pk)
        context["outbox_actions"] = [
            {"action": action, "url": self.url(request, action.name, quote(event.pk))}
            for action in ACTIONS
            if may(request, action.permission) and action.applicable(itself).exists()
        ]
        context["is_dead"] = is_dead = event.status == Status.DEAD
        if is_dead and may(request, EDIT.permission) and editing.can_be_edited(event):
            url = self.url(request, EDIT.name, quote(event.pk))
            context["outbox_actions"].insert(1, {"action": EDIT, "url": url})
        stream = {} if event.key is None else {"stream": event.key}
        context["outbox_pauses"] = self.pause_links(
            request, event_type=event.event_type, queue=event.queue, **stream
        )
        return super().render_change_form(request, context, *args, **options)


def bulk_confirmation(listed: EventList, action: EventAction, alias: str) -> dict[str, Any]:
    """Return the context of the page that confirms an action for all matching events."""
    found = action.scan(listed.scannable, listed.span)
    applicable = action.applicable(listed.matching.filter(pk__in=found.ids)).order_by("-pk")
    count = applicable.count()
    return {
        "question": action.question % count,
        "is_all": found.is_all,
        "events": applicable.defer(*LONG_TEXTS)[:EVENTS_SHOWN],
        "further": max(count - EVENTS_SHOWN, 0),
        "filters": listed.describe_filters(),
        "is_possible": count > 0 or not found.is_all,
        "hidden": {"progress": [bulk_actions.begin(alias, total=count, is_all=found.is_all).token]},
    }
