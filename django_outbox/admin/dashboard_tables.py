"""Tables of the dashboard, built from an ``Overview``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..conf import current
from ..inspection.causes import Cause
from ..inspection.holds import Hold
from ..inspection.overview import (
    MAX_BLOCKED_SHOWN,
    BlockedStream,
    Overview,
    TypeBacklog,
    listeners_of,
)
from ..inspection.queues import QueueState
from ..inspection.workers import Loss, WorkerInfo
from ..models import OutboxPause
from ..models.statistics import RUN_COLUMNS, WAIT_COLUMNS, quantile
from . import dashboard_links as links
from . import display
from .charts import format_seconds
from .dashboard_problems import Problem
from .error_groups import shown_title
from .read_only import reverse

MAX_ROWS: Final = 5  # rows of a table
MAX_TYPES: Final = 10  # event types that are shown
MAX_NAMED: Final = 2  # event types of a cause, and listeners of an event type
MAX_MESSAGE: Final = 160  # characters of a cause's message
MIN_QUEUES: Final = 2  # the only queue is not shown, unless something is wrong

Permissions = frozenset[str]  # "pause", "resume"
Cells = Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section with one table, or with a sentence if the table is empty."""

    name: str
    title: str
    columns: Sequence[str]  # a leading # marks a column of numbers; empty: one of buttons
    rows: Sequence[Cells]
    empty: str = ""
    note: str = ""
    needs_attention: bool = False
    is_wide: bool = False
    all_url: str = ""  # the page with all rows
    count: str = ""  # of all rows, if these are not all

    @property
    def heads(self) -> list[tuple[str, bool]]:
        """Return the titles of the columns, and whether they have numbers."""
        return [(each.removeprefix("#"), each.startswith("#")) for each in self.columns]

    @property
    def lines(self) -> list[list[tuple[str, tuple[str, bool]]]]:
        return [[*zip(row, self.heads, strict=True)] for row in self.rows]

    def short(self, most: int) -> Section:
        """Return the section with at most so many rows, and the number of all of them."""
        if len(self.rows) <= most:
            return self
        return replace(self, rows=self.rows[:most], count=self.count or str(len(self.rows)))


def sections(overview: Overview, found: Sequence[Problem], may: Permissions) -> list[Section]:
    """Return the tables with rows: those that a problem names first, then the others."""
    bad = {each.section for each in found if each.is_bad}
    bounded = [
        _dead(overview, may),
        _workers(overview, needs_attention="workers" in bad),
        _suspects(overview),
        _paused(overview, may),
        _blocked(overview),
        _types(overview, needs_attention="types" in bad),
    ]
    every = [*(each.short(MAX_ROWS) for each in bounded), _queues(overview)]
    named = {each.section for each in found}
    shown = [each for each in every if each.rows or each.name in named]
    return sorted(shown, key=lambda each: not each.needs_attention)


# --- what needs a person --------------------------------------------------------------------------


