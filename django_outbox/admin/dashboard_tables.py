"""Tables, problems and headline numbers of the dashboard, built from an ``Overview``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..conf import current
from ..inspection.listeners import listener_options
from ..inspection.overview import DEAD_SCAN_LIMIT, MAX_BLOCKED_COUNTED, Cause, Overview, TypeBacklog
from ..inspection.rates import MAX_DEAD_SHARE, Rates
from ..inspection.workers import WorkerInfo
from ..models.statistics import RUN_COLUMNS, WAIT_COLUMNS, quantile
from ..models.stream_queryset import MAX_BACKLOG
from . import display
from .charts import Charts, Row, format_seconds, format_value
from .dashboard_queues import queues, relays
from .dashboard_section import Cells, Section

EVENTS_URL: Final = "admin:django_outbox_outboxevent_changelist"
EVENT_URL: Final = "admin:django_outbox_outboxevent_change"
STREAM_URL: Final = "admin:django_outbox_outboxstream_change"

FEWEST_ROWS: Final = {"queues": 2, "relays": 1}  # a section with fewer is not shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem that needs attention, and the section that shows it."""

    text: str
    section: str
    is_bad: bool  # True: events are not delivered; False: not urgent


def problems(overview: Overview) -> list[Problem]:
    """Return the problems, the worst first."""
    return [*_severe_problems(overview), *_minor_problems(overview)]


def _severe_problems(overview: Overview) -> Iterator[Problem]:
    if current().MODE == "writer_only":
        return  # its events do not wait for a worker
    if not overview.alive:
        yield Problem(text=_("No worker is alive."), section="workers", is_bad=True)
    if count := len(overview.workers) - overview.alive:
        text = ngettext("No heartbeat from %d worker.", "No heartbeat from %d workers.", count)
        yield Problem(text=text % count, section="workers", is_bad=True)
    yield from _bad_rates(overview.rates)
    if overview.backlog.lag > display.LATE_AFTER:
        text = _("The oldest due event has waited for %s.") % display.duration(overview.backlog.lag)
        yield Problem(text=text, section="backlog", is_bad=True)
    for each in overview.unserved_queues:
        text = _("No live worker serves the queue %s, where events are due.") % each.name
        yield Problem(text=text, section="queues", is_bad=True)


def _bad_rates(lately: Rates) -> Iterator[Problem]:
    if lately.rescued:
        text = _("A worker was lost: %d of its events were rescued in the last 5 minutes.")
        yield Problem(text=text % lately.rescued, section="workers", is_bad=True)
    if lately.dead_share > MAX_DEAD_SHARE:
        text = _("%(dead)d of the %(ended)d events that ended in the last 5 minutes are dead.")
        counts = {"dead": lately.dead, "ended": lately.done + lately.dead}
        yield Problem(text=text % counts, section="dead", is_bad=True)
    if lately.is_stalled:
        text = _("No event was done in the last 5 minutes; %d executions failed.")
        yield Problem(text=text % lately.retry, section="types", is_bad=True)


def _minor_problems(overview: Overview) -> Iterator[Problem]:
    if count := len(overview.pauses):
        text = ngettext("%d pause is active.", "%d pauses are active.", count)
        yield Problem(text=text % count, section="paused", is_bad=False)
    if count := overview.blocked.count:
        text = ngettext("%s stream is blocked.", "%s streams are blocked.", count)
        yield Problem(
            text=text % _capped(count, MAX_BLOCKED_COUNTED), section="blocked", is_bad=False
        )
    if count := overview.dead.count:
        text = ngettext("%s event is dead.", "%s events are dead.", count)
        number = f"{count}{'' if overview.dead.is_whole else '+'}"
        yield Problem(text=text % number, section="dead", is_bad=False)
    if count := sum(bool(each.unsettled) for each in overview.unrouted):
        text = ngettext("%d event type has no listener.", "%d event types have no listener.", count)
        yield Problem(text=text % count, section="unrouted", is_bad=False)


def sections(overview: Overview, by_type: Sequence[Row], period: Any) -> dict[str, Section]:
    """Return every section by its name."""
    with_problem = {each.section for each in problems(overview)}
    found = [
        workers(overview, "workers" in with_problem),
        paused(overview),
        queues(overview),
        relays(overview),
        blocked(overview),
        dead(overview),
        backlog(overview, "backlog" in with_problem),
        unrouted(overview),
        types(by_type, period),
        listeners(overview),
    ]
    shown = [each for each in found if len(each.rows) >= FEWEST_ROWS.get(each.name, 0)]
    return {each.name: each for each in shown}


