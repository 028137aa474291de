"""The dashboard's tables of queues and of relays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _

from ..inspection.overview import Overview
from ..inspection.queues import QueueState
from ..inspection.relays import RelayState, relay_states
from . import dashboard_links as links
from . import display
from .dashboard_section import Cells, Section

MIN_QUEUES: Final = 2  # the dashboard does not show the only queue, unless something is wrong


def queues(overview: Overview) -> Section:
    """Return the table of queues; it has no rows if ``default`` is the only one and is well."""
    found, late = queue_table(overview.queues), bool(overview.unserved_queues)
    if len(found.rows) < MIN_QUEUES and not late:
        return replace(found, rows=[])
    return replace(found, needs_attention=late, all_url=links.table_url("queues"))


def queue_table(states: Sequence[QueueState]) -> Section:
    return Section(
        name="queues",
        title=_("Queues"),
        columns=[_("queue"), "#" + _("due"), _("oldest due"), "#" + _("workers"), _("state")],
        rows=[_queue(each) for each in states],
    )


def _queue(each: QueueState) -> Cells:
    oldest = each.oldest_due_age
    notes = [
        _("no live worker serves it") if each.is_unserved else "",
        "" if each.is_configured else _('not in OUTBOX["QUEUES"]'),
        _("paused") if each.is_paused else "",
        _("circuit breaker open: %s") % each.breaker.reason if each.breaker else "",
    ]
    return (
        each.name,
        f"{each.due}{'+' * each.is_capped}",
        "" if oldest is None else display.duration(oldest),
        str(each.workers),
        ", ".join(filter(None, notes)),
    )


def relays(overview: Overview) -> Section:
    found = relay_table(overview.queues, overview.now)
    return replace(found, all_url=links.table_url("relays"))


def relay_table(states: Sequence[QueueState], now: datetime) -> Section:
    found = relay_states(states)
    return Section(
        name="relays",
        title=_("Relays"),
        columns=[
            _("relay"),
            _("event types"),
            _("sent to"),
            "#" + _("waiting"),
            _("oldest due"),
            _("broker"),
        ],
        rows=[_relay(each, now) for each in found],
        empty=_("No relay is configured."),
        needs_attention=any(each.queue.breaker for each in found),
    )


def _relay(each: RelayState, now: datetime) -> Cells:
    queue, settings, state = each.queue, each.settings, ""
    if breaker := queue.breaker:
        since = display.since(_("away for %s"), breaker.paused_at, now, is_late=True)
        state = format_html("{}: {}", since, each.away_reason)
    if queue.is_paused:
        state = format_html_join(", ", "{}", ((part,) for part in (_("paused"), state) if part))
    backend = format_html('<span class="outbox-id">{}</span>', settings.backend_name)
    return (
        settings.name,
        ", ".join(settings.EVENTS),
        format_html("{} {}", settings.shown_to, backend),
        f"{queue.due}{'+' * queue.is_capped}",
        "" if queue.oldest_due_age is None else display.duration(queue.oldest_due_age),
        state,
    )
