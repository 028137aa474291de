"""Backlog of each pause, which names are known, and which are not; all queries are bounded."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from django.db import connections
from django.utils.translation import gettext

from ..listeners import registry
from ..listeners.outcomes import UNSETTLED
from ..listeners.registry import qualified_name
from ..models import OutboxEvent, OutboxPause, OutboxStream
from ..models.stream_queryset import MAX_BACKLOG
from ..sql import dialect_of
from ..sql.values import CLOSING_KINDS, POSTPONED_FOR

MAX_EVENTS: Final = 10_000  # events scanned at most: postponed, due, and newest ones, each
MAX_STREAMS: Final = 200  # streams whose heads are read

EventCounts = Counter[tuple[str, str]]  # events by event type and aggregate type


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedBacklog:
    """Events and streams that wait for one pause."""

    events: int = 0  # those behind a stream's head count only for the stream's own pause
    streams: int = 0  # streams that a paused head blocks; of a queue, due ones
    is_all: bool = True  # False: there may be more


def backlogs(alias: str, pauses: Iterable[OutboxPause]) -> dict[int, PausedBacklog]:
    """Return the backlogs of these pauses by id, at a cost independent of the table's size."""
    events = OutboxEvent.objects.using(alias)
    scans = [
        list(rows.values_list("event_type", "aggregate_type")[: MAX_EVENTS + 1])
        for rows in (events.postponed().order_by("available_at"), events.due())
    ]
    counts: EventCounts = Counter(pair for scan in scans for pair in scan[:MAX_EVENTS])
    heads, is_all = _count_heads(alias)
    is_all = is_all and all(len(scan) <= MAX_EVENTS for scan in scans)
    pauses = [*pauses]
    queues = _queue_backlogs(alias, {each.name for each in pauses if each.kind in CLOSING_KINDS})
    return {
        each.pk: queues[each.name]
        if each.kind in CLOSING_KINDS
        else _backlog(alias, each, counts, heads, is_all)
        for each in pauses
    }


def _queue_backlogs(alias: str, queues: Collection[str]) -> dict[str, PausedBacklog]:
    if not queues:
        return {}
    connection = connections[alias]
    found = dialect_of(connection).queue_backlogs(
        connection, queues=sorted(queues), most=MAX_EVENTS
    )
    return {
        name: PausedBacklog(
            events=each.events,
            streams=each.streams,
            is_all=MAX_EVENTS not in (each.events, each.streams),
        )
        if (each := found.get(name))
        else PausedBacklog()
        for name in queues
    }


def _backlog(
    alias: str, pause: OutboxPause, events: EventCounts, heads: EventCounts, is_all: bool
) -> PausedBacklog:
    if pause.kind == "stream":
        connection = connections[alias]
        dialect = dialect_of(connection)
        count = dialect.backlogs(connection, keys=[pause.name], most=MAX_BACKLOG)[pause.name]
        return PausedBacklog(events=count, is_all=count < MAX_BACKLOG)
    return PausedBacklog(
        events=sum(n for pair, n in events.items() if _is_paused_by(pause, *pair)),
        streams=sum(n for pair, n in heads.items() if _is_paused_by(pause, *pair)),
        is_all=is_all,
    )


def _is_paused_by(pause: OutboxPause, event_type: str, aggregate_type: str) -> bool:
    if pause.kind == "event_type":
        return event_type == str(pause.name)
    return any(each.title == pause.name for each in registry.route(aggregate_type, event_type))


def _count_heads(alias: str) -> tuple[EventCounts, bool]:
    """Count the heads of waiting streams; return also whether these are all."""
    connection = connections[alias]
    until = dialect_of(connection).clock(connection) + timedelta(seconds=POSTPONED_FOR)
    unleased = (
        OutboxStream.objects.using(alias).streams_only().filter(locked_by=None, due_at__lte=until)
    )
    keys = list(unleased.order_by("-due_at").values_list("pk", flat=True)[: MAX_STREAMS + 1])
    if not keys:
        return Counter(), True
    heads = dialect_of(connection).heads(connection, keys=keys[:MAX_STREAMS], statuses=UNSETTLED)
    rows = OutboxEvent.objects.using(alias).filter(pk__in=[*heads.values()])
    return Counter(rows.values_list("event_type", "aggregate_type")), len(keys) <= MAX_STREAMS


def _known_types(alias: str) -> set[str]:
    newest = OutboxEvent.objects.using(alias).order_by("-pk").values_list("event_type", flat=True)
    registered = (each for listener in registry.listeners() for each in listener.types)
    return {*newest[:MAX_EVENTS], *(each for each in registered if "*" not in each)}


def unknown_name(alias: str, kind: str, name: str) -> str | None:
    """Return why the name is not known: neither registered nor seen. It may still appear."""
    if kind == "stream":
        known = OutboxStream.objects.using(alias).filter(pk=name).exists()
        message = gettext("No event with the key %(name)r was written lately.")
        return None if known else message % {"name": name}
    if kind == "listener":
        found = registry.listeners()
        message = gettext("No listener %(name)r is registered here.")
        named = [each.title for each in found if name in (each.name, qualified_name(each.call))]
        return _fault_unless_known(name, [each.title for each in found], message, named)
    if kind in CLOSING_KINDS:  # pause_error() knows the queues
        return None
    message = gettext("No event type %(name)r is registered here or was seen lately.")
    return _fault_unless_known(name, sorted(_known_types(alias)), message)


def _fault_unless_known(
    name: str, known: list[str], message: str, near: list[str] | None = None
) -> str | None:
    if name in known:
        return None
    near = near or difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = [gettext("Did you mean %s?") % ", ".join(map(repr, near))] if near else []
    return " ".join([message % {"name": name}, *hint])
