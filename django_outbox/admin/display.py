"""What a person reads of an event: its state, its times and its text, all escaped."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from ..conf import current
from ..delivery.progress import Entry, entries
from ..events import GLOBAL
from ..models import OutboxEvent
from ..outcomes import UNSETTLED, Status
from . import redaction

LATE: Final = 60  # seconds an event may be due before the list calls attention to it
TEXT_LENGTH: Final = 100_000  # characters of one text on a page
LINE_LENGTH: Final = 120  # characters of an error in the list

NAMES: Final = {int(status): f"outbox-{status.name.lower()}" for status in Status}


PROGRESS: Final = """<table class="outbox-progress">
<tr><th>{}</th><th>{}</th><th>{}</th><th>{}</th><th>{}</th></tr>{}</table>"""
PROGRESS_ROW: Final = """<tr><th>{}</th><td><span class="outbox-status outbox-{}">{}</span></td>
<td>{}</td><td>{}</td><td>{}</td></tr>"""


def badge(event: OutboxEvent) -> SafeString:
    """Return the status as a coloured word."""
    name = NAMES.get(event.status, "")
    label = event.get_status_display()
    return format_html('<span class="outbox-status {}">{}</span>', name, label)


def timing(event: OutboxEvent, now: datetime) -> str | SafeString:
    """Say since when or until when the event is in its state; ``now`` is the database's clock."""
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
    return since(phrase, due, now, is_late=(now - due).total_seconds() > LATE)


def since(
    phrase: str, instant: datetime | None, now: datetime, *, is_late: bool = False
) -> str | SafeString:
    """Say how far off an instant is; its exact time shows where a person points at it."""
    if instant is None:
        return ""
    return format_html(
        '<time class="{}" datetime="{}" title="{}">{}</time>',
        "outbox-late" if is_late else "",
        instant.isoformat(),
        exact(instant),
        phrase % duration(abs((now - instant).total_seconds())),
    )


def duration(seconds: float) -> str:
    """Return a length of time in its largest unit: ``40 s``, ``3 min``, ``7 h``, ``2 d``."""
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


def aggregate(event: OutboxEvent) -> str:
    """Name the aggregate; empty for events of none."""
    kind = "" if event.aggregate_type == GLOBAL else event.aggregate_type
    return f"{kind} {event.aggregate_id or ''}".strip()


def first_line(text: str | None) -> str:
    """Return the line of an error that names it; the rest is its traceback."""
    lines = (text or "").strip().splitlines()
    return Truncator(lines[0]).chars(LINE_LENGTH) if lines else ""


def pretty(text: str | None) -> str | SafeString:
    """Return stored JSON indented, or as it is where that cannot be done; REDACT hides values."""
    return preformatted(shown(text) if text else text)


def shown(text: str) -> str:
    """Return stored JSON as a person may see it: what cannot be searched is hidden as a whole."""
    if not current().REDACT:
        return indented(text)
    try:
        return redaction.dump(redaction.hide(redaction.parse(text)), "  ")
    except (ValueError, RecursionError):
        why = _("it cannot be decoded, and REDACT is set")
        return f"{redaction.MASK} ({why})"


def indented(text: str) -> str:
    """Indent JSON without decoding it: numbers, escapes and repeated keys stay as stored."""
    if len(text) > TEXT_LENGTH:
        return text  # indenting could make it a hundred times as long
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text


def progress(text: str | None) -> str | SafeString:
    """Return what each listener of an event has reached, as a table; damaged text as it is."""
    found = entries(text) if len(text or "") <= TEXT_LENGTH else None
    if not found:
        return pretty(text)
    rows = format_html_join("", PROGRESS_ROW, map(_progress_row, found, found.values()))
    titles = _("listener"), _("state"), _("attempts"), _("next try"), _("error")
    return format_html(PROGRESS, *titles, rows)


def _progress_row(title: str, entry: Entry) -> tuple[Any, ...]:
    name = "retry" if entry.failed else "new" if entry.state == "due" else entry.state
    label = dict(OutboxEvent.Status.choices)[Status[name.upper()]]
    return title, name, label, entry.attempts, exact(entry.at), entry.error


def preformatted(text: str | None) -> str | SafeString:
    """Return text line for line, its end cut off where it is too long for a page."""
    if not text:
        return ""
    block = format_html('<pre class="outbox-text">{}</pre>', text[:TEXT_LENGTH])
    if len(text) <= TEXT_LENGTH:
        return block
    note = _("Only the first %(shown)d of %(all)d characters are shown.")
    note %= {"shown": TEXT_LENGTH, "all": len(text)}
    return format_html('{}<p class="outbox-note">{}</p>', block, note)
