"""How the admin shows an event's state, times and content; all output is escaped."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec
from django.contrib import admin
from django.contrib.admin.utils import quote
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..conf import current
from ..events import aggregate_label
from ..inspection.fate import Fate, fates_of
from ..listeners.outcomes import UNSETTLED, Status
from ..models import OutboxEvent
from . import redaction

LATE_AFTER: Final = 60  # seconds that an event may be due before the admin highlights it
MAX_TEXT_LENGTH: Final = 100_000  # characters of one text that a page shows
MAX_LINE_LENGTH: Final = 120  # characters of an error that the list shows

CSS_CLASSES: Final = {int(status): f"outbox-{status.name.lower()}" for status in Status}


DELIVERY_TABLE: Final = """<table class="outbox-deliveries">
<tr><th>{}</th><th>{}</th><th>{}</th><th>{}</th></tr>{}</table>"""
DELIVERY_ROW: Final = """<tr><th><a href="{}">{}</a></th>
<td><span class="outbox-status {}">{}</span> {} {}</td><td>{}</td><td>{}</td></tr>"""
STATES: Final = {  # of deliveries: what they are called
    "done": gettext_lazy("done"),
    "dead": gettext_lazy("dead"),
    "leased": gettext_lazy("leased"),
    "held": gettext_lazy("held"),
    "retrying": gettext_lazy("retrying"),
    "waiting": gettext_lazy("waiting"),
    "unrouted": gettext_lazy("unrouted"),
    "discarded": gettext_lazy("discarded"),
    "deleted": gettext_lazy("deleted"),
}
STATE_CLASSES: Final = {"retrying": "outbox-retry", "held": "outbox-retry"}  # others: their own


@admin.display(description=gettext_lazy("status"))
def badge(event: OutboxEvent) -> SafeString:
    """Return the status as a coloured word."""
    name = CSS_CLASSES.get(event.status, "")
    label = event.get_status_display()
    return format_html('<span class="outbox-status {}">{}</span>', name, label)


def timing(event: OutboxEvent, now: datetime) -> str | SafeString:
    """Return how long the event has been in its state, or when that ends.

    ``now`` is the database's clock.
    """
    if event.status not in UNSETTLED:
        phrase = _("for %s") if event.status == Status.DEAD else _("%s ago")
        return since(phrase, event.done_at, now)
    due = event.available_at
    if due is None:
        return _("when its key's turn comes")
    if due > now:
        phrase = _("leased for another %s") if event.locked_by else _("due in %s")
        return since(phrase, due, now)
    phrase = _("lease ended %s ago") if event.locked_by else _("due for %s")
    return since(phrase, due, now, is_late=(now - due).total_seconds() > LATE_AFTER)


def since(
    phrase: str, instant: datetime | None, now: datetime, *, is_late: bool = False
) -> str | SafeString:
    """Return how far off an instant is, with its exact time as the tooltip."""
    if instant is None:
        return ""
    return format_html(
        '<time class="{}" datetime="{}" title="{}">{}</time>',
        "outbox-late" if is_late else "",
        instant.isoformat(),
        exact(instant),
        phrase % duration(abs((now - instant).total_seconds())),
    )


def until(instant: datetime | None, now: datetime) -> str | SafeString:
    """Return the time of day of an instant, with its date unless that is today, and how far off."""
    if instant is None:
        return ""
    phrase = _("in %s") if instant > now else _("%s ago")
    return since(f"{clock(instant, now)}, {phrase}", instant, now)


def clock(instant: datetime, now: datetime) -> str:
    """Return the time of day in the current time zone, with the date unless that is today."""
    local = timezone.localtime(instant)
    is_today = local.date() == timezone.localtime(now).date()
    return f"{local:%H:%M}" if is_today else f"{local:%Y-%m-%d %H:%M}"


def duration(seconds: float) -> str:
    """Return a duration in its largest unit: ``40 s``, ``3 min``, ``7 h``, ``2 d``."""
    if seconds < 60:
        return _("%d s") % seconds
    if seconds < 3600:
        return _("%d min") % (seconds // 60)
    if seconds < 2 * 86400:
        return _("%d h") % (seconds // 3600)
    return _("%d d") % (seconds // 86400)


def exact(instant: datetime | None) -> str:
    """Return an instant in the current time zone, with its offset, whatever USE_TZ says."""
    return timezone.localtime(instant).isoformat(" ", "milliseconds") if instant else ""


@admin.display(description=gettext_lazy("aggregate"))
def aggregate(event: OutboxEvent) -> str:
    """Return the aggregate's type and id; empty for an event without an aggregate."""
    return aggregate_label(event.aggregate_type, event.aggregate_id)


