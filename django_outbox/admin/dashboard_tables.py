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
from ..inspection.listeners import options
from ..inspection.overview import COUNTED, NEWEST, Cause, Overview, Waiting
from ..inspection.workers import SeenWorker
from ..models.statistics import RUNS, WAITS, quantile
from ..models.stream_queryset import BACKLOG
from . import display
from .charts import Charts, Row, shown, time

EVENTS: Final = "admin:django_outbox_outboxevent_changelist"
EVENT: Final = "admin:django_outbox_outboxevent_change"
STREAM: Final = "admin:django_outbox_outboxstream_change"

Cells = Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A section with one table, or with a sentence if the table is empty."""

    name: str
    title: str
    columns: Sequence[str]  # a leading # marks a column of numbers
    rows: Sequence[Cells]
    empty: str
    note: str = ""
    is_wrong: bool = False  # needs attention

    @property
    def heads(self) -> list[tuple[str, bool]]:
        return [(each.removeprefix("#"), each.startswith("#")) for each in self.columns]

    @property
    def lines(self) -> list[list[tuple[str, bool]]]:
        numbers = [is_number for _title, is_number in self.heads]
        return [[*zip(row, numbers, strict=True)] for row in self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem that needs attention, and the section that shows it."""

    text: str
    part: str
    is_bad: bool  # True: events are not delivered; False: not urgent


def problems(seen: Overview) -> list[Problem]:
    """Return the problems, the worst first."""
    return [*_bad(seen), *_doubtful(seen)]


def _bad(seen: Overview) -> Iterator[Problem]:
    if current().MODE == "writer_only":
        return  # its events do not wait for a worker
    if not seen.alive:
        yield Problem(text=_("No worker is alive."), part="workers", is_bad=True)
    if seen.backlog.lag > display.LATE:
        text = _("The oldest due event has waited for %s.") % display.duration(seen.backlog.lag)
        yield Problem(text=text, part="backlog", is_bad=True)


def _doubtful(seen: Overview) -> Iterator[Problem]:
    if count := len(seen.workers) - seen.alive:
        text = ngettext("%d worker is silent.", "%d workers are silent.", count)
        yield Problem(text=text % count, part="workers", is_bad=False)
    if count := len(seen.pauses):
        text = ngettext("%d pause is active.", "%d pauses are active.", count)
        yield Problem(text=text % count, part="paused", is_bad=False)
    if count := seen.blocked.count:
        text = ngettext("%s stream is blocked.", "%s streams are blocked.", count)
        yield Problem(text=text % _capped(count, COUNTED), part="blocked", is_bad=False)
    if count := seen.deaths.count:
        text = ngettext("%s event is dead.", "%s events are dead.", count)
        number = f"{count}{'' if seen.deaths.is_whole else '+'}"
        yield Problem(text=text % number, part="dead", is_bad=False)
    if count := sum(bool(each.unsettled) for each in seen.unheard):
        text = ngettext("%d event type has no listener.", "%d event types have no listener.", count)
        yield Problem(text=text % count, part="unheard", is_bad=False)


def parts(seen: Overview, by_type: Sequence[Row], period: Any) -> dict[str, Part]:
    """Return every section by its name."""
    wrong = {each.part for each in problems(seen)}
    found = [
        workers(seen, "workers" in wrong),
        paused(seen),
        blocked(seen),
        deaths(seen),
        backlog(seen, "backlog" in wrong),
        unheard(seen),
        types(by_type, period),
        listeners(seen),
    ]
    return {each.name: each for each in found}


def workers(seen: Overview, is_wrong: bool) -> Part:
    return Part(
        name="workers",
        title=_("Workers"),
        columns=[_("process"), _("last heartbeat"), _("since"), "#" + _("holds"), _("runs")],
        rows=[_worker(each, seen.now) for each in seen.workers],
        empty=_("No worker is running. Start one: manage.py outbox_worker"),
        is_wrong=is_wrong,
    )


def _worker(each: SeenWorker, now: datetime) -> Cells:
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


def paused(seen: Overview) -> Part:
    return Part(
        name="paused", title=_("Paused"),
        columns=[_("kind"), _("name"), _("since"), _("by"), _("reason")],
        rows=[
            (each.get_kind_display(), each.name, display.since("%s", each.paused_at, seen.now),
             each.paused_by, each.reason)
            for each in seen.pauses
        ],
        empty=_("Nothing is paused."), is_wrong=bool(seen.pauses),
    )  # fmt: skip


def blocked(seen: Overview) -> Part:
    columns = [_("key"), _("head"), "#" + _("attempts"), _("first due"), "#" + _("waiting"),
               _("next try"), _("error")]  # fmt: skip
    note = ""
    if seen.blocked.count > len(seen.blocked.streams):
        note = _("Showing %(shown)d of %(all)s.") % {
            "shown": len(seen.blocked.streams), "all": _capped(seen.blocked.count, COUNTED),
        }  # fmt: skip
    return Part(
        name="blocked", title=_("Blocked streams"), columns=columns, note=note,
        rows=[_stream(*each, seen.now) for each in seen.blocked.streams],
        empty=_("No stream is blocked."), is_wrong=bool(seen.blocked.count),
    )  # fmt: skip


def _stream(stream: Any, place: Any, now: datetime) -> Cells:
    head, due = place.head, stream.due_at
    link = format_html('<a href="{}">{}</a>', reverse(STREAM, args=[quote(stream.key)]), stream.key)
    next_try = _("not automatically") if due is None else display.since(_("in %s"), due, now)
    waiting = _capped(place.backlog, BACKLOG)
    if head is None:  # settled between two queries
        return link, "", "", "", waiting, next_try, ""
    return (
        link, _event(head.pk, head.event_type), str(head.attempts),
        display.since(_("%s ago"), head.first_due_at, now), waiting, next_try,
        display.first_line(head.last_error),
    )  # fmt: skip


