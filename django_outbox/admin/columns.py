"""Columns of the event list, and sections of the page of one event, with its timeline."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..conf import current
from ..events import GLOBAL
from ..inspection.fate import Fate
from ..listeners.history import Entry, entries
from ..listeners.outcomes import Status
from ..models import OutboxEvent, OutboxWorker
from . import display, links, redaction

MAX_LOG_ENTRIES = 20  # newest entries of the admin's log that are shown
MAX_ENTRY_LENGTH = 120  # characters of one entry that are shown
MAX_ERROR_LENGTH = 300  # characters of an error that are shown

TABLE: Final = """<table class="outbox-deliveries">
<tr><th>{}</th><th>{}</th><th>{}</th><th>{}</th></tr>{}</table>"""
ROW: Final = """<tr><th>{}</th><td>{} {}</td><td>{}</td>
<td dir="ltr">{}<ul>{}</ul></td></tr>"""

Step = tuple[datetime, str]

Column = Callable[[Any], Any]  # takes an event; __name__ is the field that it shows, if any


def column(name: str, show: Callable[[Any], Any], title: Any = None) -> Column:
    """Return a column that formats a field with ``show``, by default under the field's title."""
    title = title or OutboxEvent._meta.get_field(name).verbose_name  # type: ignore[union-attr]

    @admin.display(description=title)
    def show_field(event: OutboxEvent) -> Any:
        return show(getattr(event, name))

    show_field.__name__ = name
    return show_field


@admin.display(description=gettext_lazy("event"), ordering="id")
def event(event: OutboxEvent) -> str:
    """Return event type, listener and event id."""
    return format_html("{} {}", display.delivery(event), display.technical(event.event_id))


@admin.display(description=gettext_lazy("status"))
def status(event: Any) -> str:
    return display.badge(event.fate.state)


@admin.display(description=gettext_lazy("when"))
def timing(event: Any) -> str:
    return display.timing(event.fate, event.seen_at)


@admin.display(description=gettext_lazy("key"))
def stream(event: OutboxEvent) -> str:
    return "" if event.key is None else links.stream(event.stream, str(event.key))


def error_line(text: str | None) -> str:
    return (
        format_html('<span dir="ltr">{}</span>', line) if (line := display.first_line(text)) else ""
    )


# --- sections of the page ---


@admin.display(description=gettext_lazy("what happened"))
def timeline(event: Any) -> SafeString:
    """Return a table of the event's known times and the users' actions on it, in order."""
    history = entries(event.history)
    died = any(each.kind == "dead" for each in history[-1:])  # the history says so
    found = [*_steps(event, died=died), *map(_entry, history), *_actions(event)]
    steps = sorted((each for each in found if each[0] is not None), key=lambda each: each[0])
    rows = format_html_join(
        "",
        '<tr><td dir="ltr">{}</td><td>{}</td><th>{}</th></tr>',
        ((display.exact(at), _relative_time(at, event.seen_at), text) for at, text in steps),
    )
    return format_html('<table class="outbox-timeline">{}</table>', rows)


def _entry(entry: Entry) -> Step:
    """Return an entry of the history: what happened, where, and the error."""
    if entry.kind == "replayed":
        return entry.at, _("replayed by %s") % entry.by if entry.by else _("replayed")
    if entry.kind == "lost":
        return entry.at, _("worker lost: %s") % entry.by
    error = redaction.hide_in_text(entry.error)
    what = _("died at attempt %d") if entry.kind == "dead" else _("attempt %d failed")
    where = [entry.listener, entry.by]
    if entry.milliseconds is not None:
        where.insert(1, _("%s s") % f"{entry.milliseconds / 1000:.3g}")
    place = ", ".join(each for each in where if each)
    return entry.at, f"{what % entry.number} ({place}): {Truncator(error).chars(MAX_ERROR_LENGTH)}"


def _steps(event: Any, *, died: bool) -> list[Any]:
    is_waiting = event.status in (Status.NEW, Status.RETRY)
    due = _("lease ends") if event.locked_by else _("due")
    end = _("died") if event.status == Status.DEAD else _("done")
    deliver_at = (
        _("next try") if event.key is not None else _("not before this time, set by its writer")
    )
    return [
        (event.occurred_at, _("occurred")),
        (event.created_at, _("written")),
        (event.deliver_at if is_waiting else None, deliver_at),
        (event.first_due_at, _("first due, or due again by a replay")),
        (event.locked_at if event.locked_by else None, _("leased")),
        (event.available_at, due),
        (None if died and event.status == Status.DEAD else event.done_at, end),
    ]


def _actions(event: OutboxEvent) -> list[Step]:
    entries = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(OutboxEvent), object_id=event.pk
    ).select_related("user")
    return [
        (
            each.action_time,
            f"{each.user}: {Truncator(each.get_change_message()).chars(MAX_ENTRY_LENGTH)}",
        )
        for each in entries.order_by("-action_time")[:MAX_LOG_ENTRIES]
    ]


