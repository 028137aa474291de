"""Tables and headline numbers of the dashboard, built from an ``Overview``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..inspection.causes import Cause
from ..inspection.overview import MAX_BLOCKED_COUNTED, MAX_BLOCKED_SHOWN, BlockedStream, Overview
from ..models import OutboxPause
from . import dashboard_links as links
from . import display
from .charts import Charts, format_seconds
from .dashboard_full_tables import waiting, workers
from .dashboard_problems import Problem, capped
from .dashboard_queues import queues, relays
from .dashboard_section import Cells, Section
from .error_groups import shown_title

MAX_TYPES_NAMED: Final = 2  # event types of a cause
MAX_MESSAGE: Final = 160  # characters of a cause's message

Permissions = frozenset[str]  # "pause", "resume"


def sections(overview: Overview, found: Sequence[Problem], may: Permissions) -> list[Section]:
    """Return the tables with rows: those that a problem names first, then the others."""
    bad = {each.section for each in found}
    every = [
        dead(overview, may),
        workers(overview, needs_attention="workers" in bad),
        paused(overview, may),
        blocked(overview),
        waiting(overview.backlog, overview.now, needs_attention="backlog" in bad),
        queues(overview),
        relays(overview),
    ]
    shown = [each.short() for each in every if each.rows or each.name in bad]
    return sorted(shown, key=lambda each: not each.needs_attention)


def dead(overview: Overview, may: Permissions) -> Section:
    others = overview.causes.others
    note = ngettext("%d further cause.", "%d further causes.", others) % others if others else ""
    return Section(
        name="dead",
        title=_("Dead events by cause"),
        is_wide=True,
        columns=[_("cause"), _("event types"), "#" + _("events"), _("last"), ""],
        rows=[_cause(each, overview.now, may) for each in overview.causes.causes],
        note=note,
        needs_attention=bool(overview.causes.total),
        all_url=reverse(links.CAUSES),
    )


def _cause(cause: Cause, now: datetime, may: Permissions) -> Cells:
    error, message = shown_title(cause)
    link = format_html(
        '<a href="{}#cause-{}">{}</a> <span class="outbox-message">{}</span>',
        reverse(links.CAUSES),
        cause.digest,
        error or "–",
        Truncator(message).chars(MAX_MESSAGE),
    )
    types = sorted(cause.types, key=lambda each: -cause.types[each])
    named: str = format_html_join(
        "",
        "<div>{}</div>",
        ((links.events(each, state="dead"),) for each in types[:MAX_TYPES_NAMED]),
    )
    if (further := len(types) - MAX_TYPES_NAMED) > 0:
        named += format_html("<div>{}</div>", _("and %d more") % further)
    button: SafeString | str = ""
    if "pause" in may and types:
        names = {"kind": "event_type", "name": types[0], "reason": error}
        button = links.pause(types[0], **names)
    count = f"{cause.count}{'+' * cause.is_bounded}"
    return link, named, count, display.since(_("%s ago"), cause.newest, now), button


def paused(overview: Overview, may: Permissions) -> Section:
    end = [""] if "resume" in may else []
    return Section(
        name="paused",
        title=_("Paused"),
        columns=[_("name"), _("since"), _("until"), _("by"), _("reason"), *end],
        rows=[_pause(each, overview.now, may) for each in overview.pauses],
        needs_attention=bool(overview.pauses),
        all_url=reverse(links.PAUSES),
    )


def _pause(each: OutboxPause, now: datetime, may: Permissions) -> Cells:
    name = format_html('<span class="quiet">{}</span> {}', each.get_kind_display(), each.name)
    reason = format_html(
        '<span class="outbox-message">{}</span>', Truncator(each.reason).chars(MAX_MESSAGE)
    )
    cells: list[str] = [
        name,
        display.since("%s", each.paused_at, now),
        display.until(each.until, now),
        each.paused_by,
        reason,
    ]
    if "resume" in may:
        url = reverse(links.RESUME, args=[each.pk])
        cells.append(format_html('<a class="button" href="{}">{}</a>', url, _("Resume")))
    return cells


def blocked(overview: Overview) -> Section:
    count = overview.blocked.count
    return Section(
        name="blocked",
        title=_("Blocked streams"),
        columns=[_("key"), _("head"), _("next try"), _("error")],
        rows=[_blocked(each, overview.now) for each in overview.blocked.streams],
        needs_attention=bool(count),
        all_url=f"{reverse(links.STREAMS)}?state=blocked",
        count=capped(count, MAX_BLOCKED_COUNTED) if count > MAX_BLOCKED_SHOWN else "",
    )


def _blocked(each: BlockedStream, now: datetime) -> Cells:
    next_try = (
        _("not automatically")
        if each.due_at is None
        else display.since(_("in %s"), each.due_at, now)
    )
    if (head := each.head) is None:
        return links.stream(each.key), "", next_try, ""
    return (
        links.stream(each.key),
        links.event(head.pk, head.event_type),
        next_try,
        display.first_line(head.last_error),
    )


def tiles(overview: Overview, charts: Charts) -> list[tuple[str, str, bool]]:
    """Return the headline numbers: title, value, and whether the value needs attention."""
    alive, lost = overview.alive, len(overview.missing)
    due = sum(each.due for each in overview.queues)
    more = "+" * any(each.is_capped for each in overview.queues)
    running = _("%(alive)d of %(all)d") % {"alive": alive, "all": alive + lost}
    return [
        (_("workers running"), running if lost else str(alive), not alive or bool(lost)),
        (_("due now"), f"{due}{more}", False),
        (_("oldest due"), format_seconds(overview.lag), overview.lag > display.LATE_AFTER),
        (_("delivered"), charts.charts[0].series[0].latest, False),
        (
            _("blocked streams"),
            capped(overview.blocked.count, MAX_BLOCKED_COUNTED),
            bool(overview.blocked.count),
        ),
        (_("dead events"), str(overview.causes.total), bool(overview.causes.total)),
    ]
