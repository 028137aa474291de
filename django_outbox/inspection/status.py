"""Status report of an outbox at a bounded cost, and which limits it violates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

from django.db import connections
from django.db.models import QuerySet
from django.db.models.functions import Substr

from ..conf import current
from ..listeners.outcomes import Status
from ..models import OutboxEvent, OutboxPause, OutboxStream
from ..models.fields import age
from ..models.stream_queryset import StreamSummary
from ..queue_settings import DEFAULT_QUEUE
from ..sql import dialect_of
from .counts import counts
from .error_texts import error_class
from .queues import QueueState, queue_states
from .rates import MAX_DEAD_SHARE, PERIOD, Rates, rates
from .workers import WorkerInfo, missing, workers

COUNT_LIMIT: Final = 10_000  # due, leased and blocked rows that are counted
MAX_BLOCKED_SHOWN: Final = 20  # blocked streams that are listed
MAX_PAUSES: Final = 100  # pauses that are listed
ERROR_LENGTH: Final = 200  # characters of an error

Report = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a healthy outbox; None: not checked."""

    max_age: float | None = None  # seconds that the oldest due event has waited
    max_dead_share: float | None = MAX_DEAD_SHARE  # of the events that ended lately, 0 to 1
    max_due: int | None = None
    max_dead: int | None = None
    max_blocked: int | None = None
    min_workers: int | None = None


def status(alias: str) -> Report:
    """Return the status report of the outbox in this database, for people and monitoring.

    Ages are seconds by the database's clock. Counts of rows stop at a limit, see the reference.
    """
    events = OutboxEvent.objects.using(alias)
    streams = OutboxStream.objects.using(alias)
    now = dialect_of(connections[alias]).clock(connections[alias])
    found, delivers = counts(alias), current().MODE != "writer_only"
    oldest, known = events.oldest_pending_age(), workers(alias, now)
    streams_due, streams_leased = capped_count(streams.due()), capped_count(streams.leased())
    return {
        "counts": found.numbers,
        "at_least": [*found.at_least],
        "estimated": [*found.estimated],
        "due": capped_count(events.due()) + streams_due if delivers else 0,
        "leased": capped_count(events.leased()) + streams_leased,
        "oldest_pending_age": None if oldest is None else round(oldest, 3),
        "dead": _dead(events.filter(pk__in=found.dead)),
        "rates": {"seconds": PERIOD, **asdict(rates(alias, now))},
        "streams": {
            "due": streams_due,
            "leased": streams_leased,
            "blocked": capped_count(streams.blocked()),
            "heads": _blocked_heads(alias, now),
        },
        "paused": [
            {
                "kind": each.kind,
                "name": each.name,
                "reason": each.reason,
                "age": _age(each.paused_at, now),
                "until": each.until and each.until.isoformat(),
            }
            for each in OutboxPause.objects.using(alias).order_by("paused_at", "pk")[:MAX_PAUSES]
        ],
        "queues": {each.name: _queue(each) for each in queue_states(alias, known)},
        "workers": [_worker(each) for each in known if each.is_newly_lost or not each.is_silent],
        "lost_workers": [_worker(each) for each in missing(known)],
    }


def violations(report: Report, limits: Limits) -> list[str]:
    """Return a sentence for each limit that the report violates."""
    age = report["oldest_pending_age"] or 0.0
    maximums = [
        ("the oldest due event has waited for seconds", age, limits.max_age),
        ("events and streams due", report["due"], limits.max_due),
        ("dead events", report["counts"]["DEAD"], limits.max_dead),
        ("blocked streams", report["streams"]["blocked"], limits.max_blocked),
    ]
    found = [
        f"{what}: {value:g}, at most {limit:g} expected"
        for what, value, limit in maximums
        if limit is not None and value > limit
    ]
    if current().MODE != "writer_only":
        found += _bad_rates(report["rates"], limits)
    lease = current().LEASE  # those lost in the last minutes are reported, too
    live = sum(each["heartbeat_age"] <= lease for each in report["workers"])
    if lost := len(report["workers"]) - live:
        found.append(f"workers without a heartbeat for more than a lease: {lost}, 0 expected")
    minimum = limits.min_workers
    if minimum is not None and live < minimum:
        found.append(f"workers: {live}, at least {minimum} expected")
    if live:  # without any worker, delivery may be up to "outbox_worker --once"
        found += _unserved_queues(report["queues"])
    return found


