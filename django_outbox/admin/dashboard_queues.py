"""The dashboard's tables of queues and of relays."""

from __future__ import annotations

from datetime import datetime

from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _

from ..inspection.overview import Overview
from ..inspection.queues import QueueState
from ..inspection.relays import RelayState, relay_states
from . import display
from .dashboard_section import Cells, Section


def queues(overview: Overview) -> Section:
    return Section(
        name="queues", title=_("Queues"),
        columns=[_("queue"), "#" + _("due"), _("oldest due"), "#" + _("workers"), _("state")],
        rows=[_queue(each) for each in overview.queues], empty="",
        needs_attention=bool(overview.unserved_queues),
    )  # fmt: skip


def _queue(each: QueueState) -> Cells:
    oldest = each.oldest_due_age
    notes = [
        _("no live worker serves it") if each.is_unserved else "",
        "" if each.is_configured else _('not in OUTBOX["QUEUES"]'),
        _("paused") if each.is_paused else "",
        _("circuit breaker open: %s") % each.breaker.reason if each.breaker else "",
    ]
    return (
        each.name, f"{each.due}{'+' * each.is_capped}",
        "" if oldest is None else display.duration(oldest), str(each.workers),
        ", ".join(filter(None, notes)),
    )  # fmt: skip


def relays(overview: Overview) -> Section:
    found = relay_states(overview.queues)
    return Section(
        name="relays", title=_("Relays"),
        columns=[_("relay"), _("event types"), _("sent to"), "#" + _("waiting"), _("oldest due"),
                 _("broker")],
        rows=[_relay(each, overview.now) for each in found], empty="",
        needs_attention=any(each.queue.breaker for each in found),
    )  # fmt: skip


def _relay(each: RelayState, now: datetime) -> Cells:
    queue, settings, state = each.queue, each.settings, ""
    if breaker := queue.breaker:
        since = display.since(_("away for %s"), breaker.paused_at, now, is_late=True)
        state = format_html("{}: {}", since, each.away_reason)
    if queue.is_paused:
        state = format_html_join(", ", "{}", ((part,) for part in (_("paused"), state) if part))
    backend = format_html('<span class="outbox-id">{}</span>', settings.backend_name)
    return (
        settings.name, ", ".join(settings.EVENTS), format_html("{} {}", settings.shown_to, backend),
        f"{queue.due}{'+' * queue.is_capped}",
        "" if queue.oldest_due_age is None else display.duration(queue.oldest_due_age), state,
    )  # fmt: skip
