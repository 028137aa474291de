"""``Scope``: which listeners of an event may be called now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ..listeners.outcomes import Decision
from ..listeners.queues import queue_of
from ..listeners.registry import Listener
from ..sql.values import CLOSING_KINDS, Pauses

NO_PAUSES: Pauses = frozenset()


@dataclass(frozen=True, slots=True)
class Scope:
    """The listeners that one pool may call, and what receives the decision of each call."""

    queues: frozenset[str] | None = None  # only the listeners of these; None: of all queues
    pauses: Pauses = NO_PAUSES
    report: Callable[[Listener, Decision], None] | None = None
    batch: str | None = None  # the title of the one batch listener to be called; None: others

    def of_batch(self, title: str) -> Scope:
        """Return the scope for a call of one batch listener."""
        return Scope(self.queues, self.pauses, self.report, title)

    def includes(self, listener: Listener) -> bool:
        """Return whether the listener may be called here and now."""
        batch = listener.title if listener.batching is not None else None
        return batch == self.batch and self.may_call(listener)

    def may_call(self, listener: Listener) -> bool:
        """Return whether its queue belongs here, and neither it nor the queue is paused."""
        if self.queues is None and not self.pauses:
            return True
        queue = queue_of(listener)
        if self.queues is not None and queue not in self.queues:
            return False
        return not self.pauses or (
            queue not in closed_queues(self.pauses)
            and listener.title not in paused_listeners(self.pauses)
        )


EVERYTHING = Scope()


@lru_cache(maxsize=64)
def paused_listeners(pauses: Pauses) -> frozenset[str]:
    """Return the titles of the listeners that are paused."""
    return frozenset(name for kind, name in pauses if kind == "listener")


@lru_cache(maxsize=64)
def closed_queues(pauses: Pauses) -> frozenset[str]:
    """Return the queues that are paused, by a person or by their circuit breakers."""
    return frozenset(name for kind, name in pauses if kind in CLOSING_KINDS)
