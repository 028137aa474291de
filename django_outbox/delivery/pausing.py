"""What is kept waiting while an event type, a listener or a stream is paused."""

from __future__ import annotations

from typing import Final

from .. import registry
from ..dialects.vocabulary import Pauses
from ..outcomes import Decision, Status
from .progress import NEW, PAUSE, entries

# Of what a worker had in hand when the pause began.
PAUSED: Final = Decision(status=Status.NEW, delay=PAUSE, outcome="deferred")


def is_paused(
    pauses: Pauses, event_type: str, aggregate_type: str, progress: str | None, key: str | None
) -> bool:
    """Say whether nothing of the event may be delivered now.

    An event with several listeners waits only once each that is left of them is paused.
    """
    if ("event_type", event_type) in pauses or ("stream", key) in pauses:
        return True
    titles = paused_listeners(pauses)
    if not titles:
        return False
    reached = entries(progress) or {}
    left = [
        each.title
        for each in registry.route(aggregate_type, event_type)
        if reached.get(each.title, NEW).state == "due"
    ]
    return bool(left) and titles.issuperset(left)


def paused_listeners(pauses: Pauses) -> frozenset[str]:
    """Return the titles of the listeners that are paused."""
    return frozenset(name for kind, name in pauses if kind == "listener")