def _bad_rates(found: dict[str, int], limits: Limits) -> Iterator[str]:
    """Yield a sentence for each rate of the last minutes that shows that delivery fails."""
    counts = {name: found[name] for name in Rates.__dataclass_fields__}
    lately, period = Rates(**counts), f"in the last {PERIOD // 60} minutes"
    if limits.max_dead_share is not None and lately.dead_share > limits.max_dead_share:
        yield (
            f"dead events {period}: {lately.dead} of the {lately.done + lately.dead} that ended, "
            f"at most {100 * limits.max_dead_share:g} % expected"
        )
    if lately.is_stalled:
        yield (
            f"done events {period}: 0, at least 1 expected; {lately.retry} executions failed and "
            "will be repeated"
        )
    if lately.rescued:
        yield f"events rescued from lost workers {period}: {lately.rescued}, 0 expected"


def _unserved_queues(queues: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each queue whose due events no live worker delivers."""
    for name, each in queues.items():
        if not (each["unserved"] and each["due"]):
            continue
        if each.get("configured", True):
            yield (
                f"queue {name!r}: {each['due']} due, but no live worker serves it; start an "
                f"outbox_worker with --queue {name}, or one without --queue"
            )
        elif queues[DEFAULT_QUEUE]["unserved"]:  # else those of "default" deliver them soon
            yield (
                f'queue {name!r}: {each["due"]} due, but it is not in OUTBOX["QUEUES"], and no '
                f"live worker serves {DEFAULT_QUEUE!r}, which would deliver them; start one"
            )


def capped_count(rows: QuerySet[Any]) -> int:
    """Count rows, at most ``COUNT_LIMIT``."""
    return rows[:COUNT_LIMIT].count()


def _dead(rows: QuerySet[OutboxEvent]) -> list[dict[str, Any]]:
    """Count dead events by event type and error class."""
    errors = rows.annotate(line=Substr("last_error", 1, ERROR_LENGTH)).values_list(
        "event_type", "line"
    )
    found = Counter((event_type, error_class(line)) for event_type, line in errors)
    return [
        {"event_type": event_type, "error": error, "count": count}
        for (event_type, error), count in sorted(
            found.items(), key=lambda each: (-each[1], each[0])
        )
    ]


def _queue(state: QueueState) -> dict[str, Any]:
    age, breaker = state.oldest_due_age, state.breaker
    found: dict[str, Any] = {
        "due": state.due,
        "oldest_due_age": None if age is None else round(age, 3),
        "workers": state.workers,
        "unserved": state.is_unserved,
    }
    if not state.is_configured:
        found["configured"] = False
    if state.is_paused:
        found["paused"] = True
    if breaker is not None:
        until = breaker.until and breaker.until.isoformat()
        found["breaker"] = {"until": until, "reason": breaker.reason}
    return found


def _worker(each: WorkerInfo) -> dict[str, Any]:
    return {
        "id": each.id,
        "hostname": each.hostname,
        "pid": each.pid,
        "started_at": each.started_at.isoformat(),
        "heartbeat_age": round(each.heartbeat_age, 3),
        "queues": None if each.queues is None else [*each.queues],
    }


def _blocked_heads(alias: str, now: datetime) -> list[dict[str, Any]]:
    """Return the heads of blocked streams, ordered by their next try."""
    streams = OutboxStream.objects.using(alias)
    blocked = list(streams.blocked().order_by("due_at", "pk")[:MAX_BLOCKED_SHOWN])
    summaries = streams.summaries([each.key for each in blocked])
    return [_head(each, summaries[each.key], now) for each in blocked]


def _head(stream: OutboxStream, summary: StreamSummary, now: datetime) -> dict[str, Any]:
    head, due = summary.head, stream.due_at
    return {
        "key": stream.key,
        "event_id": head and head.event_id,
        "event_type": head and head.event_type,
        "status": head and Status(head.status).name,
        "age": _age(head.first_due_at, now) if head else None,
        "next_try": None if due is None else due.isoformat(),
        "backlog": summary.backlog,
    }


def _age(instant: datetime | None, now: datetime) -> float | None:
    return None if instant is None else round(age(instant, now), 3)
