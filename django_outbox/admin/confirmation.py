"""Confirmation pages for actions on events, styled like Django's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import OutboxPause, OutboxQuerySet
from ..queue_settings import is_rate, per_second
from . import display, links
from .actions import REPLAY, EventAction, amount, apply_at_once, chosen
from .changelist import LONG_TEXTS, within_time
from .read_only import INPUT, ReadOnlyAdmin, may

SHOWN: Final = 20  # deliveries that a confirmation page lists
CONFIRMED_FIELD: Final = "outbox_confirmed"  # form field of the template: the user has confirmed
RATES: Final = ("100/m", "10/s", "100/s")  # that the page suggests


class PaceForm(forms.Form):
    """How fast, and how many at most."""

    rate = forms.CharField(
        label=_("How fast?"),
        required=False,
        help_text=_("Such as 100/m, 10/s or 500/h. Empty: all at once."),
        widget=forms.TextInput(attrs={"list": "outbox-rates", "size": 10}),
    )
    limit = forms.IntegerField(label=_("How many at most?"), required=False, min_value=1)

    def __init__(self, data: Any, *, action: EventAction, is_bulk: bool) -> None:
        super().__init__(data)
        for field in self.fields.values():
            field.widget.attrs |= INPUT
        if action is not REPLAY:
            del self.fields["rate"]
        if not is_bulk:
            del self.fields["limit"]

    def clean_rate(self) -> str | None:
        rate: str = self.cleaned_data["rate"]
        if rate and not is_rate(rate):
            raise ValidationError(_('Expected a rate such as "100/m", "10/s" or "500/h".'))
        return rate or None


def question(action: EventAction, rows: OutboxQuerySet) -> dict[str, Any]:
    """Return the context that asks whether to apply an action to these, which allow it.

    ``count`` is None if they cannot be counted in time.
    """
    counts = {"deliveries": Count("pk"), "events": Count("event_id", distinct=True)}
    newest = rows.order_by("-pk").defer(*LONG_TEXTS)[:SHOWN]
    found = within_time(rows, lambda: (rows.aggregate(**counts), [*newest]))
    if found is None:
        asked = gettext("%(label)s: all that match") % {"label": action.label}
        return {"question": asked, "count": None}
    counted, shown = found
    count = counted["deliveries"]
    return {
        "question": action.question % amount(**counted),
        "count": count,
        "deliveries": [(display.delivery(each), each.pk) for each in shown],
        "further": max(count - SHOWN, 0),
        "rates": [(each, display.duration(count / per_second(each))) for each in RATES],
    }


class ConfirmationAdmin(ReadOnlyAdmin):
    """Applies actions to events, if the user has the permission and has confirmed."""

    def apply_or_confirm(self, request: HttpRequest, action: EventAction) -> HttpResponse | None:
        """Apply the action to the ticked events if the user has confirmed it, or else ask."""
        ticked = request.POST.getlist(ACTION_CHECKBOX_NAME)
        if CONFIRMED_FIELD in request.POST and self.apply(request, action, ticked):
            return None
        hidden = {"action": [action.name], ACTION_CHECKBOX_NAME: ticked}
        return self.confirm(request, action, ticked, hidden=hidden)

    def apply(self, request: HttpRequest, action: EventAction, ids: Sequence[str]) -> bool:
        """Apply the action and say what it did; return False if the form is not valid."""
        if not (form := PaceForm(request.POST, action=action, is_bulk=False)).is_valid():
            return False
        rate = form.cleaned_data.get("rate")
        done, text = apply_at_once(action, ids, alias=self.alias, user=request.user, rate=rate)
        self.message_user(request, text, messages.SUCCESS if done else messages.WARNING)
        return True

    def confirm(
        self, request: HttpRequest, action: EventAction, ids: Sequence[str], **extra: Any
    ) -> TemplateResponse:
        """Return the confirmation page: the action, its deliveries, and how many are left out."""
        asked = question(action, action.applicable(chosen(ids, self.alias)))
        data = request.POST if CONFIRMED_FIELD in request.POST else None
        context = {
            **asked,
            "form": PaceForm(data, action=action, is_bulk=False) if asked["count"] != 1 else None,
            "left_out": len({*ids}) - (asked["count"] or 0),
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
        if not may(request, action.permission):
            raise PermissionDenied

    def pause_links(
        self, request: HttpRequest, names: Iterable[tuple[str, str | None]]
    ) -> list[dict[str, str]]:
        """Return links to the form that pauses each kind by name; none without the permission."""
        if links.url("outboxpause_add") == "#" or not may(request, "pause_outboxpause"):
            return []
        return [
            {
                "label": f"{OutboxPause.Kind(kind).label} {name}",
                "url": links.url("outboxpause_add", kind=kind, name=name),
            }
            for kind, name in names
            if name is not None
        ]

    def url(self, request: HttpRequest, page: str, *keys: str) -> str:
        """Return the URL of a page, with the list's filters preserved."""
        filters = {"preserved_filters": self.get_preserved_filters(request), "opts": self.opts}
        url = links.url(f"outboxevent_{page}", *keys)
        return add_preserved_filters(filters, url)  # type: ignore[arg-type]