def first_line(text: str | None) -> str:
    """Return the first line of an error, shortened; the rest is the traceback. REDACT applies."""
    lines = (text or "").strip().splitlines()
    return Truncator(redaction.hide_in_text(lines[0])).chars(MAX_LINE_LENGTH) if lines else ""


def error(text: str | None) -> str | SafeString:
    """Return an error with its traceback as HTML; REDACT hides values."""
    return preformatted(redaction.hide_in_text(text) if text else text)


def pretty(text: str | None) -> str | SafeString:
    """Return stored JSON as HTML, indented if possible; REDACT hides values."""
    return preformatted(redacted(text) if text else text)


def redacted(text: str) -> str:
    """Return stored JSON with REDACT applied; REDACT hides all of a text that is not JSON."""
    if not current().REDACT:
        return indented(text)
    try:
        return redaction.hide_in_json(text)
    except (ValueError, RecursionError):
        reason = _("it cannot be decoded, and REDACT is set")
        return f"{redaction.MASK} ({reason})"


def indented(text: str) -> str:
    """Indent JSON without decoding it: numbers, escapes and repeated keys stay as stored."""
    if len(text) > MAX_TEXT_LENGTH:
        return text  # indenting could make it a hundred times as long
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text


def delivery(event: OutboxEvent) -> str:
    """Return the event type and the listener; only the title if it begins with the type."""
    title = event.listener or event.event_type
    return title if title.startswith(event.event_type) else f"{event.event_type} → {title}"


@admin.display(description=gettext_lazy("deliveries"))
def deliveries(event: OutboxEvent) -> str | SafeString:
    """Return the deliveries of an event to all of its listeners as a table; empty for one."""
    rows = OutboxEvent.objects.using(event._state.db).of_event(event.event_id)
    if not rows.exclude(pk=event.pk).exists():
        return ""
    titles = _("listener"), _("status"), _("failed attempts"), _("reason")
    found = fates_of(event.event_id, rows.db)
    return format_html(
        DELIVERY_TABLE, *titles, format_html_join("", DELIVERY_ROW, map(_cells, found))
    )


def _cells(fate: Fate) -> tuple[Any, ...]:
    page, css = "admin:django_outbox_outboxevent_change", f"outbox-{fate.state}"
    url = reverse(page, args=[quote(fate.id)]) if fate.id else "#"
    state = STATE_CLASSES.get(fate.state, css), STATES[fate.state], exact(fate.until), fate.by
    title = fate.listener or _("no listener yet")
    return url, title, *state, fate.attempts, first_line(fate.reason)


def preformatted(text: str | None) -> str | SafeString:
    """Return text with its line breaks, cut off after ``MAX_TEXT_LENGTH`` characters."""
    if not text:
        return ""
    block = format_html('<pre class="outbox-text">{}</pre>', text[:MAX_TEXT_LENGTH])
    if len(text) <= MAX_TEXT_LENGTH:
        return block
    note = _("Only the first %(shown)d of %(all)d characters are shown.")
    note %= {"shown": MAX_TEXT_LENGTH, "all": len(text)}
    return format_html('{}<p class="outbox-note">{}</p>', block, note)
