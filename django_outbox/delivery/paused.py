"""Which events wait while an event type, a listener, a stream or a queue is paused."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from ..listeners.outcomes import Decision, Status
from ..models.pause_queryset import names_holding
from ..sql.values import CLOSING_KINDS, Pauses

NO_PAUSES: Pauses = frozenset()
PAUSED_DELAY = 1.0  # seconds until a paused row is due again; the next poll postpones it further
# For an event that a worker had already claimed when the pause began.
PAUSED: Final = Decision(status=Status.NEW, delay=PAUSED_DELAY, outcome="deferred")


def is_paused(pauses: Pauses, event_type: str, listener: str | None, key: str | None) -> bool:
    """Return whether an event may not be delivered now to the listener with this title."""
    return not pauses.isdisjoint(names_holding(event_type, listener, key))


@lru_cache(maxsize=64)
def closed_queues(pauses: Pauses) -> frozenset[str]:
    """Return the queues that are paused, by a person or by their circuit breakers."""
    return frozenset(name for kind, name in pauses if kind in CLOSING_KINDS)
