"""What is wrong with delivery: what is late, held, lost or dead, why, since when and whose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from ..conf import current
from ..listeners.history import first_line
from ..listeners.outcomes import Status
from ..queue_settings import RELAY_PREFIX
from .counts import MAX_DEAD_SHARE, MAX_LAG, PERIOD, AtLeast
from .holds import BREAKER, COUNT_LIMIT, DEAD, MAX_HELD, Hold
from .queues import ListenerState, QueueState, unserved_queues

if TYPE_CHECKING:
    from .overview import Overview

MAX_NAMED: Final = 5  # problems of one kind that get a sentence each
MAX_NAMES: Final = 3  # names in one sentence
MIN_FAILED: Final = 5  # executions that failed, before a listener is said to fail
MANY_DUE: Final = 20 * COUNT_LIMIT  # due rows that are counted in a late queue


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem, which ``sentence`` puts into words; what does not apply is None."""

    kind: str
    is_bad: bool = True  # False: it needs attention, but nothing is late because of it
    queue: str | None = None  # or that of a relay
    listener: str | None = None  # title
    name: str | None = None  # of what is held, of a worker, an event type, or a limit
    cause: str | None = None  # error, or reason of a pause
    by: str | None = None  # person, event or workers
    since: datetime | None = None
    until: datetime | None = None  # planned end, or next try
    age: float | None = None  # seconds that the oldest delivery is late or held
    count: int | None = None
    of: float | None = None  # out of so many; or the limit
    takes: float | None = None  # seconds that the listener runs, p95
    busy: int | None = None  # threads
    threads: int | None = None  # of the queue
    done: int | None = None  # deliveries that end in a minute, if no more arrive than that
    arriving: int | None = None  # deliveries that are written in a minute
    drains_in: float | None = None  # seconds
    id: str | None = None  # of a pause, a delivery or a cause

    def as_row(self) -> dict[str, Any]:
        """Return plain values, as reports show them, without what does not apply."""
        return {name: each for name, each in asdict(self).items() if each is not None}


def find_problems(found: Overview, limits: Limits | None = None) -> list[Problem]:
    """Return the problems, the worst first."""
    limits = limits or Limits()
    kinds = [_dead(found, limits), _over_limits(found, limits)]
    if current().MODE != "writer_only":  # its events do not wait for a worker
        kinds = [
            _workers(found),
            _queues(found, limits),
            _failures(found),
            _first([_hold(each, found.now, limits) for each in found.holds]),
            _blocked(found),
            *kinds,
            _unrouted(found.unrouted),
        ]
    return sorted(chain(*kinds), key=lambda each: not each.is_bad)


def _unrouted(found: Sequence[ListenerState]) -> Iterator[Problem]:
    if found:
        count = sum(each.due + each.held for each in found)
        names = _named([each.listener for each in found], len(found))
        yield Problem(kind="unrouted", is_bad=False, name=names, count=count)


def _named(names: Sequence[str], count: int) -> str:
    """Return the first of so many names."""
    return ", ".join([*names[:MAX_NAMES], *["…"] * (count > MAX_NAMES)])


def _first(problems: Sequence[Problem]) -> Iterator[Problem]:
    """Yield the first problems of a kind, the worst first, and the number of the others."""
    found = sorted(problems, key=lambda each: (not each.is_bad, -(each.age or 0.0)))
    yield from found[:MAX_NAMED]
    if others := found[MAX_NAMED:]:
        yield Problem(kind="more", is_bad=others[0].is_bad, name=others[0].kind, count=len(others))


def _over_limits(found: Overview, limits: Limits) -> Iterator[Problem]:
    maximums = {
        "due": (sum(each.due for each in found.queues), limits.max_due),
        "dead": (found.causes.total, limits.max_dead),
        "blocked": (found.blocked_count, limits.max_blocked),
    }
    for name, (count, most) in maximums.items():
        if most is not None and count > most:
            yield Problem(kind="too_many", name=name, count=count, of=most)
    if limits.min_workers is not None and found.alive < limits.min_workers:
        yield Problem(kind="too_few", name="workers", count=found.alive, of=limits.min_workers)


def _workers(found: Overview) -> Iterator[Problem]:
    if not found.alive:
        last = max((each.heartbeat_at for each in found.workers), default=None)
        yield Problem(kind="no_worker", since=last)
    silent = [each for each in found.workers if each.is_newly_lost or each in found.missing]
    lost = [
        Problem(
            kind="lost" if each in found.missing else "replaced",
            is_bad=each.is_newly_lost,
            name=f"{each.hostname}:{each.pid}",
            since=each.heartbeat_at,
            count=found.alive,
            of=found.alive + len(found.missing),
        )
        for each in silent
    ]
    yield from _first(lost)
    if found.rates.rescued:
        yield Problem(kind="rescued", count=found.rates.rescued)
    if len(found.suspects) == 1:  # there is no doubt: others were tried alone
        (each,) = found.suspects
        owners = [owner.rpartition("-")[0] or owner for owner, _at in each.workers[-MAX_NAMES:]]
        since, count = each.workers[0][1], len(each.workers)
        name, by = each.event_type, ", ".join(owners)
        yield Problem(kind="poison", name=name, by=by, since=since, count=count, id=each.id)
    elif found.suspects:
        yield Problem(kind="suspects", count=len(found.suspects))


