"""Backlog of each pause, and a warning for unknown names; all queries are bounded."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from django.db import connections
from django.utils.translation import gettext

from ..listeners import registry
from ..listeners.outcomes import UNSETTLED
from ..models import OutboxEvent, OutboxPause, OutboxStream
from ..models.stream_queryset import BACKLOG
from ..sql import dialect_of
from ..sql.values import POSTPONED_FOR

MOST: Final = 10_000  # events scanned at most: postponed, due, and newest ones, each
STREAMS: Final = 200  # streams whose heads are read

Kinds = Counter[tuple[str, str]]  # events by event type and aggregate type


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Events and streams that wait for one pause."""

    events: int = 0  # those behind a stream's head count only for the stream's own pause
    streams: int = 0  # streams that a paused head blocks
    is_all: bool = True  # False: there may be more


def backlogs(alias: str, pauses: Iterable[OutboxPause]) -> dict[int, Backlog]:
    """Return the backlogs of these pauses by id, at a cost independent of the table's size."""
    events = OutboxEvent.objects.using(alias)
    looks = [
        list(rows.values_list("event_type", "aggregate_type")[: MOST + 1])
        for rows in (events.postponed().order_by("available_at"), events.due())
    ]
    found: Kinds = Counter(pair for look in looks for pair in look[:MOST])
    heads, is_all = _heads(alias)
    is_all = is_all and all(len(look) <= MOST for look in looks)
    return {each.pk: _backlog(alias, each, found, heads, is_all) for each in pauses}


def _backlog(alias: str, pause: OutboxPause, events: Kinds, heads: Kinds, is_all: bool) -> Backlog:
    if pause.kind == "stream":
        connection = connections[alias]
        dialect = dialect_of(connection)
        count = dialect.backlogs(connection, keys=[pause.name], most=BACKLOG)[pause.name]
        return Backlog(events=count, is_all=count < BACKLOG)
    return Backlog(
        events=sum(n for pair, n in events.items() if _is_of(pause, *pair)),
        streams=sum(n for pair, n in heads.items() if _is_of(pause, *pair)),
        is_all=is_all,
    )


def _is_of(pause: OutboxPause, event_type: str, aggregate_type: str) -> bool:
    if pause.kind == "event_type":
        return event_type == str(pause.name)
    return any(each.title == pause.name for each in registry.route(aggregate_type, event_type))


def _heads(alias: str) -> tuple[Kinds, bool]:
    """Count the heads of waiting streams; return also whether these are all."""
    connection = connections[alias]
    until = dialect_of(connection).clock(connection) + timedelta(seconds=POSTPONED_FOR)
    free = OutboxStream.objects.using(alias).real().filter(locked_by=None, due_at__lte=until)
    keys = list(free.order_by("-due_at").values_list("pk", flat=True)[: STREAMS + 1])
    if not keys:
        return Counter(), True
    heads = dialect_of(connection).heads(connection, keys=keys[:STREAMS], statuses=UNSETTLED)
    rows = OutboxEvent.objects.using(alias).filter(pk__in=[*heads.values()])
    return Counter(rows.values_list("event_type", "aggregate_type")), len(keys) <= STREAMS


def unknown_name(alias: str, kind: str, name: str) -> str | None:
    """Return a warning if the name is not registered and was not seen; it may still appear."""
    if kind == "stream":
        known = OutboxStream.objects.using(alias).filter(pk=name).exists()
        said = gettext("No event with the key %(name)r was written lately.")
        return None if known else said % {"name": name}
    if kind == "listener":
        said = gettext("No listener %(name)r is registered here.")
        return _not_among(name, [each.title for each in registry.listeners()], said)
    types = {each.event_type for each in registry.listeners()}
    newest = OutboxEvent.objects.using(alias).order_by("-pk").values_list("event_type", flat=True)
    types.update(newest[:MOST])
    said = gettext("No event type %(name)r is registered here or was seen lately.")
    return _not_among(name, sorted(types), said)


def _not_among(name: str, known: list[str], said: str) -> str | None:
    if name in known:
        return None
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = [gettext("Did you mean %s?") % ", ".join(map(repr, near))] if near else []
    return " ".join([said % {"name": name}, *hint])
