"""The gates of a worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..clocks import monotonic
from ..delivery.lease import Lease
from ..events import Event
from ..listeners.queues import routes_of_new, row_id
from .gate import Gate
from .queues import Decisions, Offer
from .wakeup import Wakeup


class Gates:
    """The gates of a worker, by queue: what writers, threads and verbs know of its queues."""

    def __init__(self, gates: Iterable[Gate], *, decisions: Decisions, wakeup: Wakeup) -> None:
        self.by_queue = {each.name: each for each in gates}
        self.settle, self._wakeup = decisions.put, wakeup  # ``settle``: have a decision settled
        self.others = 0  # other live workers

    def __iter__(self) -> Iterator[Gate]:
        return iter(self.by_queue.values())

    # -- the hot queue, for the writers in this process ------------------------------------------

    def serves(self, queue: str) -> bool:
        """Return whether this worker delivers events of the queue."""
        return queue in self.by_queue

    def offer(self, event: Event) -> bool:
        """Accept the rows of an event that was committed, or return False if some are left out.

        Never block, never raise.
        """
        taken = True
        for place, route in enumerate(routes_of_new(event)):
            gate = self.by_queue.get(route.queue)
            id_ = row_id(event.event_id, route.digest) if place else event.event_id
            taken &= gate is not None and gate.offers.offer(Offer(id_, route.title, event))
        return taken

    def poll(self) -> None:
        """Have the claimer poll the table, where an event is due now or later."""
        self._wakeup.poll()

    def close(self) -> None:
        """Accept no more offers."""
        for gate in self:
            gate.offers.close()

    # -- for the engine --------------------------------------------------------------------------

    def made_room(self) -> None:
        """Report that events were settled; a claimer that waits for room goes on."""
        for gate in self:
            gate.made_room()

    def start_soon(self) -> bool:
        """Return whether events wait for threads that are not busy for long."""
        now = monotonic()
        return any(gate.starts_soon(now) for gate in self)

    def accepts(self, queue: str) -> bool:
        """Return whether this worker serves the queue, and may start events of it."""
        gate = self.by_queue.get(queue)
        return gate is not None and (gate.probing or not gate.closed)

    def put(self, leases: Sequence[Lease]) -> None:
        """Queue leases for the threads of their queues."""
        for name in {each.queue for each in leases}:
            self.by_queue[name].ready.put(*[each for each in leases if each.queue == name])

    def follow_others(self, count: int) -> None:
        """Set the number of other live workers."""
        self.others = count