def _dead(overview: Overview, may: Permissions) -> Section:
    others = overview.causes.others
    note = ngettext("%d further cause.", "%d further causes.", others) % others if others else ""
    return Section(
        name="dead",
        title=_("Dead events by cause"),
        is_wide=True,
        columns=[_("cause"), _("event types"), "#" + _("deliveries"), _("last"), ""],
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
    button: SafeString | str = ""
    if "pause" in may and types:
        button = links.pause(types[0], kind="event_type", name=types[0], reason=error)
    return (
        link,
        _named(links.events(each, state="dead") for each in types),
        str(cause.count),
        display.since(_("%s ago"), cause.newest, now),
        button,
    )


def _named(texts: Iterable[str], most: int = MAX_NAMED) -> SafeString:
    """Return the first texts, each on a line, and the number of further ones."""
    every = [*texts]
    named = format_html_join("", "<div>{}</div>", ((each,) for each in every[:most]))
    further = len(every) - most
    return format_html("{}{}", named, _("and %d more") % further if further > 0 else "")


def _paused(overview: Overview, may: Permissions) -> Section:
    end = [""] if "resume" in may else []
    return Section(
        name="paused",
        title=_("Paused"),
        columns=[_("name"), "#" + _("held"), _("since"), _("until"), _("by"), _("reason"), *end],
        rows=[_pause(each, overview.now, may) for each in overview.pauses],
        needs_attention=bool(overview.pauses),
        all_url=reverse(links.PAUSES),
    )


def _pause(each: Hold, now: datetime, may: Permissions) -> Cells:
    label = OutboxPause.Kind(each.kind).label
    name = format_html('<span class="quiet">{}</span> {}', label, each.name)
    reason = format_html(
        '<span class="outbox-message">{}</span>', Truncator(each.reason).chars(MAX_MESSAGE)
    )
    since, until = display.since("%s", each.since, now), display.until(each.until, now)
    end = [links.resume(each.pause_id)] * ("resume" in may)
    return name, str(each.count or ""), since, until, each.by, reason, *end


def _blocked(overview: Overview) -> Section:
    count = overview.blocked.count
    return Section(
        name="blocked",
        title=_("Blocked streams"),
        columns=[_("key"), _("head"), _("next try"), _("error")],
        rows=[_stream(each, overview.now) for each in overview.blocked.streams],
        needs_attention=bool(count),
        all_url=f"{reverse(links.STREAMS)}?state=blocked",
        count=str(count) if count > MAX_BLOCKED_SHOWN else "",
    )


def _stream(each: BlockedStream, now: datetime) -> Cells:
    automatic = display.since(_("in %s"), each.due_at, now)
    next_try = _("not automatically") if each.due_at is None else automatic
    stream = links.stream(each.name, each.key)
    if (head := each.head) is None:
        return stream, "", next_try, ""
    error = display.first_line(head.last_error)
    return stream, links.event(head.pk, display.delivery(head)), next_try, error


# --- workers --------------------------------------------------------------------------------------


def _workers(overview: Overview, *, needs_attention: bool) -> Section:
    """Return the workers, the missing ones first, without those that were replaced long ago."""
    lost, live = len(overview.missing), overview.alive
    counts = {"expected": live + lost, "running": live, "lost": lost}
    title = _("Workers: %(expected)d expected, %(running)d running, %(lost)d lost") % counts
    return Section(
        name="workers",
        title=title if lost else _("Workers"),
        columns=[_("process"), _("last heartbeat"), "#" + _("leased"), _("running")],
        rows=[
            (_process(each), beat, str(each.held), _runs(each, overview.losses))
            for each, beat in _worker_lines(overview)
        ],
        empty=_("No worker is running. Start one: manage.py outbox_worker"),
        needs_attention=needs_attention or not live,
    )


def _worker_lines(overview: Overview) -> Iterator[tuple[WorkerInfo, str | SafeString]]:
    """Yield each worker with its last heartbeat: the missing, the replaced, and the live ones."""
    late = '<span class="outbox-late">{}</span>'
    for each in overview.missing:
        yield each, format_html(late, _("lost, %s") % _beat(each))
    for each in overview.workers:
        if each.is_newly_lost and each not in overview.missing:
            yield each, format_html(late, _("lost and replaced, %s") % _beat(each))
    for each in overview.workers:
        if not each.is_silent:
            yield each, _beat(each)


def _beat(each: WorkerInfo) -> str:
    return _("%s ago") % display.duration(each.heartbeat_age)


def _process(each: WorkerInfo) -> SafeString:
    process = _("process %d") % each.pid
    return format_html('{} <span class="outbox-id">{}</span>', each.hostname, process)


def _runs(each: WorkerInfo, found: Sequence[Loss]) -> SafeString:
    """Return what a worker runs; of a lost one, the events that others found it had leased."""
    leased = [loss for loss in found if any(name == each.id for name, _at in loss.workers)]
    leased.sort(key=lambda loss: -len(loss.workers))  # what other workers lost, too, comes first
    if leased:
        return _named((links.event(loss.id, loss.event_type) for loss in leased), most=1)
    running = (
        format_html("{} {}", links.event(row_id, event_type), display.duration(seconds))
        for event_type, row_id, seconds in each.running
    )
    return _named(running, most=1)


def _suspects(overview: Overview) -> Section:
    """Return the events that lost workers had leased, those of the most workers first."""
    found = sorted(overview.losses, key=lambda each: -len(each.workers))
    return Section(
        name="suspects",
        title=_("Events of lost workers"),
        columns=[_("event"), "#" + _("lost workers"), _("workers")],
        rows=[_suspect(each) for each in found],
        needs_attention=bool(overview.suspects),
    )


def _suspect(each: Loss) -> Cells:
    workers = (f"{links.worker_name(name)} {links.time_of_day(at)}" for name, at in each.workers)
    event = links.event(each.id, each.event_type)
    return event, str(len(each.workers)), _named(workers)


# --- queues, event types ------------------------------------------------------------------


def _queues(overview: Overview) -> Section:
    """Return the table of queues; it has no rows if ``default`` is the only one and is well."""
    states, late = overview.queues, bool(overview.unserved_queues)
    is_shown = len(states) >= MIN_QUEUES or late
    return Section(
        name="queues",
        title=_("Queues and relays"),
        columns=[_("queue"), "#" + _("due"), _("oldest due"), "#" + _("workers"), _("state")],
        rows=[_queue(each) for each in states] if is_shown else [],
        needs_attention=late or any(each.holds for each in states),
    )


def _queue(each: QueueState) -> Cells:
    """Return what is due in a queue; that of a relay has where it sends to."""
    relay = next((found for found in current().relays.values() if found.title == each.name), None)
    sent_to = relay and f"→ {relay.shown_to} ({relay.backend_name})"
    name = format_html('{} <span class="outbox-id">{}</span>', each.name, sent_to or "")
    age = "" if each.oldest_due_age is None else display.duration(each.oldest_due_age)
    states = [
        _("no live worker serves it") if each.is_unserved else "",
        "" if each.is_configured else _('not in OUTBOX["QUEUES"]'),
        _("paused") if each.holds else "",
        f"{_('held')}: {each.held}" if each.held else "",
    ]
    state = format_html_join(", ", "{}", ((text,) for text in states if text))
    return name, str(each.due), age, str(each.workers), state


def _types(overview: Overview, *, needs_attention: bool) -> Section:
    """Return what waits without a key by type, and the deliveries of the last hour."""
    backlog, done = overview.backlog.by_type, {each["listener"]: each for each in overview.types}
    none = TypeBacklog()
    names = sorted({*backlog, *done}, key=lambda each: (-backlog.get(each, none).total, each))
    counts = [_("due"), _("held"), _("leased"), _("retrying"), _("scheduled")]
    times = [_("done in an hour"), _("start p95"), _("run p95")]
    is_whole = overview.backlog.is_whole
    return Section(
        name="types",
        title=_("Event types"),
        is_wide=True,
        columns=[
            _("event type"),
            *("#" + each for each in counts),
            _("oldest due"),
            *("#" + each for each in times),
            _("listeners here"),
        ],
        rows=[
            (
                links.events(each) if each else _("all others"),
                *_backlog(backlog.get(each, none), overview.now),
                *_deliveries(done.get(each)),
                _listeners(overview, each),
            )
            for each in names
        ],
        note="" if is_whole else _("There are more: only those due first are counted."),
        needs_attention=needs_attention,
    )


def _backlog(each: TypeBacklog, now: datetime) -> Cells:
    counts = each.due, each.held, each.leased, each.retrying, each.scheduled
    late = each.since is not None and (now - each.since).total_seconds() > display.LATE_AFTER
    since = display.since("%s", each.since, now, is_late=late)
    return *(str(count or "") for count in counts), since


def _deliveries(row: dict[str, Any] | None) -> Cells:
    if row is None:
        return "", "", ""
    waits, runs = ([row[name] for name in names] for names in (WAIT_COLUMNS, RUN_COLUMNS))
    times = (format_seconds(quantile(each, 0.95)) for each in (waits, runs))
    return str(row["done"] or ""), *times


def _listeners(overview: Overview, event_type: str) -> str:
    if event_type in overview.unrouted:
        return format_html('<span class="outbox-late">{}</span>', _("none"))
    return _named(
        format_html('<span title="{}">{}</span>', each, each.rpartition(".")[2])
        for each in listeners_of(event_type)
    )
