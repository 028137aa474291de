"""The relays of ``OUTBOX["RELAYS"]``, each with the state of its queue in one database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.db.models.functions import Substr

from ..conf import current
from ..listeners.outcomes import UNSETTLED
from ..models import OutboxEvent
from ..relay_settings import RelaySettings
from .queues import QueueState

HELD_LIMIT: Final = 1000  # events that are read, and counted
REASON_LENGTH: Final = 200  # characters


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayState:
    """A relay and its queue."""

    settings: RelaySettings
    queue: QueueState

    @property
    def away_reason(self) -> str:
        """Why its broker is away, without the relay's own name; empty if it is not."""
        breaker = self.queue.breaker
        return breaker.reason.removeprefix(f"{self.settings.title}: ") if breaker else ""


def relay_states(queues: Sequence[QueueState]) -> list[RelayState]:
    """Return the relays in the order of the settings, from the states of all queues."""
    by_name = {each.name: each for each in queues}
    return [
        RelayState(settings=each, queue=by_name[each.title])
        for each in current().relays.values()
        if each.title in by_name
    ]
