"""Status report of an outbox at a bounded cost, and which limits it violates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from ..conf import current
from ..listeners.outcomes import Status
from ..models import OutboxEvent, OutboxStream
from ..models.fields import age
from ..queue_settings import DEFAULT_QUEUE
from .causes import load_causes
from .counts import MAX_DEAD_SHARE, PERIOD, Rates, capped_count, counts, minutes, rates
from .holds import MAX_HELD, load_holds
from .overview import BlockedStream, blocked_streams
from .queues import lag, queue_states, unserved_queues
from .workers import WorkerInfo, clock_and_workers, missing

MAX_CAUSES: Final = 20  # causes of dead events that are listed
MAX_HOLDS: Final = 100  # that are listed, the longest first
MAX_LAG: Final = 60.0  # seconds
UNITS: Final = {"d": 86_400, "h": 3600, "min": 60, "s": 1}  # seconds

Report = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a healthy outbox; None: not checked."""

    max_lag: float | None = MAX_LAG  # seconds that the oldest due event has waited
    max_held: float | None = MAX_HELD  # seconds that an event has been held, without planned end
    max_dead_share: float | None = MAX_DEAD_SHARE  # of the events that ended lately, 0 to 1
    max_due: int | None = None
    max_dead: int | None = None
    max_blocked: int | None = None
    min_workers: int | None = None


def status(alias: str) -> Report:
    """Return the status report of the outbox in this database, for people and monitoring.

    Its values are plain, but for datetimes. Ages are seconds by the database's clock. Counts of
    rows stop at a limit, see the reference.
    """
    events, streams = OutboxEvent.objects.using(alias), OutboxStream.objects.using(alias)
    now, known = clock_and_workers(alias)
    found, holds, blocked = counts(alias), load_holds(alias, now), blocked_streams(alias)
    queues = queue_states(alias, known, holds)
    longest = sorted(holds, key=lambda each: (each.planned, -each.age))[:MAX_HOLDS]
    points = minutes(alias, now - timedelta(seconds=PERIOD))
    lost = missing(known)
    shown = [each for each in known if each.is_newly_lost or not each.is_silent or each in lost]
    return {
        "counts": found.numbers,
        "at_least": [*found.at_least],
        "estimated": [*found.estimated],
        "due": sum(each.due for each in queues),
        "oldest_due_age": lag(queues),
        "held": sum(each.count for each in holds),
        "leased": capped_count(events.leased()) + capped_count(streams.leased()),
        "blocked": blocked.count,
        "rates": {"seconds": PERIOD, **asdict(rates(points, now))},
        "queues": [each.as_row() for each in queues],
        "blocked_streams": [_stream(each, now) for each in blocked.streams],
        "holds": [each.as_row() for each in longest],
        "workers": [_worker(each) for each in shown],
        "causes": [each.as_row() for each in load_causes(alias, MAX_CAUSES).causes],
    }


def violations(report: Report, limits: Limits) -> list[str]:
    """Return a sentence for each limit that the report violates."""
    maximums: list[tuple[str, Any, Any, Callable[[Any], str]]] = [
        ("the oldest due event has waited", report["oldest_due_age"], limits.max_lag, lasting),
        ("events and streams due", report["due"], limits.max_due, str),
        ("dead events", report["counts"]["DEAD"], limits.max_dead, str),
        ("blocked streams", report["blocked"], limits.max_blocked, str),
    ]
    found = [
        f"{what}: {text(value)}, at most {text(limit)} expected"
        for what, value, limit, text in maximums
        if limit is not None and value > limit
    ]
    if (most := limits.max_held) is not None:
        holds = [each for each in report["holds"] if each["age"] > most and not each["planned"]]
        found += [_held(each, most) for each in holds]
    if current().MODE != "writer_only":
        found += _bad_rates(report["rates"], limits)
    lost = sum(each["lost"] for each in report["workers"])
    live = len(report["workers"]) - lost
    latest = current().LEASE + PERIOD  # older losses are shown, but raise no alarm
    if newly := sum(each["lost"] and each["heartbeat_age"] <= latest for each in report["workers"]):
        found.append(f"workers without a heartbeat for more than a lease: {newly}, 0 expected")
    minimum = limits.min_workers
    if minimum is not None and live < minimum:
        found.append(f"workers: {live}, at least {minimum} expected")
    if live:  # without any worker, delivery may be up to "outbox_worker --once"
        found += map(_unserved, unserved_queues(report["queues"]))
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


def lasting(seconds: float) -> str:
    """Return a duration in its two largest units, such as ``40 s``, ``3 min 5 s``, ``2 d 1 h``."""
    left, parts = round(seconds), list[str]()
    for unit, size in UNITS.items():
        count, left = divmod(left, size)
        parts += [f"{count} {unit}"] if count else []
    return " ".join(parts[:2]) or f"{seconds:.2g} s"


def _held(hold: dict[str, Any], limit: float) -> str:
    """Return a sentence for what is held for too long: by what, by whom, since when, and why."""
    why = ", ".join(hold[name] for name in ("by", "reason") if hold[name])
    what = f"{hold['kind']} {hold['name']!r} since {hold['since']:%Y-%m-%d %H:%M:%S %Z}"
    count = f"{hold['events']} events and {hold['streams']} streams"
    age = f"{lasting(hold['age'])}, at most {lasting(limit)} expected"
    return f"{count} are held by {what} ({why}), the oldest for {age}"


def _unserved(queue: dict[str, Any]) -> str:
    """Return a sentence for a queue whose due events no live worker delivers."""
    name, due = queue["queue"], queue["due"]
    if queue["configured"]:
        return (
            f"queue {name!r}: {due} due, but no live worker serves it; start an outbox_worker "
            f"with --queue {name}, or one without --queue"
        )
    return (
        f'queue {name!r}: {due} due, but it is not in OUTBOX["QUEUES"], and no live worker '
        f"serves {DEFAULT_QUEUE!r}, which would deliver them; start one"
    )


def _worker(each: WorkerInfo) -> dict[str, Any]:
    return {
        **{name: getattr(each, name) for name in ("id", "hostname", "pid", "started_at")},
        "heartbeat_age": round(each.heartbeat_age, 3),
        "lost": each.is_silent,
        "queues": None if each.queues is None else [*each.queues],
    }


def _stream(each: BlockedStream, now: datetime) -> dict[str, Any]:
    head = each.head
    return {
        "key": each.key,
        "event_id": head and head.event_id,
        "listener": head and head.listener,
        "event_type": head and head.event_type,
        "status": head and Status(head.status).name,
        "age": head and head.first_due_at and round(age(head.first_due_at, now), 3),
        "next_try": each.due_at,
        "backlog": each.backlog,
    }
