"""Where the dashboard leads: to events, streams, causes and pauses."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from .read_only import reverse

EVENTS: Final = "admin:django_outbox_outboxevent_changelist"
EVENT: Final = "admin:django_outbox_outboxevent_change"
CAUSES: Final = "admin:django_outbox_outboxevent_groups"
STREAMS: Final = "admin:django_outbox_outboxstream_changelist"
STREAM: Final = "admin:django_outbox_outboxstream_change"
PAUSES: Final = "admin:django_outbox_outboxpause_changelist"
PAUSE: Final = "admin:django_outbox_outboxpause_add"
RESUME: Final = "admin:django_outbox_outboxpause_change"


def events_url(**filters: object) -> str:
    return f"{reverse(EVENTS)}?{urlencode(filters)}"


def event_url(event_id: str) -> str:
    return reverse(EVENT, args=[quote(event_id)])


def event(event_id: str, event_type: str) -> SafeString:
    return format_html('<a href="{}" title="{}">{}</a>', event_url(event_id), event_id, event_type)


def cause_url(digest: str) -> str:
    return f"{reverse(CAUSES)}#cause-{digest}"


def blocked_url() -> str:
    return f"{reverse(STREAMS)}?state=blocked"


def resume_url(pause_id: str) -> str:
    return reverse(RESUME, args=[quote(pause_id)])


def stream(name: str, key: str) -> SafeString:
    return format_html('<a href="{}">{}</a>', reverse(STREAM, args=[quote(name)]), key)


def pause(label: str, **names: Any) -> SafeString:
    """Return a button to the form that pauses this; a screen reader says what it pauses."""
    url = f"{reverse(PAUSE)}?{urlencode(names)}"
    return format_html(
        '<a class="button" href="{}">{} <span class="visually-hidden">{}</span></a>',
        url,
        _("Pause"),
        label,
    )


def resume(pause_id: str) -> SafeString:
    url = resume_url(pause_id)
    return format_html('<a class="button" href="{}">{}</a>', url, _("Resume"))
