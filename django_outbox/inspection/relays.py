"""The relays of ``OUTBOX["RELAYS"]``, each with the state of its queue in one database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..conf import current
from ..relay_settings import RelaySettings
from .queues import QueueState


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
