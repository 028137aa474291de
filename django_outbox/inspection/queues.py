"""The queues and relays of a database: what is due, which workers serve it, whether it is open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.db import connections
from django.db.models.functions import Substr

from ..conf import current
from ..listeners.outcomes import UNSETTLED
from ..models import OutboxEvent, OutboxPause
from ..queue_settings import DEFAULT_QUEUE
from ..relay_settings import RelaySettings
from ..sql import dialect_of
from ..sql.values import CLOSING_KINDS
from .workers import WorkerInfo

COUNT_LIMIT: Final = 10_000  # due events of a queue that are counted, and as many streams
HELD_LIMIT: Final = 1000  # messages of a relay that are read, and counted
REASON_LENGTH: Final = 200  # characters
MAX_QUEUES: Final = 32  # queues that are listed, the configured ones first


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The state of one queue."""

    name: str
    is_configured: bool  # False: OUTBOX["QUEUES"] does not have it, but rows wait in it
    events: int  # due ones without a key; at most COUNT_LIMIT
    streams: int  # due ones; at most COUNT_LIMIT
    oldest_due_age: float | None  # seconds; None: nothing is due
    workers: int  # live workers that serve it
    is_unserved: bool  # no live worker serves it
    is_paused: bool
    breaker: OutboxPause | None  # its circuit breaker, if that is open

    @property
    def due(self) -> int:
        return self.events + self.streams

    @property
    def away_reason(self) -> str:
        """Return why its breaker is open, without the queue's own name; empty if it is not."""
        return self.breaker.reason.removeprefix(f"{self.name}: ") if self.breaker else ""

    @property
    def is_capped(self) -> bool:
        """Return whether more may be due than was counted."""
        return COUNT_LIMIT in (self.events, self.streams)

    def as_row(self) -> dict[str, Any]:
        """Return plain values, as reports show them."""
        breaker = self.breaker
        return {
            "queue": self.name,
            "due": self.due,
            "oldest_due_age": self.oldest_due_age,
            "workers": self.workers,
            "unserved": self.is_unserved,
            "configured": self.is_configured,
            "paused": self.is_paused,
            "breaker_until": breaker and breaker.until,
            "breaker_reason": breaker and breaker.reason,
        }


def queue_names(alias: str) -> list[str]:
    """Return the configured queues, then others that rows wait in, at a bounded cost."""
    connection, known = connections[alias], [*current().queues]
    others = dialect_of(connection).other_queues(known=known)
    return [*known, *others][:MAX_QUEUES]


def queue_states(
    alias: str, workers: Sequence[WorkerInfo], pauses: Iterable[OutboxPause] | None = None
) -> list[QueueState]:
    """Return the state of each queue, the configured ones first.

    ``workers`` and ``pauses`` are those of the database; pauses that are not given are read. In
    ``MODE`` "writer_only" nothing is due and no queue is unserved, because no event waits for a
    worker.
    """
    settings, connection = current(), connections[alias]
    delivers = settings.MODE != "writer_only"
    names = queue_names(alias) if delivers else [*settings.queues]
    backlogs = (
        dialect_of(connection).queue_backlogs(queues=names, most=COUNT_LIMIT) if delivers else {}
    )
    if pauses is None:
        pauses = OutboxPause.objects.using(alias).filter(kind__in=CLOSING_KINDS)
    closed = {(each.kind, each.name): each for each in pauses}
    states = []
    for name in names:
        backlog = backlogs.get(name)
        serving = sum(each.serves(name) and not each.is_silent for each in workers)
        states.append(
            QueueState(
                name=name,
                is_configured=name in settings.queues,
                events=backlog.events if backlog else 0,
                streams=backlog.streams if backlog else 0,
                oldest_due_age=backlog.oldest_age if backlog else None,
                workers=serving,
                is_unserved=delivers and not serving,
                is_paused=("queue", name) in closed,
                breaker=closed.get(("breaker", name)),
            )
        )
    return states


def lag(states: Sequence[QueueState]) -> float:
    """Return the seconds that the oldest due event or stream has waited."""
    return max((each.oldest_due_age or 0.0 for each in states), default=0.0)


def unserved_queues(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of queues with due events that no live worker delivers.

    Workers of ``default`` deliver the events of queues that are not configured.
    """
    late = [each for each in rows if each["unserved"] and each["due"]]
    has_default = any(each["queue"] == DEFAULT_QUEUE and not each["unserved"] for each in rows)
    return [each for each in late if each["configured"] or not has_default]


# -- relays ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The messages of a relay that were refused or deferred and wait for their next attempt."""

    count: int  # at most HELD_LIMIT
    age: float  # seconds since the oldest was first due
    reason: str  # the most frequent one


def held_messages(alias: str, settings: RelaySettings, now: datetime) -> Held | None:
    """Return what waits for another attempt of a relay, and why; None if nothing does."""
    rows = OutboxEvent.objects.using(alias).filter(
        queue=settings.title, status__in=UNSETTLED, last_error__isnull=False
    )
    texts = rows.order_by("available_at").annotate(text=Substr("last_error", 1, REASON_LENGTH))
    found = list(texts.values_list("first_due_at", "created_at", "text")[:HELD_LIMIT])
    if not found:
        return None
    reasons = Counter(text.partition("\n")[0] for *_, text in found)
    oldest = min(due or created for due, created, _ in found)
    return Held(
        count=len(found),
        age=max((now - oldest).total_seconds(), 0.0),
        reason=reasons.most_common(1)[0][0],
    )
