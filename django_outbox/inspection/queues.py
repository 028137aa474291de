"""Queues, relays and listeners: what is due in each, how long that takes, and who serves it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.db import connections
from django.db.models.functions import Substr

from ..conf import current
from ..listeners import registry
from ..listeners.outcomes import UNSETTLED
from ..listeners.queues import expected_queue
from ..models import OutboxEvent, OutboxStatistics
from ..models.fields import age
from ..models.statistics import RUN_COLUMNS, WAIT_COLUMNS, quantile
from ..queue_settings import DEFAULT_QUEUE, RelaySettings, parked_by
from ..sql import dialect_of
from ..sql.dialect import Waiting
from .counts import PERIOD, AtLeast
from .holds import COUNT_LIMIT, Hold, held_queue, load_holds, load_pauses
from .workers import WorkerInfo

DEFERRED_LIMIT: Final = 1000  # messages of a relay that are read, and counted
REASON_LENGTH: Final = 200  # characters
MAX_QUEUES: Final = 32  # queues that are listed, the configured ones first
MAX_LISTENERS: Final = 50  # that are listed, those with the most that waits first
P95: Final = 0.95
LISTENER_COLUMNS: Final = (
    "listener queue due oldest_due_age held done_per_minute retry wait_p95 run_p95 threads_busy"
).split()
NO_TIMES: Final = (0,) * len(RUN_COLUMNS)


@dataclass(slots=True, kw_only=True)
class _State:
    """What is due, and how long executions of the last full minutes waited and ran."""

    events: int = 0  # due ones without a key
    streams: int = 0  # due ones; at most COUNT_LIMIT
    oldest_due_age: float | None = None  # seconds; None: nothing is due
    waits: Sequence[int] = NO_TIMES  # executions by seconds from the due time to the start
    runs: Sequence[int] = NO_TIMES  # executions by seconds

    @property
    def due(self) -> int:
        return self.events + self.streams

    @property
    def wait_p95(self) -> float | None:
        """Return the seconds from the due time to the start; None: there were no executions."""
        return quantile(self.waits, P95)

    @property
    def run_p95(self) -> float | None:
        return quantile(self.runs, P95)


@dataclass(slots=True, kw_only=True)
class ListenerState(_State):
    """What waits for a listener, streams only if its lane is its own, and what it did lately."""

    listener: str  # title; an event type that is not routed yet; empty: several
    queue: str  # empty: unknown
    is_routed: bool = True
    held: int = 0
    minutes: float = 1.0  # that its counts cover
    ended: int = 0  # deliveries: done or dead
    retry: int = 0  # executions that failed and will be repeated
    run_ms: int = 0  # milliseconds of all executions

    @property
    def executions(self) -> int:
        return self.ended + self.retry

    @property
    def done_per_minute(self) -> float:
        return self.ended / self.minutes

    @property
    def threads_busy(self) -> float:
        """Return how many threads it keeps busy on average."""
        return self.run_ms / 60_000 / self.minutes

    def as_row(self) -> dict[str, Any]:
        """Return plain values, as reports show them."""
        rounded = {name: round(getattr(self, name)) for name in ("done_per_minute", "threads_busy")}
        return {name: rounded.get(name, getattr(self, name)) for name in LISTENER_COLUMNS}


@dataclass(slots=True, kw_only=True)
class QueueState(_State):
    """The state of one queue. What is due in a closed one is held, and not due."""

    name: str
    is_configured: bool  # False: OUTBOX["QUEUES"] does not have it, but rows wait in it
    workers: int  # live workers that serve it
    is_unserved: bool  # no live worker serves it
    threads: tuple[int, int]  # busy ones and all of them, at the last heartbeats
    holds: Mapping[str, Hold]  # its pause and its open circuit breaker, by kind
    listeners: Sequence[ListenerState]

    @property
    def held(self) -> int:
        return sum(each.count for each in self.holds.values())

    @property
    def relay(self) -> RelaySettings | None:
        """Return the relay whose queue it is."""
        return next((each for each in current().relays.values() if each.title == self.name), None)

    def as_row(self) -> dict[str, Any]:
        """Return plain values, as reports show them."""
        busy, threads = self.threads
        return {
            "queue": self.name,
            **{name: getattr(self, name) for name in ("due", "oldest_due_age", "held", "workers")},
            "threads_busy": busy,
            "threads": threads,
            **{name: getattr(self, name) for name in ("wait_p95", "run_p95")},
            "unserved": self.is_unserved,
            "configured": self.is_configured,
        }


def _summed(times: Iterable[Sequence[int]]) -> list[int]:
    return [sum(each) for each in zip(*times, strict=True)]


class Backlog(NamedTuple):
    """What is due in the queues of a database, and what is held."""

    queues: list[QueueState]
    holds: list[Hold]  # pauses first, the oldest first
    listeners: list[ListenerState]  # those with the most that waits first


def load_backlog(alias: str, now: datetime, workers: Sequence[WorkerInfo]) -> Backlog:
    """Return what is due and held, at a bounded cost; in ``MODE`` "writer_only" nothing is.

    ``now``: the database's; ``workers``: all that it knows.
    """
    pauses = load_pauses(alias)
    parked = {queue: each for each in pauses if parked_by(queue := held_queue(each)) is not None}
    names = queue_names(alias, parked)
    delivers = current().MODE != "writer_only"  # otherwise no event waits for a worker
    waiting = _waiting(alias, [*names, *parked]) if delivers else []
    holds = load_holds(alias, now, pauses, waiting)
    listeners = _listeners(alias, now, waiting, holds)
    queues = _queues(names, workers, holds, listeners)
    return Backlog(queues, holds, listeners[:MAX_LISTENERS])


def queue_names(alias: str, parked: Collection[str] = ()) -> list[str]:
    """Return the configured queues, then others that rows wait in, but the ``parked`` ones."""
    configured = [*current().queues]
    if current().MODE == "writer_only":
        return configured
    others = dialect_of(connections[alias]).queues_besides({*configured, *parked})
    return [*configured, *others][:MAX_QUEUES]


def _waiting(alias: str, names: Sequence[str]) -> list[Waiting]:
    """Count what is due, and say of which counts there may be more."""
    found = dialect_of(connections[alias]).queue_backlogs(queues=names, most=COUNT_LIMIT)
    totals = Counter[tuple[str, bool]]()
    for each in found:
        totals[each.queue, each.kind == "lane"] += each.number
    return [
        each._replace(number=AtLeast(each.number))
        if totals[each.queue, each.kind == "lane"] >= COUNT_LIMIT
        else each
        for each in found
    ]


def _queues(
    names: Sequence[str],
    workers: Sequence[WorkerInfo],
    holds: Sequence[Hold],
    listeners: Sequence[ListenerState],
) -> list[QueueState]:
    """Return the state of each queue: the sums of its listeners, and who serves it."""
    live = [each for each in workers if not each.is_silent]
    states = []
    for name in names:
        serving = [each for each in live if each.serves(name)]
        threads = [each.threads.get(name, (0, 0)) for each in serving]
        own = [each for each in listeners if each.queue == name]
        ages = [each.oldest_due_age for each in own if each.oldest_due_age is not None]
        states.append(
            QueueState(
                name=name,
                is_configured=name in current().queues,
                events=sum(each.events for each in own),
                streams=sum(each.streams for each in own),
                oldest_due_age=max(ages, default=None),
                waits=_summed(each.waits for each in own),
                runs=_summed(each.runs for each in own),
                workers=len(serving),
                is_unserved=current().MODE != "writer_only" and not serving,
                threads=(sum(busy for busy, _ in threads), sum(every for _, every in threads)),
                holds={each.kind: each for each in holds if each.queue == name},
                listeners=own,
            )
        )
    return states


def lag(states: Sequence[QueueState]) -> float:
    """Return the seconds that the oldest due event or stream has waited."""
    return max((each.oldest_due_age or 0.0 for each in states), default=0.0)


def unserved_queues(states: Sequence[QueueState]) -> list[QueueState]:
    """Return the queues with due events that no live worker delivers.

    Workers of ``default`` deliver the events of queues that are not configured.
    """
    late = [each for each in states if each.is_unserved and each.due]
    has_default = any(each.name == DEFAULT_QUEUE and not each.is_unserved for each in states)
    return [each for each in late if each.is_configured or not has_default]


# -- listeners -------------------------------------------------------------------------------------


def _listeners(
    alias: str, now: datetime, waiting: Iterable[Waiting], holds: Sequence[Hold]
) -> list[ListenerState]:
    """Return the listeners for which something waits, or that were called in the last minutes."""
    found: dict[tuple[str, str], ListenerState] = {}
    closed = {each.queue for each in holds}
    for each in waiting:
        title = _only_of_lane(each) if each.kind == "lane" else each.name
        queue = each.queue if parked_by(each.queue) is None else expected_queue(title, each.queue)
        state = ListenerState(listener=title, queue=queue, is_routed=each.kind != "type")
        state = found.setdefault((title, queue), state)
        if each.queue in closed:
            state.held += each.number
            continue
        if each.kind == "lane":
            state.streams += each.number
        else:
            state.events += each.number
        state.oldest_due_age = max(each.age, state.oldest_due_age or 0.0)
    _add_minutes(alias, now, found)
    return sorted(
        found.values(), key=lambda each: (-each.due - each.held, -each.executions, each.listener)
    )


def _only_of_lane(waiting: Waiting) -> str:
    """Return the title of the only listener of a lane and queue; of several, nothing."""
    titles = [
        each.title
        for each in registry.listeners()
        if each.lane == waiting.name and expected_queue(each.title, "") == waiting.queue
    ]
    return titles[0] if len(titles) == 1 else ""


def _add_minutes(alias: str, now: datetime, found: dict[tuple[str, str], ListenerState]) -> None:
    """Add what workers counted in the last full minutes."""
    end = now.replace(second=0, microsecond=0)
    rows = OutboxStatistics.objects.using(alias).since(end - timedelta(seconds=PERIOD))
    queues = dict([*found])
    for row in rows.filter(started_at__lt=end).by_listener(MAX_LISTENERS):
        title = row["listener"]
        queue = queues.get(title) or expected_queue(title or None, "")
        state = found.setdefault((title, queue), ListenerState(listener=title, queue=queue))
        state.minutes = (end - row["first"]).total_seconds() / 60
        state.ended, state.retry = row["done"] + row["dead"], row["retry"]
        state.run_ms = row["run_ms"]
        state.waits = [row[name] for name in WAIT_COLUMNS]
        state.runs = [row[name] for name in RUN_COLUMNS]


# -- relays ----------------------------------------------------------------------------------------


def deferred_messages(alias: str, settings: RelaySettings, now: datetime) -> dict[str, Any]:
    """Return how many messages of a relay wait for another attempt, for how long, and why.

    They were refused or deferred; the reason is the most frequent one. The count stops at a limit.
    """
    rows = OutboxEvent.objects.using(alias).filter(
        queue=settings.title, status__in=UNSETTLED, last_error__isnull=False
    )
    texts = rows.order_by("available_at").annotate(text=Substr("last_error", 1, REASON_LENGTH))
    found = list(texts.values_list("first_due_at", "created_at", "text")[:DEFERRED_LIMIT])
    reasons = Counter(text.partition("\n")[0] for *_, text in found)
    oldest = min((due or created for due, created, _ in found), default=None)
    return {
        "deferred": len(found),
        "deferred_age": oldest and age(oldest, now),
        "reason": max(reasons, key=reasons.__getitem__, default=""),
    }
