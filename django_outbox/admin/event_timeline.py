"""Timeline of one event, and the worker that holds its lease now."""

from __future__ import annotations

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
