"""Columns of the event list, and sections of the page of one event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from django.contrib import admin
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ..events import GLOBAL
from ..models import OutboxEvent
from . import display, event_timeline, links

Column = Callable[[Any], Any]  # takes an event; __name__ is the field that it shows, if any


def column(name: str, show: Callable[[Any], Any], title: Any = None) -> Column:
    """Return a column that formats a field with ``show``, by default under the field's title."""
    title = title or OutboxEvent._meta.get_field(name).verbose_name  # type: ignore[union-attr]

    @admin.display(description=title)
    def show_field(event: OutboxEvent) -> Any:
        return show(getattr(event, name))

    show_field.__name__ = name
    return show_field


@admin.display(description=_("event"), ordering="id")
def event(event: OutboxEvent) -> str:
    """Return event type, listener and event id."""
    return format_html("{} {}", display.delivery(event), display.technical(event.event_id))


@admin.display(description=_("status"))
def status(event: Any) -> str:
    return display.badge(event.fate.state)


@admin.display(description=_("when"))
def timing(event: Any) -> str:
    return display.timing(event.fate, event.seen_at)


@admin.display(description=_("key"))
def stream(event: OutboxEvent) -> str:
    return "" if event.key is None else links.stream(event.stream, str(event.key))


def error_line(text: str | None) -> str:
    return (
        format_html('<span dir="ltr">{}</span>', line) if (line := display.first_line(text)) else ""
    )


queue: Final = column("queue", str)
attempts: Final = column("attempts", int, _("failed attempts"))

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
        _("Delivery"),
        [
            ("listener", status, timing),
            (attempts, "rescues", "queue"),
            (event_timeline.lease,),
            (column("last_error", display.error),),
            (event_timeline.deliveries,),
        ],
    ),
    (_("Timeline"), [(event_timeline.timeline,)]),
    (_("Content"), [(column(name, display.pretty),) for name in ("payload", "headers", "result")]),
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
    if column in (event_timeline.lease, event_timeline.deliveries):
        return not column(event)
    name = column if isinstance(column, str) else column.__name__
    value = getattr(event, name, True)
    return value in (None, "") or (name == "aggregate_type" and value == GLOBAL)
