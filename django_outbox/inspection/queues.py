"""The queues and relays of a database: what is due, which workers serve it, whether it is open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.db import connections
from django.db.models.functions import Substr

from ..conf import current
from ..listeners.outcomes import UNSETTLED
from ..models import OutboxEvent
from ..queue_settings import DEFAULT_QUEUE
from ..relay_settings import RelaySettings
from ..sql import dialect_of
from ..sql.values import CLOSING_KINDS
from .counts import limited
from .holds import COUNT_LIMIT, Hold
from .workers import WorkerInfo

DEFERRED_LIMIT: Final = 1000  # messages of a relay that are read, and counted
REASON_LENGTH: Final = 200  # characters
MAX_QUEUES: Final = 32  # queues that are listed, the configured ones first


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The state of one queue."""

    name: str
    is_configured: bool  # False: OUTBOX["QUEUES"] does not have it, but rows wait in it
    events: int  # due ones without a key
    streams: int  # due ones; at most COUNT_LIMIT
    oldest_due_age: float | None  # seconds; None: nothing is due
    workers: int  # live workers that serve it
    is_unserved: bool  # no live worker serves it
    holds: Mapping[
        str, Hold
    ]  # its pause and its open circuit breaker, by kind; nothing is due then

    @property
    def due(self) -> int:
        return self.events + self.streams

    @property
    def held(self) -> int:
        return sum(each.count for each in self.holds.values())

    def as_row(self) -> dict[str, Any]:
        """Return plain values, as reports show them."""
        return {
            "queue": self.name,
            "due": self.due,
            "oldest_due_age": self.oldest_due_age,
            "held": self.held,
            "workers": self.workers,
            "unserved": self.is_unserved,
            "configured": self.is_configured,
        }


def queue_names(alias: str, holds: Sequence[Hold] = ()) -> list[str]:
    """Return the configured queues, then others that rows wait in, at a bounded cost.

    Leave out those in which a pause parks what it holds.
    """
    connection, configured = connections[alias], [*current().queues]
    parked = {each.queue for each in holds if each.kind not in CLOSING_KINDS}
    others = dialect_of(connection).queues_besides({*configured, *parked})
    return [*configured, *others][:MAX_QUEUES]


def queue_states(
    alias: str, workers: Sequence[WorkerInfo], holds: Sequence[Hold]
) -> list[QueueState]:
    """Return the state of each queue, the configured ones first.

    ``workers`` and ``holds`` are those of the database. In ``MODE`` "writer_only" nothing is due
    and no queue is unserved, because no event waits for a worker.
    """
    settings, dialect = current(), dialect_of(connections[alias])
    delivers = settings.MODE != "writer_only"
    names = queue_names(alias, holds) if delivers else [*settings.queues]
    closed = {each.queue for each in holds}
    open_queues = [each for each in names if each not in closed] if delivers else []
    backlogs = dialect.queue_backlogs(queues=open_queues, most=COUNT_LIMIT) if open_queues else {}
    states = []
    for name in names:
        backlog = backlogs.get(name)
        serving = sum(each.serves(name) and not each.is_silent for each in workers)
        states.append(
            QueueState(
                name=name,
                is_configured=name in settings.queues,
                events=limited(backlog.events, COUNT_LIMIT) if backlog else 0,
                streams=limited(backlog.streams, COUNT_LIMIT) if backlog else 0,
                oldest_due_age=backlog.oldest_age if backlog else None,
                workers=serving,
                is_unserved=delivers and not serving,
                holds={each.kind: each for each in holds if each.queue == name},
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
class Deferred:
    """The messages of a relay that were refused or deferred and wait for their next attempt."""

    count: int  # at most DEFERRED_LIMIT
    age: float  # seconds since the oldest was first due
    reason: str  # the most frequent one


def deferred_messages(alias: str, settings: RelaySettings, now: datetime) -> Deferred | None:
    """Return what waits for another attempt of a relay, and why; None if nothing does."""
    rows = OutboxEvent.objects.using(alias).filter(
        queue=settings.title, status__in=UNSETTLED, last_error__isnull=False
    )
    texts = rows.order_by("available_at").annotate(text=Substr("last_error", 1, REASON_LENGTH))
    found = list(texts.values_list("first_due_at", "created_at", "text")[:DEFERRED_LIMIT])
    if not found:
        return None
    reasons = Counter(text.partition("\n")[0] for *_, text in found)
    oldest = min(due or created for due, created, _ in found)
    return Deferred(
        count=len(found),
        age=max((now - oldest).total_seconds(), 0.0),
        reason=reasons.most_common(1)[0][0],
    )
