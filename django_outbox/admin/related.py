"""Links from the page of an event to its object, and to events that belong together with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlencode

from django.apps import apps
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import quote
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext

from ..events import aggregate_key, aggregate_label, decode_headers, id_timestamp
from ..exceptions import PayloadError
from ..models import OutboxEvent
from . import redaction
from .date_hierarchy import WrittenFilter
from .search import quoted

TRACE_PARENT: Final = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
# Headers whose value events of one request share, whatever separates their words.
SHARED_HEADER: Final = re.compile(
    r"(log\.)?(x[-_.]?)?(request|correlation|causation|trace)([-_.]?id)?", re.IGNORECASE
)
MAX_LINKS: Final = 6  # headers that get a link


def links(request: HttpRequest, event: OutboxEvent, site: AdminSite) -> list[dict[str, str]]:
    """Return links to the event's object, and to searches for the events related to it."""
    return [{"label": label, "url": url} for label, url in _links(request, event, site)]


def _links(request: HttpRequest, event: OutboxEvent, site: AdminSite) -> Iterator[tuple[str, str]]:
    about = aggregate_label(event.aggregate_type, event.aggregate_id)
    if url := _object_url(request, event, site):
        yield gettext("Object %s") % about, url
    if event.aggregate_id is not None:
        value = aggregate_key(event.aggregate_type, event.aggregate_id)
        label = gettext("Events of %s") % (about or event.aggregate_id)
        yield label, _search_url(site, "aggregate", value)
    if event.key is not None:
        yield gettext("Events of key %s") % event.key, _search_url(site, "key", event.key)
    # No index finds a header, so the search is limited to the hour in which the event was written.
    if (hour := _hour(event)) is not None:
        for word, value, text in [*_shared(event)][:MAX_LINKS]:
            label = gettext("Events of the same hour with %s") % text
            yield label, _search_url(site, word, value, **{WrittenFilter.parameter_name: hour})


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


def _shared(event: OutboxEvent) -> Iterator[tuple[str, str, str]]:
    """Yield search word, value and text for each header that related events share."""
    try:
        headers = decode_headers(event.headers)
    except PayloadError:
        return
    for name, value in headers.items():
        if redaction.is_hidden((name,)):
            continue
        if name == "traceparent" and (match := TRACE_PARENT.fullmatch(value)):
            yield "trace", match[1], gettext("trace %s") % match[1]
        elif value and "=" not in name and SHARED_HEADER.fullmatch(name):
            yield "header", f"{name}={value}", f"{name} {value}"


def _hour(event: OutboxEvent) -> str | None:
    """Return the hour of the id's time as a value of the filter by time; None for another id."""
    made = id_timestamp(event.pk)
    return None if made is None else timezone.localtime(made).strftime("%Y-%m-%dT%H")


def _search_url(site: AdminSite, word: str, value: str, **filters: str) -> str:
    url = reverse("admin:django_outbox_outboxevent_changelist", current_app=site.name)
    return f"{url}?{urlencode({'q': f'{word}:{quoted(value)}', **filters})}"
