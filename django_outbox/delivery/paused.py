"""Which events wait while an event type, a listener or a stream is paused."""

from __future__ import annotations

from typing import Final

from ..listeners import registry
from ..listeners.outcomes import Decision, Status
from ..listeners.progress import NEW_ENTRY, PAUSED_DELAY, entries
from ..sql.values import Pauses
from .scope import paused_listeners

# For an event that a worker had already claimed when the pause began.
PAUSED: Final = Decision(status=Status.NEW, delay=PAUSED_DELAY, outcome="deferred")


def is_paused(
    pauses: Pauses, event_type: str, aggregate_type: str, progress: str | None, key: str | None
) -> bool:
    """Return whether no listener of the event may be called now.

    An event with several listeners waits only if all of those still to run are paused.
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
        if reached.get(each.title, NEW_ENTRY).state == "due"
    ]
    return bool(left) and titles.issuperset(left)
