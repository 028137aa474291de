"""Events in the admin: nothing is added or edited, and only dead ones are acted upon."""

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
from .actions import DISCARD, EDIT, FOR_ALL, REPLAY, RUN_NOW, VERBS, Outcome, Verb
from .changelist import LONG, EventList, EventTypeFilter, StateFilter, UpTo
from .confirmation import SHOWN, AskingAdmin
from .date_hierarchy import WrittenFilter
from .read_only import may

# Verbs offered above the list for all matching events, by the value of the state filter.
OFFERED: Final = {
    "": (REPLAY,),
    "dead": (REPLAY, DISCARD),
    "scheduled": (RUN_NOW,),
    "retrying": (RUN_NOW,),
}


class OutboxEventAdmin(AskingAdmin):
    """Admin of events: read-only pages, and verbs that each need a permission."""

    list_display = columns.LIST
    list_filter = [StateFilter, error_groups.ErrorFilter, EventTypeFilter, WrittenFilter, UpTo]
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
            by_reading = Q(aggregate_id=term) | Q(key=term)
            queryset = found if found.exists() else queryset.filter(by_reading)
        return queryset, False

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        return columns.sections(obj) if obj else ()

    # --- actions ----------------------------------------------------------------------------------

    @admin.action(permissions=["replay"], description=_("Replay dead events"))
    def replay(self, request: HttpRequest, queryset: OutboxQuerySet) -> HttpResponse | None:
        return self._act_on_ticked(request, REPLAY)

    @admin.action(permissions=["replay"], description=_("Run waiting events now"))
    def run_now(self, request: HttpRequest, queryset: OutboxQuerySet) -> HttpResponse | None:
        return self._act_on_ticked(request, RUN_NOW)

    @admin.action(permissions=["discard"], description=_("Discard dead events"))
    def discard(self, request: HttpRequest, queryset: OutboxQuerySet) -> HttpResponse | None:
        return self._act_on_ticked(request, DISCARD)

    def _act_on_ticked(self, request: HttpRequest, verb: Verb) -> HttpResponse | None:
        """Act on the ticked ids, not on the filtered list.

        The result then also counts an event that has just left the state "dead".
        """
        if request.POST.get("select_across") == "1":
            return HttpResponseRedirect(self._url_of_all(request, verb))
        return self.act_or_ask(request, verb, request.POST.getlist(ACTION_CHECKBOX_NAME))

    def get_urls(self) -> list[URLPattern]:
        return [
            *(self._path(f"all/{each.name}/", f"{each.name}_all", partial(self.all_view, verb=each))
              for each in FOR_ALL),
            *(self._path(f"<path:object_id>/{each.name}/", each.name,
                         partial(self.one_view, verb=each)) for each in VERBS),
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

    def one_view(self, request: HttpRequest, object_id: str, *, verb: Verb) -> HttpResponse:
        """Ask for confirmation on GET, act on one event on POST."""
        self.require(request, verb)
        event_id = unquote(object_id)
        is_there = self.get_object(request, event_id) is not None
        if request.method != "POST" and is_there:
            context = {"back": self.url(request, "change", object_id)}
            return self.ask(request, verb, [event_id], hidden={}, **context)
        if request.method == "POST":
            self.act(request, verb, [event_id])
            is_there = self.get_object(request, event_id) is not None
        page = ("change", object_id) if is_there else ("changelist",)
        return HttpResponseRedirect(self.url(request, *page))

    def all_view(self, request: HttpRequest, *, verb: Verb) -> HttpResponse:
        """Ask for confirmation on GET; each POST acts for a few seconds, until all are done."""
        self.require(request, verb)
        try:
            listed = cast("EventList", self.get_changelist_instance(request))
        except IncorrectLookupParameters:
            return HttpResponseRedirect(f"{self.url(request, 'changelist')}?e=1")
        back = {"back": f"{self.url(request, 'changelist')}?{request.GET.urlencode()}"}
        if request.method != "POST":
            return self.page(request, "ask.html", verb, about_all(listed, verb, self.alias) | back)
        walk = bulk_actions.taken_up(request.POST.get("walk", ""))
        walk = bulk_actions.step(walk, verb, listed.matching, user_id=request.user.pk)
        if not walk.is_over:
            context = {"walk": walk, "told": verb.told % walk.done}
            return self.page(request, "walk.html", verb, context | back)
        self.tell(request, Outcome(verb=verb, done=walk.done, gone=walk.skipped))
        return HttpResponseRedirect(back["back"])

    def edit_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show payload and headers of a dead event in a form; save them and replay it."""
        self.require(request, EDIT)
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
            return self.page(
                request, "edit.html", EDIT, {"form": form, "event": event, "back": back}
            )
        user_id = request.user.pk
        if editing.save(event.pk, form, verb=REPLAY, alias=self.alias, user_id=user_id):
            self.tell(request, Outcome(verb=EDIT, done=1, gone=0))
        else:
            self.tell(request, Outcome(verb=EDIT, done=0, gone=1))
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
            }
            for each in found
        ]
        context = {
            "title": gettext("Dead events by error"),
            "lines": lines,
            "counted": None if is_all else sum(each.count for each in found),
            "may_replay": may(request, REPLAY.permission),
            "list": self.url(request, "changelist"),
            "replay": self.url(request, "replay_all"),
        }
        return self.page(request, "groups.html", REPLAY, context)

    def _url_of_all(self, request: HttpRequest, verb: Verb) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{verb.name}_all"
        url = reverse(name, current_app=self.admin_site.name)
        return f"{url}?{request.GET.urlencode()}"

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        ways = [
            {"verb": verb, "url": self._url_of_all(request, verb)}
            for verb in OFFERED.get(request.GET.get("state", ""), ())
            if may(request, verb.permission)
        ]
        own = {"outbox_verbs": ways, "outbox_groups": self.url(request, "groups")}
        return super().changelist_view(request, {**(extra_context or {}), **own})

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        event = context["original"]
        itself = OutboxEvent.objects.using(self.alias).filter(pk=event.pk)
        context["outbox_verbs"] = [
            {"verb": verb, "url": self.url(request, verb.name, quote(event.pk))}
            for verb in VERBS
            if may(request, verb.permission) and verb.fits(itself).exists()
        ]
        context["is_dead"] = is_dead = event.status == Status.DEAD
        if is_dead and may(request, EDIT.permission) and editing.can_be_edited(event):
            url = self.url(request, EDIT.name, quote(event.pk))
            context["outbox_verbs"].insert(1, {"verb": EDIT, "url": url})
        return super().render_change_form(request, context, *args, **options)


def about_all(listed: EventList, verb: Verb, alias: str) -> dict[str, Any]:
    """Return the context of the page that confirms a verb for all matching events."""
    found = verb.look(alias, listed.span)
    fitting = verb.fits(listed.matching.filter(pk__in=found.ids)).order_by("-pk")
    count = fitting.count()
    return {
        "asked": verb.asked % count,
        "is_all": found.is_all,
        "events": fitting.defer(*LONG)[:SHOWN],
        "further": max(count - SHOWN, 0),
        "filters": listed.said_filters(),
        "is_possible": count > 0 or not found.is_all,
        "hidden": {"walk": [bulk_actions.begin(alias, total=count, is_all=found.is_all).token]},
    }