def _relative_time(at: datetime, now: datetime) -> str:
    phrase = _("%s ago") if at <= now else _("in %s")
    return phrase % display.duration(abs((now - at).total_seconds()))


@admin.display(description=gettext_lazy("deliveries"))
def deliveries(event: Any) -> str | SafeString:
    """Return the deliveries of an event to all of its listeners, with the history of each.

    Empty for one.
    """
    if len(event.fates) == 1:
        return ""
    rows = OutboxEvent.objects.using(event._state.db).of_event(event.event_id)
    histories = dict(rows.values_list("pk", "history"))
    titles = _("listener"), _("status"), _("failed attempts"), _("reason")
    cells = (_cells(each, histories.get(each.id), event.seen_at) for each in event.fates)
    return format_html(TABLE, *titles, format_html_join("", ROW, cells))


def _cells(fate: Fate, history: str | None, now: datetime) -> tuple[Any, ...]:
    title = fate.listener or _("no listener yet")
    name = links.event(fate.id, title) if fate.id else title
    state = display.badge(fate.state), display.timing(fate, now)
    told = ((display.exact(at), text) for at, text in map(_entry, entries(history)))
    steps = format_html_join("", '<li><span dir="ltr">{}</span> {}</li>', told)
    return name, *state, fate.attempts, display.first_line(fate.reason), steps


@admin.display(description=gettext_lazy("lease"))
def lease(event: Any) -> SafeString | str:
    """Return who has leased the event or its stream, and whether that worker is alive."""
    fate = event.fate
    owner, since, until = event.locked_by, event.locked_at, event.available_at
    if fate.state == "leased":
        owner, since, until = fate.by, fate.since, fate.until
    if not owner:
        return ""
    return format_html(
        "{}<br>{}<br>{}",
        display.technical(owner),
        _("since %(since)s, until %(until)s")
        % {"since": display.exact(since), "until": display.exact(until)},
        _owner_status(owner, event),
    )


def _owner_status(owner: str, event: Any) -> SafeString | str:
    """Judge by the worker's heartbeat; only its lease decides what happens to the event."""
    worker = OutboxWorker.objects.using(event._state.db).filter(pk=owner).first()
    if worker is None:
        return _("No live worker has this name; the lease ends by itself.")
    silence = event.seen_at - worker.heartbeat_at
    ago = display.duration(max(silence.total_seconds(), 0))
    if silence <= timedelta(seconds=current().LEASE):
        return _("The worker is alive: %(host)s, process %(pid)s, last seen %(ago)s ago.") % {
            "host": worker.hostname,
            "pid": worker.pid,
            "ago": ago,
        }
    text = _("The worker is lost: no heartbeat for %s. The event is due again when the lease ends.")
    return format_html('<strong class="outbox-late">{}</strong>', text % ago)


# --- which of them are shown ---

queue: Final = column("queue", str)
attempts: Final = column("attempts", int, gettext_lazy("failed attempts"))

# Only functions: a field's name would be sortable, and only the primary key has an index.
LIST_COLUMNS: Final[list[str | Column]] = [
    event,
    display.aggregate,
    queue,
    status,
    timing,
    attempts,
    column("last_error", error_line),
]
# The page of one event: sections, each a list of lines of columns.
SECTIONS: Final[list[tuple[Any, list[tuple[str | Column, ...]]]]] = [
    (
        None,
        [
            ("event_type", "event_id"),
            ("aggregate_type", "aggregate_id", "tenant_id"),
            (stream, "seq", "unique_key"),
        ],
    ),
    (
        gettext_lazy("Delivery"),
        [
            ("listener", status, timing),
            (attempts, "rescues", "queue"),
            (lease,),
            (column("last_error", display.error),),
            (deliveries,),
        ],
    ),
    (gettext_lazy("Timeline"), [(timeline,)]),
    (
        gettext_lazy("Content"),
        [(column(name, display.pretty),) for name in ("payload", "headers", "result")],
    ),
]


def sections(event: OutboxEvent) -> list[tuple[Any, dict[str, Any]]]:
    """Return SECTIONS as Django's fieldsets, without the columns that are empty for this event."""
    found = []
    for title, lines in SECTIONS:
        kept = [tuple(each for each in line if not _is_empty(event, each)) for line in lines]
        if any(kept):
            found.append((title, {"fields": [line for line in kept if line]}))
    return found


def _is_empty(event: OutboxEvent, column: str | Column) -> bool:
    if column in (stream, "seq"):
        return event.key is None
    if column in (lease, deliveries):
        return not column(event)
    name = column if isinstance(column, str) else column.__name__
    value = getattr(event, name, True)
    return value in (None, "") or (name == "aggregate_type" and value == GLOBAL)
