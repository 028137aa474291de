"""Confirmation pages for actions on events, styled like Django's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.urls import reverse

from ..models import OutboxEvent
from .actions import Outcome, Verb, act
from .changelist import LONG
from .read_only import LookingAdmin, may

SHOWN: Final = 20  # events that a confirmation page lists
CONFIRMED: Final = "outbox_confirmed"  # form field: the user has confirmed
EVENT: Final = "outbox_event"  # form field: the ids of the confirmed events


class AskingAdmin(LookingAdmin):
    """Applies verbs to events, if the user has the permission and has confirmed."""

    def act_or_ask(
        self, request: HttpRequest, verb: Verb, ids: Sequence[str]
    ) -> TemplateResponse | None:
        """Act on the events that the user confirmed, or else ask about these."""
        self.require(request, verb)
        if CONFIRMED in request.POST:
            self.act(request, verb, request.POST.getlist(EVENT))
            return None
        ticked = request.POST.getlist(ACTION_CHECKBOX_NAME)
        hidden = {"action": [verb.name], ACTION_CHECKBOX_NAME: ticked} if ticked else {}
        return self.ask(request, verb, ids, hidden=hidden)

    def act(self, request: HttpRequest, verb: Verb, ids: Sequence[str]) -> None:
        self.tell(request, act(verb, ids, alias=self.alias, user_id=request.user.pk))

    def tell(self, request: HttpRequest, outcome: Outcome) -> None:
        level = messages.SUCCESS if outcome.done else messages.WARNING
        self.message_user(request, str(outcome), level)

    def ask(
        self,
        request: HttpRequest,
        verb: Verb,
        ids: Sequence[str],
        *,
        hidden: dict[str, Any],
        **more: Any,
    ) -> TemplateResponse:
        """Return the confirmation page: the verb, its events, and how many are left out."""
        named = [each for each in dict.fromkeys(ids) if "\0" not in each]
        chosen = OutboxEvent.objects.using(self.alias).filter(pk__in=named)
        fitting = verb.fits(chosen).order_by("-pk").defer(*LONG)
        count = fitting.count()
        context = {
            "asked": verb.asked % count,
            "events": fitting[:SHOWN],
            "further": max(count - SHOWN, 0),
            "left_out": len({*ids}) - count,
            "is_possible": count > 0,
            "is_all": True,
            "hidden": {**hidden, EVENT: ids, CONFIRMED: ["yes"]},
        }
        return self.page(request, "ask.html", verb, {**context, **more})

    def page(
        self, request: HttpRequest, template: str, verb: Verb, context: dict[str, Any]
    ) -> TemplateResponse:
        common = {
            **self.admin_site.each_context(request),
            "title": verb.label,
            "verb": verb,
            "opts": self.opts,
            "media": self.media,
            "back": self.url(request, "changelist"),
        }
        return TemplateResponse(request, f"admin/django_outbox/{template}", {**common, **context})

    def require(self, request: HttpRequest, verb: Verb) -> None:
        if not (self.has_view_or_change_permission(request) and may(request, verb.permission)):
            raise PermissionDenied

    def url(self, request: HttpRequest, page: str, *arguments: str) -> str:
        """Return the URL of a page, with the list's filters preserved."""
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{page}"
        url = reverse(name, args=arguments, current_app=self.admin_site.name)
        filters = {"preserved_filters": self.get_preserved_filters(request), "opts": self.opts}
        return add_preserved_filters(filters, url)  # type: ignore[arg-type]

    @property
    def alias(self) -> str:
        return router.db_for_write(OutboxEvent)
