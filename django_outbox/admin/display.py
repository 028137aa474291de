"""How the admin shows an event's state, times and content; all output is escaped."""

from __future__ import annotations

from datetime import datetime
from typing import Final

import msgspec
from django.contrib import admin
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..conf import current
from ..events import aggregate_label
from ..inspection import sentences
from ..inspection.fate import Fate
from ..models import OutboxEvent, OutboxPause
from . import redaction

LATE_AFTER: Final = 60  # seconds that an event may be due before the admin highlights it
MAX_TEXT_LENGTH: Final = 100_000  # characters of one text that a page shows
MAX_LINE_LENGTH: Final = 120  # characters of an error that the list shows

clock, duration = sentences.clock, sentences.duration

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
NEXT: Final = {  # by state, and whether it is known until when, or what holds it
    "dead": gettext_lazy("It stays here until it is replayed or discarded."),
    "leased": gettext_lazy("A worker delivers it. If that worker is lost, another one does."),
    "unrouted": gettext_lazy("A worker finds its listeners."),
    "later": gettext_lazy("A worker delivers it then."),
    "retry": gettext_lazy("A worker tries again then."),
    "due": gettext_lazy("A worker takes it as soon as one is free."),
    "event": gettext_lazy("It waits for an earlier event of its key."),
    "breaker": gettext_lazy("A worker then tries one event. If that succeeds, the others follow."),
    "pause": gettext_lazy("It is due at once when the pause ends."),
}


def badge(state: str) -> SafeString:
    """Return a state as a coloured word."""
    name = STATE_CLASSES.get(state, f"outbox-{state}")
    return format_html('<span class="outbox-status {}">{}</span>', name, STATES[state])


def timing(fate: Fate, now: datetime) -> str | SafeString:
    """Return how long a delivery has been in its state, or by what and until when.

    ``now`` is the database's clock.
    """
    if fate.state in ("done", "dead", "discarded"):
        return since(_("for %s") if fate.state == "dead" else _("%s ago"), fate.since, now)
    if fate.state == "held":
        by = _("by %s") % ": ".join(filter(None, (_holder(fate), first_line(fate.reason))))
        if _kind(fate) != "event" and fate.until is None:
            return format_html("{}, {}", by, _("until it is resumed"))
        return format_html("{}, {}", by, until(fate.until, now)) if fate.until else by
    if fate.until is not None:
        phrase = _("leased for another %s") if fate.state == "leased" else _("due in %s")
        return since(phrase, fate.until, now)
    if fate.since is None:
        return _("when its key's turn comes") if fate.id else ""
    is_late = (now - fate.since).total_seconds() > LATE_AFTER
    return since(_("due for %s"), fate.since, now, is_late=is_late)


def what_next(fate: Fate) -> str:
    """Say what happens to a delivery without anybody's doing, and what has to be done."""
    if fate.state not in ("held", "waiting", "retrying"):
        return str(NEXT.get(fate.state, ""))
    if kind := _kind(fate):
        return str(NEXT.get(kind, NEXT["pause"]))
    later = "retry" if fate.state == "retrying" else "later"
    return str(NEXT[later if fate.until else "due" if fate.since else "event"])


def _kind(fate: Fate) -> str:
    """Return what holds a delivery: the kind of a pause, "breaker" or "event"."""
    return fate.by.partition(" ")[0]


def _holder(fate: Fate) -> str:
    kind, _space, name = fate.by.partition(" ")
    labels = {**dict(OutboxPause.Kind.choices), "event": _("event")}
    return f"{labels.get(kind, kind)} {name}"


def pause_of(fate: Fate) -> str:
    """Return the name of the pause or breaker that holds a delivery; empty if none does."""
    is_held = fate.state == "held" and _kind(fate) in OutboxPause.Kind.values
    return _holder(fate) if is_held else ""


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


def technical(text: str) -> SafeString:
    """Return an id or another text that is read from left to right in every language."""
    return format_html('<span class="outbox-id" dir="ltr">{}</span>', text)


def preformatted(text: str | None) -> str | SafeString:
    """Return text with its line breaks, cut off after ``MAX_TEXT_LENGTH`` characters."""
    if not text:
        return ""
    block = format_html('<pre class="outbox-text" dir="ltr">{}</pre>', text[:MAX_TEXT_LENGTH])
    if len(text) <= MAX_TEXT_LENGTH:
        return block
    note = _("Only the first %(shown)d of %(all)d characters are shown.")
    note %= {"shown": MAX_TEXT_LENGTH, "all": len(text)}
    return format_html('{}<p class="outbox-note">{}</p>', block, note)