# -- queues and listeners --------------------------------------------------------------------------


def _queues(found: Overview, limits: Limits) -> Iterator[Problem]:
    unserved = unserved_queues(found.queues) if found.alive else []
    for each in found.queues:
        lateness = each.oldest_due_age or 0.0
        if each in unserved:
            yield Problem(
                kind="unserved",
                queue=each.name,
                name=each.name if each.is_configured else None,
                count=each.due,
                since=found.now - timedelta(seconds=lateness),
            )
        elif limits.max_lag is not None and lateness > limits.max_lag:
            yield _late(found, each, lateness)


def _late(found: Overview, queue: QueueState, lateness: float) -> Problem:
    """Say what keeps a queue busy, and when nothing in it will be late any more."""
    ran = [each for each in queue.listeners if each.run_ms]
    slow = max(ran, key=lambda each: each.run_ms, default=None)
    done = sum(each.done_per_minute for each in queue.listeners)
    arriving, due = 0.0, queue.due
    if (flow := found.flow) is not None:
        is_whole = sum(flow.written.values()) < COUNT_LIMIT
        seconds = PERIOD if is_whole else max(flow.seconds, 1.0)
        arriving = flow.written.get(queue.name, 0) * 60 / seconds
        events = flow.due.get(queue.name, queue.events)
        due = queue.streams + (AtLeast(events) if events >= MANY_DUE else events)
    falls = done > arriving
    return Problem(
        kind="late",
        queue=queue.name,
        listener=slow.listener if slow else None,
        since=found.now - timedelta(seconds=lateness),
        age=lateness,
        count=due,
        takes=slow.run_p95 if slow else None,
        busy=queue.threads[0],
        threads=queue.threads[1] or None,
        done=None if falls or not done else round(done),
        arriving=round(arriving),
        drains_in=due / (done - arriving) * 60 if falls else None,
    )


def _failures(found: Overview) -> Iterator[Problem]:
    failing = sorted(found.listeners, key=lambda each: -each.retry)
    if found.rates.is_stalled:
        name = failing[0].listener if failing and failing[0].retry else None
        yield Problem(kind="stalled", listener=name, count=found.rates.retry)
        return
    for each in failing[:MAX_NAMED]:
        count, of = each.retry, each.executions
        if count >= MIN_FAILED and count * 2 > of:
            yield Problem(kind="failing", is_bad=False, listener=each.listener, count=count, of=of)


# -- held, blocked, dead ---------------------------------------------------------------------------


def _hold(each: Hold, now: datetime, limits: Limits) -> Problem:
    kind = "away" if each.kind == BREAKER and each.name.startswith(RELAY_PREFIX) else each.kind
    is_queue = each.kind in ("queue", BREAKER)
    most = limits.max_held
    return Problem(
        kind=f"held_by_{kind}",
        is_bad=most is not None and each.age > most and not each.planned,
        queue=each.name if is_queue else None,
        name=None if is_queue else each.name,
        by=each.by or None,
        cause=first_line(each.reason).removeprefix(f"{each.name}: ") or None,
        since=each.since,
        until=each.until if each.until and each.until > now else None,
        age=each.age if each.count else None,
        count=each.count or None,
        id=each.id,
    )


def _blocked(found: Overview) -> Iterator[Problem]:
    """Name the keys whose heads wait for another try; a dead head is a hold."""
    dead = sum(each.kind == DEAD for each in found.holds)
    count = found.blocked_count - dead if dead else found.blocked_count  # it may be AtLeast
    shown = ((each, each.summary.head) for each in found.blocked)
    tried = [each for each, head in shown if head and head.status != Status.DEAD]
    if count <= 0 or not tried:
        return
    heads = [each.summary.head for each in tried]
    first = min(heads, key=lambda each: each.first_due_at or found.now)
    yield Problem(
        kind="blocked",
        is_bad=False,
        name=_named([each.key for each in tried], count),
        listener=first.listener or first.event_type,
        cause=first_line(first.last_error) or None,
        since=first.first_due_at,
        until=min((each.due_at for each in tried if each.due_at), default=None),
        count=count,
    )


def _dead(found: Overview, limits: Limits) -> Iterator[Problem]:
    lately, most = found.rates, limits.max_dead_share
    if most is not None and lately.dead_share > most:
        yield Problem(kind="dying", count=lately.dead, of=lately.done + lately.dead, **_main(found))
    elif count := found.causes.total:
        of = found.causes.lately or None
        yield Problem(kind="dead", is_bad=False, count=count, of=of, **_main(found))


def _main(found: Overview) -> dict[str, Any]:
    """Return the cause of the most deaths lately, and the listener of most of them."""
    if not found.causes.causes:
        return {}
    cause = found.causes.causes[0]
    listener = (cause.listeners or cause.types).most_common(1)[0][0]
    return {"cause": cause.title or None, "listener": listener, "id": cause.digest}