def workers(overview: Overview, needs_attention: bool) -> Section:
    return Section(
        name="workers",
        title=_("Workers"),
        columns=[_("process"), _("last heartbeat"), _("since"), "#" + _("leased"), _("running")],
        rows=[_worker(each, overview.now) for each in overview.workers],
        empty=_("No worker is running. Start one: manage.py outbox_worker"),
        needs_attention=needs_attention,
    )


def _worker(each: WorkerInfo, now: datetime) -> Cells:
    name = format_html(
        '{} <span class="outbox-id">{}</span>', each.hostname, _("process %d") % each.pid
    )
    age = _("%s ago") % display.duration(each.heartbeat_age)
    life = format_html('<span class="outbox-late">{}</span>', age) if each.is_silent else age
    runs = format_html_join(
        "", "<div>{} {}</div>",
        ((_event(event_id, event_type), display.duration(seconds))
         for event_type, event_id, seconds in each.running),
    )  # fmt: skip
    since = display.since("%s", each.started_at, now)
    return name, life, since, str(each.held), runs


def paused(overview: Overview) -> Section:
    return Section(
        name="paused", title=_("Paused"),
        columns=[_("kind"), _("name"), _("since"), _("by"), _("reason")],
        rows=[
            (each.get_kind_display(), each.name, display.since("%s", each.paused_at, overview.now),
             each.paused_by, each.reason)
            for each in overview.pauses
        ],
        empty=_("Nothing is paused."), needs_attention=bool(overview.pauses),
    )  # fmt: skip


def blocked(overview: Overview) -> Section:
    columns = [_("key"), _("head"), "#" + _("attempts"), _("first due"), "#" + _("waiting"),
               _("next try"), _("error")]  # fmt: skip
    note = ""
    if overview.blocked.count > len(overview.blocked.streams):
        note = _("Showing %(shown)d of %(all)s.") % {
            "shown": len(overview.blocked.streams),
            "all": _capped(overview.blocked.count, MAX_BLOCKED_COUNTED),
        }  # fmt: skip
    return Section(
        name="blocked", title=_("Blocked streams"), columns=columns, note=note,
        rows=[_stream(*each, overview.now) for each in overview.blocked.streams],
        empty=_("No stream is blocked."), needs_attention=bool(overview.blocked.count),
    )  # fmt: skip


def _stream(stream: Any, summary: Any, now: datetime) -> Cells:
    head, due = summary.head, stream.due_at
    link = format_html(
        '<a href="{}">{}</a>', reverse(STREAM_URL, args=[quote(stream.key)]), stream.key
    )
    next_try = _("not automatically") if due is None else display.since(_("in %s"), due, now)
    waiting = _capped(summary.backlog, MAX_BACKLOG)
    if head is None:  # settled between two queries
        return link, "", "", "", waiting, next_try, ""
    return (
        link, _event(head.pk, head.event_type), str(head.attempts),
        display.since(_("%s ago"), head.first_due_at, now), waiting, next_try,
        display.first_line(head.last_error),
    )  # fmt: skip


def dead(overview: Overview) -> Section:
    found = sorted(
        overview.dead.by_cause.items(), key=lambda each: (-each[1][0], each[0].event_type)
    )
    notes = []
    if not overview.dead.is_whole:
        notes.append(_("Only the newest %d dead events are counted.") % overview.dead.count)
    if not overview.dead.is_complete:
        limit = {"limit": DEAD_SCAN_LIMIT}
        notes.append(_("Of events with a key, only the newest %(limit)d were searched.") % limit)
    return Section(
        name="dead", title=_("Dead events by cause"),
        columns=[_("event type"), _("listener"), _("error"), "#" + _("events"), _("last")],
        rows=[_cause(cause, count, last, overview.now) for cause, (count, last) in found],
        note=" ".join(notes),
        empty=_("No event is dead."), needs_attention=bool(overview.dead.count),
    )  # fmt: skip


def _cause(cause: Cause, count: int, last: datetime | None, now: datetime) -> Cells:
    link = _events(cause.event_type, state="dead")
    return link, cause.listener, cause.error, str(count), display.since(_("%s ago"), last, now)


