"""Links from the page of an event to its object, and to the events of this object and key."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

from django.apps import apps
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import quote
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext

from ..events import aggregate_label
from ..models import OutboxEvent


def links(request: HttpRequest, event: OutboxEvent, site: AdminSite) -> list[dict[str, str]]:
    """Return links to the event's object, and to the lists of the events related to it."""
    return [{"label": label, "url": url} for label, url in _links(request, event, site)]


def _links(request: HttpRequest, event: OutboxEvent, site: AdminSite) -> Iterator[tuple[str, str]]:
    events = reverse("admin:django_outbox_outboxevent_changelist", current_app=site.name)
    about = aggregate_label(event.aggregate_type, event.aggregate_id)
    if url := _object_url(request, event, site):
        yield gettext("Object %s") % about, url
    if event.aggregate_id is not None:
        same = {"aggregate_type": event.aggregate_type, "aggregate_id": event.aggregate_id}
        yield gettext("Events of %s") % about, f"{events}?{urlencode(same)}"
    if event.key is not None:
        yield gettext("Events of key %s") % event.key, f"{events}?{urlencode({'key': event.key})}"


def _object_url(request: HttpRequest, event: OutboxEvent, site: AdminSite) -> str | None:
    """Return the admin page of the object, if its type is a model that the user may see there.

    ``write`` stores the label of the model, such as ``shop.Order``, if it is given ``aggregate=``.
    """
    if event.aggregate_id is None or event.aggregate_type.count(".") != 1:
        return None
    try:
        model = apps.get_model(event.aggregate_type)
    except (LookupError, ValueError):
        return None
    if model._meta.label != event.aggregate_type or not site.is_registered(model):
        return None
    if not site.get_model_admin(model).has_view_permission(request):
        return None
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}_change"
    return reverse(name, args=[quote(event.aggregate_id)], current_app=site.name)
