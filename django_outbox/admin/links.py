"""URLs of the outbox's pages on the admin site that answers the request, and links to them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

site: Final[ContextVar[str]] = ContextVar("outbox_site", default="admin")  # answers the request


def url(page: str, *keys: str, app: str = "django_outbox", **query: object) -> str:
    """Return the URL of a page, such as "outboxevent_change"; "#" if the site does not have it."""
    try:
        found = reverse(f"admin:{app}_{page}", args=[*map(quote, keys)], current_app=site.get())
    except NoReverseMatch:
        return "#"
    return f"{found}?{urlencode(query)}" if query else found


def event(row_id: str, text: str) -> SafeString:
    link = '<a href="{}" title="{}">{}</a>'
    return format_html(link, url("outboxevent_change", row_id), row_id, text)


def stream(name: str, key: str) -> SafeString:
    return format_html('<a href="{}">{}</a>', url("outboxstream_change", name), key)


def cause_url(digest: str) -> str:
    return f"{url('outboxevent_groups')}#cause-{digest}"


def pause(label: str, **names: Any) -> SafeString:
    """Return a button to the form that pauses this; a screen reader says what it pauses."""
    return format_html(
        '<a class="button" href="{}">{} <span class="visually-hidden">{}</span></a>',
        url("outboxpause_add", **names),
        _("Pause"),
        label,
    )


def resume(pause_id: str) -> SafeString:
    link = '<a class="button" href="{}">{}</a>'
    return format_html(link, url("outboxpause_change", pause_id), _("Resume"))
