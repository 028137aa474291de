"""Confirmation pages for actions on events, styled like Django's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.core.exceptions import PermissionDenied
from django.db import router
from django.db.models import Count
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from ..models import OutboxEvent, OutboxPause, OutboxQuerySet
from . import bulk_actions, display
from .actions import AT_ONCE, ActionResult, EventAction, amount
from .changelist import LONG_TEXTS
from .read_only import ReadOnlyAdmin, may

SHOWN: Final = 20  # deliveries that a confirmation page lists
CONFIRMED_FIELD: Final = "outbox_confirmed"  # form field: the user has confirmed
PACE_FIELD: Final = "pace"  # form field: the name of the pace
EVENT_IDS_FIELD: Final = "outbox_event"  # form field: the ids of the confirmed rows


def question(action: EventAction, applicable: OutboxQuerySet) -> dict[str, Any]:
    """Return the context that asks whether to apply an action to these deliveries."""
    counts = {"deliveries": Count("pk"), "events": Count("event_id", distinct=True)}
    found = applicable.aggregate(**counts)
    count, newest = found["deliveries"], applicable.order_by("-pk").defer(*LONG_TEXTS)
    return {
        "question": action.question % amount(**found),
        "count": count,
        "deliveries": [(display.delivery(each), each.pk) for each in newest[:SHOWN]],
        "further": max(count - SHOWN, 0),
    }


class ConfirmationAdmin(ReadOnlyAdmin):
    """Applies actions to events, if the user has the permission and has confirmed."""

    def apply_or_confirm(
        self, request: HttpRequest, action: EventAction, ids: Sequence[str]
    ) -> TemplateResponse | None:
        """Apply the action to the confirmed events, or else ask to confirm these."""
        self.require_permission(request, action)
        if CONFIRMED_FIELD in request.POST:
            self.apply(request, action, request.POST.getlist(EVENT_IDS_FIELD))
            return None
        ticked = request.POST.getlist(ACTION_CHECKBOX_NAME)
        hidden = {"action": [action.name], ACTION_CHECKBOX_NAME: ticked} if ticked else {}
        return self.confirm(request, action, ids, hidden=hidden)

    def apply(self, request: HttpRequest, action: EventAction, ids: Sequence[str]) -> None:
        pace = bulk_actions.pace_named(action, request.POST.get(PACE_FIELD, AT_ONCE.name))
        result = bulk_actions.apply_at_once(
            action, ids, alias=self.alias, user=request.user, pace=pace
        )
        self.show_result(request, result)

    def advance(
        self, request: HttpRequest, action: EventAction, rows: OutboxQuerySet, *, back_url: str
    ) -> HttpResponse:
        """Go on with a bulk action for a few seconds; return the next page.

        The form that begins it also has the pace.
        """
        progress = bulk_actions.resume(request.POST.get("progress", ""))
        progress = replace(progress, pace=request.POST.get(PACE_FIELD, progress.pace))
        progress = bulk_actions.advance(progress, action, rows, user=request.user)
        if not progress.is_finished:
            message = action.result_message % progress.done
            context = {"progress": progress, "message": message, "back_url": back_url}
            return self.render_page(request, "bulk_action.html", action, context)
        result = ActionResult(
            action=action,
            done=progress.done,
            unavailable=progress.skipped,
            last_at=progress.last_at,
        )
        self.show_result(request, result)
        return HttpResponseRedirect(back_url)

    def show_result(self, request: HttpRequest, result: ActionResult) -> None:
        level = messages.SUCCESS if result.done else messages.WARNING
        self.message_user(request, str(result), level)

    def confirm(
        self,
        request: HttpRequest,
        action: EventAction,
        ids: Sequence[str],
        *,
        hidden: dict[str, Any],
        **extra: Any,
    ) -> TemplateResponse:
        """Return the confirmation page: the action, its deliveries, and how many are left out."""
        valid_ids = [each for each in dict.fromkeys(ids) if "\0" not in each]
        chosen = OutboxEvent.objects.using(self.alias).filter(pk__in=valid_ids)
        applicable = action.applicable(chosen)
        asked = question(action, applicable)
        context = {
            **asked,
            "left_out": len({*ids}) - asked["count"],
            "is_possible": asked["count"] > 0,
            "is_all": True,
            "hidden": {**hidden, EVENT_IDS_FIELD: ids, CONFIRMED_FIELD: ["yes"]},
        }
        return self.render_page(request, "confirm.html", action, {**context, **extra})

    def render_page(
        self, request: HttpRequest, template: str, action: EventAction, context: dict[str, Any]
    ) -> TemplateResponse:
        common = {
            **self.admin_site.each_context(request),
            "title": action.label,
            "action": action,
            "opts": self.opts,
            "media": self.media,
            "back_url": self.url(request, "changelist"),
        }
        return TemplateResponse(request, f"admin/django_outbox/{template}", {**common, **context})

    def require_permission(self, request: HttpRequest, action: EventAction) -> None:
        if not (self.has_view_or_change_permission(request) and may(request, action.permission)):
            raise PermissionDenied

    def pause_links(self, request: HttpRequest, **names: str) -> list[dict[str, str]]:
        """Return links to the form that pauses each kind by name; none without the permission."""
        if not request.user.has_perm("django_outbox.pause_outboxpause"):
            return []
        url = reverse("admin:django_outbox_outboxpause_add", current_app=self.admin_site.name)
        return [
            {
                "label": f"{OutboxPause.Kind(kind).label} {name}",
                "url": f"{url}?{urlencode({'kind': kind, 'name': name})}",
            }
            for kind, name in names.items()
        ]

    def url(self, request: HttpRequest, page: str, *arguments: str) -> str:
        """Return the URL of a page, with the list's filters preserved."""
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{page}"
        url = reverse(name, args=arguments, current_app=self.admin_site.name)
        filters = {"preserved_filters": self.get_preserved_filters(request), "opts": self.opts}
        return add_preserved_filters(filters, url)  # type: ignore[arg-type]

    @property
    def alias(self) -> str:
        return router.db_for_write(OutboxEvent)
