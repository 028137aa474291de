"""Events in the admin: nothing is added or edited, and only dead ones are acted upon."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, cast

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import quote, unquote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST

from ..dialects.fields import DatabaseNow
from ..models import OutboxEvent, OutboxQuerySet
from ..outcomes import Status
from . import columns
from .acting import DISCARD, REPLAY, Outcome, Verb, act
from .listing import CappedPaginator, EventList, EventTypeFilter

VERBS: Final = (REPLAY, DISCARD)


class OutboxEventAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Look at events; replay or discard dead ones, each with its own permission."""

    list_display = columns.LIST
    list_filter = ["status", EventTypeFilter]
    list_per_page = 50
    list_max_show_all = 200
    ordering = ["-event_id"]
    search_fields = ["event_id", "aggregate_id"]  # compared exactly, see get_search_results
    search_help_text = _("The whole id of an event, or else of an aggregate.")
    paginator = CappedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # they count the whole table, filter by filter
    view_on_site = False
    actions = ["replay", "discard"]

    class Media:
        css = {"all": ["django_outbox/admin.css"]}

    # --- what may be done ---------------------------------------------------------------------

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False  # an event is written by the transaction that it tells of

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_replay_permission(self, request: HttpRequest) -> bool:
        return self._may(request, REPLAY)

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return self._may(request, DISCARD)

    def _may(self, request: HttpRequest, verb: Verb) -> bool:
        codename = get_permission_codename(verb.name, self.opts)
        return request.user.has_perm(f"{self.opts.app_label}.{codename}")

    # --- what is read -------------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> OutboxQuerySet:
        """Read where events are written, never from a replica, and ask the database's clock."""
        alias = router.db_for_write(OutboxEvent)
        events = cast("OutboxQuerySet", super().get_queryset(request).using(alias))
        return events.annotate(seen_at=DatabaseNow())

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> OutboxEvent | None:
        if "\0" in object_id:  # PostgreSQL would raise where the others find nothing
            return None
        return super().get_object(request, object_id, from_field)

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[EventList]:
        return EventList

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        """Compare whole ids, which may hold spaces; only if no event has it, those of aggregates.

        There is no index for these: both at once would read the whole table for either.
        """
        if term := search_term.strip():
            found = queryset.filter(event_id=term)
            queryset = found if found.exists() else queryset.filter(aggregate_id=term)
        return queryset, False

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        return columns.sections(obj) if obj else ()

    # --- what is done -----------------------------------------------------------------------------

    @admin.action(permissions=["replay"], description=REPLAY.label)
    def replay(self, request: HttpRequest, queryset: OutboxQuerySet) -> None:
        self._act_on_selected(request, queryset, REPLAY)

    @admin.action(permissions=["discard"], description=DISCARD.label)
    def discard(self, request: HttpRequest, queryset: OutboxQuerySet) -> None:
        self._act_on_selected(request, queryset, DISCARD)

    def get_urls(self) -> list[URLPattern]:
        return [
            path(
                f"<path:object_id>/{verb.name}/",
                require_POST(self.admin_site.admin_view(partial(self.act_view, verb=verb))),
                name=f"{self.opts.app_label}_{self.opts.model_name}_{verb.name}",
            )
            for verb in VERBS
        ] + super().get_urls()

    def act_view(self, request: HttpRequest, object_id: str, *, verb: Verb) -> HttpResponse:
        """Replay or discard one event from its own page."""
        if not (self.has_view_or_change_permission(request) and self._may(request, verb)):
            raise PermissionDenied
        event_id = unquote(object_id)
        self._act_on(request, [event_id], verb)
        page = "changelist" if self.get_object(request, event_id) is None else "change"
        arguments = [object_id] if page == "change" else []
        return HttpResponseRedirect(self._url(request, page, *arguments))

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        event = context["original"]
        if event.status == Status.DEAD:
            context["outbox_verbs"] = [
                {"verb": verb, "url": self._url(request, verb.name, quote(event.pk))}
                for verb in VERBS
                if self._may(request, verb)
            ]
        return super().render_change_form(request, context, *args, **options)

    def _act_on_selected(self, request: HttpRequest, queryset: OutboxQuerySet, verb: Verb) -> None:
        """Act on the ticked events, or on all that the list would show."""
        if request.POST.get("select_across") == "1":
            self._tell(request, act(verb, queryset, asked=0, user_id=request.user.pk))
        else:
            # Not by the list's filters: an event that has just left "dead" shall be accounted for.
            self._act_on(request, request.POST.getlist(ACTION_CHECKBOX_NAME), verb)

    def _act_on(self, request: HttpRequest, ids: list[str], verb: Verb) -> None:
        chosen = self.get_queryset(request).filter(pk__in=[pk for pk in ids if "\0" not in pk])
        self._tell(request, act(verb, chosen, asked=len(set(ids)), user_id=request.user.pk))

    def _tell(self, request: HttpRequest, outcome: Outcome) -> None:
        level = messages.SUCCESS if outcome.done else messages.WARNING
        self.message_user(request, str(outcome), level)

    def _url(self, request: HttpRequest, page: str, *arguments: str) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{page}"
        url = reverse(name, args=arguments, current_app=self.admin_site.name)
        filters = {"preserved_filters": self.get_preserved_filters(request), "opts": self.opts}
        return add_preserved_filters(filters, url)  # type: ignore[arg-type]
