"""Tables of the dashboard that have a page of their own, where all rows are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from django.db import connections
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..inspection.listeners import describe_listeners, unrouted_types
from ..inspection.losses import Loss, losses
from ..inspection.overview import BacklogByType, Overview, TypeBacklog, full_backlog
from ..inspection.queues import queue_states
from ..inspection.workers import WorkerInfo, missing
from ..inspection.workers import workers as load_workers
from ..models.statistics import RUN_COLUMNS, WAIT_COLUMNS, quantile
from ..sql import dialect_of
from . import dashboard_links as links
from . import display
from .charts import Row, format_value
from .dashboard_queues import queue_table, relay_table
from .dashboard_section import Cells, Section

MAX_EVENTS_NAMED: Final = 3  # events that a worker ran


def full_tables() -> dict[str, Callable[[str], Section]]:
    """Return the tables by name; each reads a database. Its name is part of its URL."""
    return {
        "workers": _all_workers,
        "backlog": _all_waiting,
        "queues": _all_queues,
        "relays": _all_relays,
        "unrouted": _unrouted,
        "listeners": _listeners,
        "suspects": _suspects,
    }


def _clock(alias: str) -> datetime:
    return dialect_of(connections[alias]).clock(connections[alias])


# --- workers --------------------------------------------------------------------------------------


def workers(overview: Overview, *, needs_attention: bool) -> Section:
    """Return the workers, the missing ones first, without those that were replaced long ago."""
    known = [each for each in overview.workers if each.is_newly_lost or not each.is_silent]
    lines = _worker_lines(known, overview.missing)
    return Section(
        name="workers",
        title=_workers_title(overview.workers, overview.missing),
        columns=[_("process"), _("last heartbeat"), _("running")],
        rows=[(_process(each), beat, _runs(each, overview.losses, most=1)) for each, beat in lines],
        empty=_("No worker is running. Start one: manage.py outbox_worker"),
        needs_attention=needs_attention or not overview.alive,
        all_url=links.table_url("workers"),
    )


def _all_workers(alias: str) -> Section:
    now = _clock(alias)
    known = load_workers(alias, now)
    lost, found = missing(known), losses(alias, now)
    return Section(
        name="workers",
        title=_workers_title(known, lost),
        columns=[
            _("process"),
            _("last heartbeat"),
            _("since"),
            "#" + _("leased"),
            _("queues"),
            _("running"),
        ],
        rows=[
            (
                _process(each),
                beat,
                display.since("%s", each.started_at, now),
                str(each.held),
                _("all") if each.queues is None else ", ".join(each.queues),
                _runs(each, found, most=MAX_EVENTS_NAMED),
            )
            for each, beat in _worker_lines(known, lost)
        ],
        empty=_("No worker is running. Start one: manage.py outbox_worker"),
    )


def _workers_title(known: Sequence[WorkerInfo], lost: Sequence[WorkerInfo]) -> str:
    if not lost:
        return _("Workers")
    running = sum(not each.is_silent for each in known)
    return _("Workers: %(expected)d expected, %(running)d running, %(lost)d lost") % {
        "expected": running + len(lost),
        "running": running,
        "lost": len(lost),
    }


def _worker_lines(
    known: Sequence[WorkerInfo], lost: Sequence[WorkerInfo]
) -> Iterator[tuple[WorkerInfo, str | SafeString]]:
    """Yield each worker with its last heartbeat: the missing, the replaced, and the live ones."""
    replaced = [each for each in known if each.is_silent and each not in lost]
    late = '<span class="outbox-late">{}</span>'
    for each in lost:
        yield each, format_html(late, _("lost, %s") % _beat(each))
    for each in replaced:
        yield each, format_html(late, _("lost and replaced, %s") % _beat(each))
    for each in known:
        if not each.is_silent:
            yield each, _beat(each)


def _beat(each: WorkerInfo) -> str:
    return _("%s ago") % display.duration(each.heartbeat_age)


def _process(each: WorkerInfo) -> SafeString:
    return format_html(
        '{} <span class="outbox-id">{}</span>', each.hostname, _("process %d") % each.pid
    )


def _runs(each: WorkerInfo, found: Sequence[Loss], *, most: int) -> SafeString | str:
    """Return what a worker runs; of a lost one, the events that others found it had leased."""
    leased = [loss for loss in found if any(name == each.id for name, _at in loss.workers)]
    leased.sort(key=lambda loss: -len(loss.workers))  # what other workers lost, too, comes first
    named = [(links.event(loss.event_id, loss.event_type), "") for loss in leased]
    if not named:
        named = [
            (links.event(event_id, event_type), display.duration(seconds))
            for event_type, event_id, seconds in each.running
        ]
    further = len(named) - most
    more = _("and %d more") % further if further > 0 else ""
    return format_html("{} {}", format_html_join(" ", "<div>{} {}</div>", named[:most]), more)


def _suspects(alias: str) -> Section:
    """Return the events that lost workers had leased, those of the most workers first."""
    found = sorted(losses(alias, _clock(alias)), key=lambda each: -len(each.workers))
    return Section(
        name="suspects",
        title=_("Events of lost workers"),
        columns=[_("event"), "#" + _("lost workers"), _("workers"), _("state")],
        rows=[
            (
                links.event(each.event_id, each.event_type),
                str(len(each.workers)),
                format_html_join(
                    "",
                    "<div>{} {}</div>",
                    ((links.worker_name(name), links.time_of_day(at)) for name, at in each.workers),
                ),
                _("not settled since then") if each.is_open else _("settled since then"),
            )
            for each in found
        ],
        empty=_("No event was leased by a lost worker lately."),
    )


# --- events ---------------------------------------------------------------------------------------


def waiting(backlog: BacklogByType, now: datetime, *, needs_attention: bool = False) -> Section:
    """Return what waits without a key, by type."""
    columns = [
        _("event type"),
        "#" + _("due"),
        "#" + _("leased"),
        "#" + _("retrying"),
        "#" + _("scheduled"),
        _("oldest due"),
    ]
    return Section(
        name="backlog",
        title=_("Waiting by type"),
        columns=columns,
        rows=[_waiting(name, each, now) for name, each in _sorted(backlog)],
        note="" if backlog.is_whole else _("There are more: only those due first are counted."),
        empty=_("No events are waiting."),
        needs_attention=needs_attention,
        all_url=links.table_url("backlog"),
    )


def _all_waiting(alias: str) -> Section:
    now, backlog = _clock(alias), full_backlog(alias)
    columns = [
        _("event type"),
        "#" + _("due"),
        "#" + _("leased"),
        "#" + _("retrying"),
        "#" + _("scheduled"),
        _("oldest due"),
        "#" + _("in streams"),
    ]
    rows = [
        (*_waiting(name, each, now), str(each.in_streams or "")) for name, each in _sorted(backlog)
    ]
    return Section(
        name="backlog",
        title=_("Waiting by type"),
        columns=columns,
        rows=rows,
        note="" if backlog.is_whole else _("There are more: only those due first are counted."),
        empty=_("No events are waiting."),
    )


def _sorted(backlog: BacklogByType) -> list[tuple[str, TypeBacklog]]:
    return sorted(backlog.by_type.items(), key=lambda each: (-each[1].total, each[0]))


def _waiting(event_type: str, each: TypeBacklog, now: datetime) -> Cells:
    counts = each.due, each.held, each.retrying, each.scheduled
    late = each.since is not None and (now - each.since).total_seconds() > display.LATE_AFTER
    since = display.since("%s", each.since, now, is_late=late)
    return links.events(event_type), *(str(count) if count else "" for count in counts), since


def _unrouted(alias: str) -> Section:
    return Section(
        name="unrouted",
        title=_("Event types without a listener here"),
        columns=[_("event type"), _("aggregate type"), "#" + _("events"), "#" + _("not done")],
        rows=[
            (
                links.events(each.event_type),
                each.aggregate_type,
                str(each.events),
                str(each.unsettled),
            )
            for each in unrouted_types(alias)
        ],
        empty=_("Every event type that was seen has a listener."),
    )


def types(by_type: Sequence[Row], period: Any) -> Section:
    columns = [
        _("event type"),
        "#" + _("done"),
        "#" + _("retried"),
        "#" + _("deferred"),
        "#" + _("dead"),
        "#" + _("start p95"),
        "#" + _("run p50"),
        "#" + _("run p95"),
    ]
    return Section(
        name="types",
        title=_("Deliveries by type, %s") % period.title,
        columns=columns,
        rows=[_type(row) for row in by_type],
        empty=_("Nothing was delivered."),
    )


def _type(row: Row) -> Cells:
    waits, runs = ([row[name] for name in names] for names in (WAIT_COLUMNS, RUN_COLUMNS))
    times = quantile(waits, 0.95), quantile(runs, 0.5), quantile(runs, 0.95)
    return (
        links.events(row["event_type"]) if row["event_type"] else _("all others"),
        *(str(row[name]) if row[name] else "" for name in ("done", "retry", "deferred", "dead")),
        *(format_value(each, "seconds") for each in times),
    )


# --- queues, relays, listeners --------------------------------------------------------------------


def _all_queues(alias: str) -> Section:
    return queue_table(queue_states(alias, load_workers(alias, _clock(alias))))


def _all_relays(alias: str) -> Section:
    now = _clock(alias)
    return relay_table(queue_states(alias, load_workers(alias, now)), now)


def _listeners(alias: str) -> Section:
    names = ["event_type", "aggregate_type", "name", "queue", "listener"]
    titles = [_("event type"), _("aggregate type"), _("name"), _("queue"), _("listener")]
    return Section(
        name="listeners",
        title=_("Listeners registered here"),
        columns=[*titles, _("options")],
        rows=[
            (*(each[name] for name in names), ", ".join(each["options"]))
            for each in describe_listeners()
        ],
        empty=_("No listener is registered in this process."),
    )
