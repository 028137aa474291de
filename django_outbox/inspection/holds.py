"""What is held: deliveries that wait for a pause, an open circuit breaker or a dead event to end.

A delivery is held since it fell due or since the hold began, whichever is later; it is not late.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

from django.db.models import Exists, OuterRef, Subquery
from django.db.models.functions import Coalesce

from ..conf import current
from ..listeners.history import first_line
from ..models import OutboxEvent, OutboxPause, OutboxStream
from ..models.fields import IsIndexed, age
from ..queue_settings import parked_queue
from ..sql.dialect import Waiting
from ..sql.values import CLOSING_KINDS

COUNT_LIMIT: Final = 10_000  # due events of a queue that are counted, and as many streams
MAX_PAUSES: Final = 200  # that are read
MAX_DEAD_HEADS: Final = 1000  # dead events that block their streams, and are read
MAX_HELD: Final = 900.0  # seconds
BREAKER, DEAD = "breaker", "dead"
HEAD: Final = ("pk", "key", "event_id", "last_error", "done_at", "due")  # read of a dead event
KINDS: Final = (*OutboxPause.Kind.values, DEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A pause, an open circuit breaker, or a dead event that blocks its stream; what it holds."""

    kind: str  # one of KINDS
    name: str  # of the pause; the key of a dead event
    by: str  # who paused it; the dead event
    reason: str
    since: datetime
    until: datetime | None = None  # of a breaker: its next probe
    planned: bool = False  # a person gave it an end, which has not passed
    events: int = 0  # without a key; at most COUNT_LIMIT
    streams: int = 0  # at most COUNT_LIMIT
    age: float = 0.0  # seconds that the oldest of them has been held
    queue: str = ""  # where they wait
    id: str = ""  # of the pause, or of the dead delivery

    @property
    def count(self) -> int:
        return self.events + self.streams

    def as_row(self) -> dict[str, Any]:
        """Return plain values, as reports show them."""
        own = ("queue", "id")
        return {name: value for name, value in asdict(self).items() if name not in own}


def load_pauses(alias: str) -> list[OutboxPause]:
    """Return the pauses and open circuit breakers, the oldest first."""
    return [*OutboxPause.objects.using(alias).order_by("paused_at", "pk")[:MAX_PAUSES]]


def load_holds(
    alias: str, now: datetime, pauses: Sequence[OutboxPause], waiting: Iterable[Waiting]
) -> list[Hold]:
    """Return what holds deliveries back, by a bounded query: pauses first, the oldest first.

    ``waiting``: what is due in their queues. In ``MODE`` "writer_only" nothing is held.
    """
    return [*_pauses(now, pauses, waiting), *_dead_heads(alias, now)]


def held_queue(pause: OutboxPause) -> str:
    """Return the queue that a pause closes, or the one in which it parks deliveries."""
    return pause.name if pause.kind in CLOSING_KINDS else parked_queue(pause.pk)


def _pauses(
    now: datetime, pauses: Sequence[OutboxPause], waiting: Iterable[Waiting]
) -> Iterator[Hold]:
    # A queue that a person has paused is held by that, whether its breaker is open or not.
    by_person_last = sorted(pauses, key=lambda each: each.kind != BREAKER)
    holding = {held_queue(each): each.pk for each in by_person_last}
    for each in pauses:
        queue, until = held_queue(each), each.until
        found = [one for one in waiting if one.queue == queue and holding[queue] == each.pk]
        oldest = max((one.age for one in found), default=0.0)
        yield Hold(
            kind=each.kind,
            name=each.name,
            by=each.paused_by,
            reason=each.reason,
            since=each.paused_at,
            until=until,
            planned=each.kind != BREAKER and until is not None and until > now,
            events=sum(one.number for one in found if one.kind != "lane"),
            streams=sum(one.number for one in found if one.kind == "lane"),
            age=min(oldest, age(each.paused_at, now)) if found else 0.0,
            queue=queue,
            id=str(each.pk),
        )


def _dead_heads(alias: str, now: datetime) -> Iterator[Hold]:
    if current().MODE == "writer_only" or current().ON_DEAD != "block":
        return
    indexed = OutboxEvent.objects.using(alias).filter(IsIndexed("status"))
    behind = indexed.pending().filter(stream=OuterRef("stream"), seq__gt=OuterRef("seq"))
    due = behind.order_by("seq").values(due=Coalesce("deliver_at", "first_due_at", "created_at"))
    idle = OutboxStream.objects.filter(pk=OuterRef("stream"), due_at=None, locked_by=None)
    dead: Any = indexed.dead().filter(Exists(idle), stream__isnull=False).order_by()
    heads = dead.annotate(due=Subquery(due[:1])).filter(due__isnull=False)[:MAX_DEAD_HEADS]
    for pk, key, event_id, error, since, due_at in heads.values_list(*HEAD):
        yield Hold(
            kind=DEAD,
            name=key,
            by=f"event {event_id}",
            reason=first_line(error),
            since=since,
            streams=1,
            age=age(max(since, due_at), now),
            id=pk,
        )