def backlog(overview: Overview, needs_attention: bool) -> Section:
    columns = [_("event type"), "#" + _("due"), "#" + _("leased"), "#" + _("retrying"),
               "#" + _("scheduled"), "#" + _("in streams"), _("oldest due")]  # fmt: skip
    found = sorted(overview.backlog.by_type.items(), key=lambda each: (-each[1].total, each[0]))
    note = _("There are more: only those due first are counted.")
    return Section(
        name="backlog", title=_("Waiting by type"), columns=columns,
        rows=[_waiting(event_type, each, overview.now) for event_type, each in found],
        note="" if overview.backlog.is_whole else note,
        empty=_("No events are waiting."), needs_attention=needs_attention,
    )  # fmt: skip


def _waiting(event_type: str, each: TypeBacklog, now: datetime) -> Cells:
    counts = each.due, each.held, each.retrying, each.scheduled, each.in_streams
    late = each.since is not None and (now - each.since).total_seconds() > display.LATE_AFTER
    since = display.since("%s", each.since, now, is_late=late)
    return _events(event_type), *(str(count) if count else "" for count in counts), since


def unrouted(overview: Overview) -> Section:
    return Section(
        name="unrouted", title=_("Event types without a listener here"),
        columns=[_("event type"), _("aggregate type"), "#" + _("events"), "#" + _("not done")],
        rows=[
            (_events(each.event_type), each.aggregate_type, str(each.events), str(each.unsettled))
            for each in overview.unrouted
        ],
        empty=_("Every event type that was seen has a listener."),
        needs_attention=any(each.unsettled for each in overview.unrouted),
    )  # fmt: skip


def types(by_type: Sequence[Row], period: Any) -> Section:
    columns = [_("event type"), "#" + _("done"), "#" + _("retried"), "#" + _("deferred"),
               "#" + _("dead"), "#" + _("start p95"), "#" + _("run p50"),
               "#" + _("run p95")]  # fmt: skip
    return Section(
        name="types", title=_("Deliveries by type, %s") % period.title, columns=columns,
        rows=[_type(row) for row in by_type], empty=_("Nothing was delivered."),
    )  # fmt: skip


def _type(row: Row) -> Cells:
    waits, runs = ([row[name] for name in names] for names in (WAIT_COLUMNS, RUN_COLUMNS))
    times = quantile(waits, 0.95), quantile(runs, 0.5), quantile(runs, 0.95)
    return (
        _events(row["event_type"]) if row["event_type"] else _("all others"),
        *(str(row[name]) if row[name] else "" for name in ("done", "retry", "deferred", "dead")),
        *(format_value(each, "seconds") for each in times),
    )


def listeners(overview: Overview) -> Section:
    names = ["event_type", "aggregate_type", "name", "queue", "function"]
    titles = [_("event type"), _("aggregate type"), _("name"), _("queue"), _("listener")]
    if len(overview.queues) == 1:
        names.remove("queue")
        titles.remove(_("queue"))
    return Section(
        name="listeners", title=_("Listeners registered here"), columns=[*titles, _("options")],
        rows=[
            (*(each[name] for name in names), ", ".join(listener_options(each)))
            for each in overview.listeners
        ],
        empty=_("No listener is registered in this process."),
    )  # fmt: skip


def tiles(overview: Overview, charts: Charts) -> list[tuple[str, str, bool]]:
    """Return the headline numbers: title, value, and whether the value needs attention."""
    lag = overview.backlog.lag
    more = "" if overview.backlog.is_whole else "+"
    delivered = charts.charts[0].series[0].latest
    return [
        (_("workers alive"), str(overview.alive), not overview.alive),
        (_("due now"), f"{overview.backlog.due}{more}", False),
        (_("oldest due"), format_seconds(lag), lag > display.LATE_AFTER),
        (_("delivered"), delivered, False),
        (_("blocked streams"), _capped(overview.blocked.count, MAX_BLOCKED_COUNTED),
         bool(overview.blocked.count)),
        (_("dead events"), f"{overview.dead.count}{'' if overview.dead.is_whole else '+'}",
         bool(overview.dead.count)),
    ]  # fmt: skip


def _event(event_id: str, event_type: str) -> SafeString:
    url = reverse(EVENT_URL, args=[quote(event_id)])
    return format_html('<a href="{}" title="{}">{}</a>', url, event_id, event_type)


def _events(event_type: str, **filters: object) -> SafeString:
    query = urlencode({"event_type": event_type, **filters})
    return format_html('<a href="{}?{}">{}</a>', reverse(EVENTS_URL), query, event_type)


def _capped(count: int, most: int) -> str:
    return f"{count}{'+' * (count >= most)}"