def deaths(seen: Overview) -> Part:
    found = sorted(seen.deaths.by_cause.items(), key=lambda each: (-each[1][0], each[0].event_type))
    notes = []
    if not seen.deaths.is_whole:
        notes.append(_("Only the newest %d dead events are counted.") % seen.deaths.count)
    if not seen.deaths.is_complete:
        limit = {"limit": NEWEST}
        notes.append(_("Of events with a key, only the newest %(limit)d were searched.") % limit)
    return Part(
        name="dead", title=_("Dead events by cause"),
        columns=[_("event type"), _("listener"), _("error"), "#" + _("events"), _("last")],
        rows=[_cause(cause, count, last, seen.now) for cause, (count, last) in found],
        note=" ".join(notes),
        empty=_("No event is dead."), is_wrong=bool(seen.deaths.count),
    )  # fmt: skip


def _cause(cause: Cause, count: int, last: datetime | None, now: datetime) -> Cells:
    link = _events(cause.event_type, state="dead")
    return link, cause.listener, cause.error, str(count), display.since(_("%s ago"), last, now)


def backlog(seen: Overview, is_wrong: bool) -> Part:
    columns = [_("event type"), "#" + _("due"), "#" + _("held"), "#" + _("retrying"),
               "#" + _("scheduled"), "#" + _("in streams"), _("oldest due")]  # fmt: skip
    found = sorted(seen.backlog.by_type.items(), key=lambda each: (-each[1].total, each[0]))
    note = _("There are more: only those due first are counted.")
    return Part(
        name="backlog", title=_("Waiting by type"), columns=columns,
        rows=[_waiting(event_type, each, seen.now) for event_type, each in found],
        note="" if seen.backlog.is_whole else note,
        empty=_("No events are waiting."), is_wrong=is_wrong,
    )  # fmt: skip


def _waiting(event_type: str, each: Waiting, now: datetime) -> Cells:
    counts = each.due, each.held, each.retrying, each.scheduled, each.in_streams
    late = each.since is not None and (now - each.since).total_seconds() > display.LATE
    since = display.since("%s", each.since, now, is_late=late)
    return _events(event_type), *(str(count) if count else "" for count in counts), since


def unheard(seen: Overview) -> Part:
    return Part(
        name="unheard", title=_("Event types without a listener here"),
        columns=[_("event type"), _("aggregate type"), "#" + _("events"), "#" + _("not done")],
        rows=[
            (_events(each.event_type), each.aggregate_type, str(each.events), str(each.unsettled))
            for each in seen.unheard
        ],
        empty=_("Every event type that was seen has a listener."),
        is_wrong=any(each.unsettled for each in seen.unheard),
    )  # fmt: skip


def types(by_type: Sequence[Row], period: Any) -> Part:
    columns = [_("event type"), "#" + _("done"), "#" + _("retried"), "#" + _("deferred"),
               "#" + _("dead"), "#" + _("start p95"), "#" + _("run p50"),
               "#" + _("run p95")]  # fmt: skip
    return Part(
        name="types", title=_("Deliveries by type, %s") % period.title, columns=columns,
        rows=[_type(row) for row in by_type], empty=_("Nothing was delivered."),
    )  # fmt: skip


def _type(row: Row) -> Cells:
    waits, runs = ([row[name] for name in names] for names in (WAITS, RUNS))
    times = quantile(waits, 0.95), quantile(runs, 0.5), quantile(runs, 0.95)
    return (
        _events(row["event_type"]) if row["event_type"] else _("all others"),
        *(str(row[name]) if row[name] else "" for name in ("done", "retry", "deferred", "dead")),
        *(shown(each, "seconds") for each in times),
    )


def listeners(seen: Overview) -> Part:
    return Part(
        name="listeners", title=_("Listeners registered here"),
        columns=[_("event type"), _("aggregate type"), _("name"), _("listener"), _("options")],
        rows=[
            (each["event_type"], each["aggregate_type"], each["name"], each["function"],
             ", ".join(options(each)))
            for each in seen.listeners
        ],
        empty=_("No listener is registered in this process."),
    )  # fmt: skip


def tiles(seen: Overview, drawn: Charts) -> list[tuple[str, str, bool]]:
    """Return the headline numbers: title, value, and whether the value needs attention."""
    lag = seen.backlog.lag
    more = "" if seen.backlog.is_whole else "+"
    delivered = drawn.charts[0].series[0].latest
    return [
        (_("workers alive"), str(seen.alive), not seen.alive),
        (_("due now"), f"{seen.backlog.due}{more}", False),
        (_("oldest due"), time(lag), lag > display.LATE),
        (_("delivered"), delivered, False),
        (_("blocked streams"), _capped(seen.blocked.count, COUNTED), bool(seen.blocked.count)),
        (_("dead events"), f"{seen.deaths.count}{'' if seen.deaths.is_whole else '+'}",
         bool(seen.deaths.count)),
    ]  # fmt: skip


def _event(event_id: str, event_type: str) -> SafeString:
    url = reverse(EVENT, args=[quote(event_id)])
    return format_html('<a href="{}" title="{}">{}</a>', url, event_id, event_type)


def _events(event_type: str, **filters: object) -> SafeString:
    query = urlencode({"event_type": event_type, **filters})
    return format_html('<a href="{}?{}">{}</a>', reverse(EVENTS), query, event_type)


def _capped(count: int, most: int) -> str:
    return f"{count}{'+' * (count >= most)}"
