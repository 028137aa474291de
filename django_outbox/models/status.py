"""How an outbox is doing: one look at a bounded cost, and what is wrong with what it saw."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.db import connections
from django.db.models import QuerySet
from django.db.models.functions import Substr

from .. import dialects
from ..conf import current
from ..outcomes import Status
from . import OutboxEvent, OutboxPause, OutboxStream, OutboxWorker
from .counts import counts
from .streams import Place

MOST: Final = 10_000  # due and leased events that are counted
SHOWN: Final = 20  # blocked streams
PAUSES: Final = 100  # that are listed
LINE: Final = 200  # characters of an error

Report = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From where on an outbox is unwell; None: it never is on that account."""

    max_age: float | None = None  # seconds that the oldest due event has waited
    max_due: int | None = None
    max_dead: int | None = None
    max_blocked: int | None = None
    min_workers: int | None = None


def status(alias: str) -> Report:
    """Return what is in the outbox of this database, for people and monitors.

    Ages are seconds by the database's clock. Counts of rows end at a limit, see the reference.
    """
    events = OutboxEvent.objects.using(alias)
    streams = OutboxStream.objects.using(alias)
    now = dialects.of(connections[alias]).clock(connections[alias])
    found = counts(alias)
    ages = [each for each in (events.oldest_pending_age(), streams.oldest_due_age()) if each]
    return {
        "counts": found.numbers,
        "at_least": [*found.at_least],
        "estimated": [*found.estimated],
        "due": _capped(events.due()) + _capped(streams.due()),
        "leased": _capped(events.leased()) + _capped(streams.leased()),
        "oldest_pending_age": round(max(ages), 3) if ages else None,
        "dead": _dead(events.filter(pk__in=found.dead)),
        "streams": {
            "due": _capped(streams.due()),
            "leased": _capped(streams.leased()),
            "blocked": _capped(streams.blocked()),
            "heads": _heads(alias, now),
        },
        "paused": [
            {
                "kind": each.kind,
                "name": each.name,
                "reason": each.reason,
                "age": _age(each.paused_at, now),
            }
            for each in OutboxPause.objects.using(alias).order_by("paused_at", "pk")[:PAUSES]
        ],
        "workers": [
            {
                "id": each.id,
                "hostname": each.hostname,
                "pid": each.pid,
                "started_at": each.started_at.isoformat(),
                "heartbeat_age": _age(each.heartbeat_at, now),
            }
            for each in OutboxWorker.objects.using(alias).order_by("started_at", "pk")
        ],
    }


def faults(report: Report, limits: Limits) -> list[str]:
    """Say in which ways a report is beyond its limits."""
    age = report["oldest_pending_age"] or 0.0
    most = [
        ("the oldest due event has waited for seconds", age, limits.max_age),
        ("events and streams due", report["due"], limits.max_due),
        ("dead events", report["counts"]["DEAD"], limits.max_dead),
        ("blocked streams", report["streams"]["blocked"], limits.max_blocked),
    ]
    found = [
        f"{what}: {value:g}, at most {limit:g} expected"
        for what, value, limit in most
        if limit is not None and value > limit
    ]
    lease = current().LEASE  # a lost worker's row stays for ten of them
    workers = sum(each["heartbeat_age"] <= lease for each in report["workers"])
    least = limits.min_workers
    if least is not None and workers < least:
        found.append(f"workers: {workers}, at least {least} expected")
    return found


def _capped(rows: QuerySet[Any]) -> int:
    return rows[:MOST].count()


def _dead(rows: QuerySet[OutboxEvent]) -> list[dict[str, Any]]:
    """Count dead events by their type and the class of their error."""
    errors = rows.annotate(line=Substr("last_error", 1, LINE)).values_list("event_type", "line")
    found = Counter((event_type, error_class(line)) for event_type, line in errors)
    return [
        {"event_type": event_type, "error": error, "count": count}
        for (event_type, error), count in sorted(
            found.items(), key=lambda each: (-each[1], each[0])
        )
    ]


def error_class(line: str | None) -> str:
    """Return what stands before the message: ``ValueError: no`` is one of ``ValueError``."""
    return (line or "").partition("\n")[0].partition(":")[0].strip()


def _heads(alias: str, now: datetime) -> list[dict[str, Any]]:
    """Show the blocked streams that were written to first."""
    streams = OutboxStream.objects.using(alias)
    blocked = list(streams.blocked().order_by("due_at", "pk")[:SHOWN])
    places = streams.places([each.key for each in blocked])
    return [_head(each, places[each.key], now) for each in blocked]


def _head(stream: OutboxStream, place: Place, now: datetime) -> dict[str, Any]:
    head, due = place.head, stream.due_at
    return {
        "key": stream.key,
        "event_id": head and head.event_id,
        "event_type": head and head.event_type,
        "status": head and Status(head.status).name,
        "age": _age(head.first_due_at, now) if head else None,
        "next_try": None if due is None else due.isoformat(),
        "backlog": place.backlog,
    }


def _age(instant: datetime | None, now: datetime) -> float | None:
    return None if instant is None else round(max((now - instant).total_seconds(), 0.0), 3)
