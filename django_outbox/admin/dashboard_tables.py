"""Tables of the console, built from an ``Overview``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..inspection.causes import Cause
from ..inspection.holds import DEAD, Hold
from ..inspection.overview import Overview
from ..inspection.problems import Problem
from ..inspection.queues import ListenerState, QueueState
from ..inspection.sentences import number, precise
from ..inspection.workers import Loss, WorkerInfo
from ..models import OutboxPause
from . import display, links, redaction
from .error_groups import shown_title

MAX_ROWS: Final = 5  # rows of a table
MAX_LISTENERS: Final = 15  # rows of the table of listeners
MAX_NAMED: Final = 2  # event types or listeners of a cause
MAX_MESSAGE: Final = 160  # characters of a message

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

    def short(self, most: int = MAX_ROWS) -> Section:
        """Return the section with at most so many rows, and the number of all of them."""
        if len(self.rows) <= most:
            return self
        return replace(self, rows=self.rows[:most], count=self.count or str(len(self.rows)))

    def without_buttons(self) -> Section:
        rows = [each[:-1] for each in self.rows]
        return replace(self, rows=rows, columns=self.columns[:-1])


def sections(
    overview: Overview, problems: Sequence[Problem], permissions: Permissions
) -> list[Section]:
    """Return the tables: those of problems first; but for queues and workers, no empty ones."""
    bad = {each.kind for each in problems if each.is_bad}
    with_pause = [
        _dead(overview).short(),
        _queues(overview, needs_attention=bool(bad & {"late", "unserved"})),
        _listeners(overview).short(MAX_LISTENERS),
    ]
    held = _held(overview).short()
    every = [
        *(each if "pause" in permissions else each.without_buttons() for each in with_pause),
        held if "resume" in permissions else held.without_buttons(),
        _workers(overview, needs_attention=bool(bad & {"lost", "no_worker", "rescued"})).short(),
        _blocked(overview).short(),
    ]
    shown = [each for each in every if each.rows or each.name == "workers"]
    return sorted(shown, key=lambda each: not each.needs_attention)


# --- queues and listeners -------------------------------------------------------------------------


def _queues(overview: Overview, *, needs_attention: bool) -> Section:
    times = ["#" + _("wait p95"), "#" + _("run p95"), "#" + _("threads busy"), "#" + _("workers")]
    counts = ["#" + _("due"), "#" + _("late by"), "#" + _("held")]
    return Section(
        name="queues",
        title=_("Queues and relays"),
        is_wide=True,
        columns=[_("queue"), *counts, *times, ""],
        rows=[_queue(each) for each in overview.queues],
        needs_attention=needs_attention,
    )


def _queue(each: QueueState) -> Cells:
    """Return what is due in a queue; that of a relay has where it sends to."""
    relay = each.relay
    about = [
        f"→ {relay.shown_to} ({relay.backend_name})" if relay else "",
        _("no live worker serves it") if each.is_unserved else "",
        "" if each.is_configured else _('not in OUTBOX["QUEUES"]'),
        _("paused") if each.holds else "",
    ]
    busy, threads = each.threads
    return (
        format_html(
            '{} <span class="outbox-id">{}</span>', each.name, ", ".join(filter(None, about))
        ),
        number(each.due),
        *_waiting(each),
        *_times(each),
        _("%(busy)d of %(all)d") % {"busy": busy, "all": threads} if threads else "",
        str(each.workers),
        "" if "queue" in each.holds else _pause_button("queue", each.name),
    )


def _listeners(overview: Overview) -> Section:
    """Return what waits for each listener, and how it did in the last five minutes."""
    counts = [_("due"), _("late by"), _("held"), _("done/min")]
    times = [_("wait p95"), _("run p95"), _("threads busy")]
    return Section(
        name="listeners",
        title=_("Listeners"),
        is_wide=True,
        columns=[_("listener"), _("queue"), *("#" + each for each in (*counts, *times)), ""],
        rows=[_listener(each, overview) for each in overview.listeners],
    )


def _listener(each: ListenerState, overview: Overview) -> Cells:
    unrouted = "" if each not in overview.unrouted else _("no listener here")
    title = each.listener or (_("with a key") if each.due or each.held else _("all others"))
    kind = "listener" if each.is_routed else "event_type"
    is_held = any((one.kind, one.name) == (kind, each.listener) for one in overview.holds)
    return (
        format_html('{} <span class="outbox-late">{}</span>', title, unrouted),
        each.queue,
        number(each.due) if each.due else "",
        *_waiting(each),
        number(each.done_per_minute) if each.done_per_minute else "",
        *_times(each),
        f"{each.threads_busy:.1f}" if each.threads_busy else "",
        "" if is_held else _pause_button(kind, each.listener),
    )


def _waiting(each: QueueState | ListenerState) -> Iterator[str]:
    """Yield since when the oldest is due, and how many are held."""
    seconds, cell = each.oldest_due_age or 0.0, '<span class="{}">{}</span>'
    late = "outbox-late" if seconds > display.LATE_AFTER else ""
    is_due = each.oldest_due_age is not None
    yield format_html(cell, late, display.duration(seconds)) if is_due else ""
    yield number(each.held) if each.held else ""


def _times(each: QueueState | ListenerState) -> list[str]:
    return ["" if each is None else precise(each) for each in (each.wait_p95, each.run_p95)]


def _pause_button(kind: str, name: str, **reason: str) -> str:
    """Return the button that pauses this; empty without a name."""
    return links.pause(name, kind=kind, name=name, **reason) if name else ""


# --- what needs a person --------------------------------------------------------------------------


def _dead(overview: Overview) -> Section:
    causes = overview.causes
    others = len(causes.causes) - MAX_ROWS + causes.others
    note = ngettext("%s further cause.", "%s further causes.", others) % number(others)
    return Section(
        name="dead",
        title=_("Dead events by cause"),
        is_wide=True,
        columns=[
            _("cause"),
            _("listeners"),
            "#" + _("deliveries"),
            "#" + _("last hour"),
            _("last"),
            "",
        ],
        rows=[_cause(each, overview) for each in causes.causes[:MAX_ROWS]],
        note=note if others > 0 else "",
        needs_attention=bool(causes.total),
        all_url=links.url("outboxevent_groups"),
    )


def _cause(cause: Cause, overview: Overview) -> Cells:
    error, message = shown_title(cause)
    link = format_html(
        '<a href="{}">{}</a> <span class="outbox-message">{}</span>',
        links.cause_url(cause.digest),
        error or "–",
        Truncator(message).chars(MAX_MESSAGE),
    )
    names = [each for each, _count in (cause.listeners or cause.types).most_common()]
    kind = "listener" if cause.listeners else "event_type"
    return (
        link,
        _named(names),
        number(cause.count),
        number(cause.lately) if cause.lately else "",
        display.since(_("%s ago"), cause.newest, overview.now),
        _pause_button(kind, names[0], **({"reason": error} if error else {})),
    )


def _named(texts: Iterable[str], most: int = MAX_NAMED) -> SafeString:
    """Return the first texts, each on a line, and the number of further ones."""
    every = [*texts]
    named = format_html_join("", "<div>{}</div>", ((each,) for each in every[:most]))
    further = len(every) - most
    return format_html("{}{}", named, _("and %d more") % further if further > 0 else "")


def _held(overview: Overview) -> Section:
    """Return what is held, by whom and until when."""
    columns = [_("what"), "#" + _("held"), _("oldest"), _("since"), _("until"), _("by")]
    return Section(
        name="held",
        title=_("Held"),
        is_wide=True,
        columns=[*columns, _("reason"), ""],
        rows=[_hold(each, overview) for each in overview.holds],
        needs_attention=bool(overview.holds),
        all_url=links.url("outboxpause_changelist"),
    )


def _hold(each: Hold, overview: Overview) -> Cells:
    is_dead = each.kind == DEAD
    label = _("dead event") if is_dead else OutboxPause.Kind(each.kind).label
    reason = Truncator(redaction.hide_in_text(each.reason)).chars(MAX_MESSAGE)
    return (
        format_html('<span class="quiet">{}</span> {}', label, each.name),
        number(each.count) if each.count else "",
        display.duration(each.age) if each.count else "",
        display.since("%s", each.since, overview.now),
        display.until(each.until, overview.now),
        each.by,
        format_html('<span class="outbox-message">{}</span>', reason),
        links.event(each.id, _("Open")) if is_dead else links.resume(each.id),
    )


def _blocked(overview: Overview) -> Section:
    count = overview.blocked_count
    return Section(
        name="blocked",
        title=_("Blocked keys"),
        columns=[_("key"), _("head"), "#" + _("behind it"), _("next try"), _("error")],
        rows=[_stream(each, overview) for each in overview.blocked],
        needs_attention=bool(count),
        all_url=links.url("outboxstream_changelist", state="blocked"),
        count=number(count) if count > len(overview.blocked) else "",
    )


def _stream(each: Any, overview: Overview) -> Cells:
    automatic = display.since(_("in %s"), each.due_at, overview.now)
    next_try = _("not automatically") if each.due_at is None else automatic
    stream, behind = links.stream(each.pk, each.key), number(max(each.summary.backlog - 1, 0))
    if (head := each.summary.head) is None:
        return stream, "", behind, next_try, ""
    error = display.first_line(head.last_error)
    return stream, links.event(head.pk, display.delivery(head)), behind, next_try, error


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
            (_process(each), beat, number(each.held), _runs(each, overview.losses))
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
        format_html(
            "{} {}",
            links.event(run.id, run.event_type),
            display.duration(run.seconds + each.heartbeat_age),
        )
        for run in each.running
    )
    return _named(running, most=1)
