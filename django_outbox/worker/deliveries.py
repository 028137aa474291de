"""``Deliveries``: begins the deliveries of a queue, and passes on what they decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import maxsize
from typing import Protocol

from ..conf import current
from ..delivery.decide import AFTER_ERROR
from ..delivery.delivery import Delivery, Report
from ..delivery.lease import Lease
from ..delivery.route import batch_listener, batch_size
from ..listeners.outcomes import Decision
from ..listeners.registry import Listener
from .pauses import KnownPauses
from .ready import Lane, Ready
from .runs import Runs


class Queue(Protocol):
    """What deliveries need of their queue: a ``Gate``, or ``drain()``."""

    ready: Ready
    known_pauses: KnownPauses

    @property
    def report(self) -> Report | None:
        """What counts the calls: the queue's breaker."""

    @property
    def probing(self) -> bool:
        """Whether one event is tried while its circuit breaker is open."""

    @property
    def closed(self) -> bool:
        """Whether it is paused, by a person or by its circuit breaker."""

    def turn_away(self, lease: Lease) -> None:
        """Note that an event may not start while the queue is closed, unless it is the probe."""


class Deliveries:
    """Begins the deliveries of a queue; its threads, its event loop or ``drain()`` make them."""

    def __init__(self, *, alias: str, queue: Queue, runs: Runs) -> None:
        self.alias, self.held = alias, runs.held
        self._queue, self._pools, self._runs = queue, runs.pools, runs

    def take(self, found: Lane, room: int = maxsize) -> list[Lease]:
        """Take the next batch of a lane, at most ``room`` events."""
        most = 1 if self._queue.probing else min(found.size, room)
        most_bytes = current().BATCH_BYTES
        heads = found.take(most, most_bytes)
        self._queue.ready.put_back(found)
        return self._with_followers(found.listener, heads, most, most_bytes)

    def _with_followers(
        self, listener: Listener, heads: list[Lease], most: int, most_bytes: int
    ) -> list[Lease]:
        """Return up to ``most`` events: ``heads``, and what ``per_key`` lets follow them.

        The last one may overshoot ``most_bytes`` of payload text.
        """
        batching = listener.batching
        assert batching is not None
        if batching.per_key == 1:
            return heads

        def fits(lease: Lease) -> bool:
            is_next = batch_listener(lease) is listener
            return is_next and batch_size(listener, lease) == batching.size

        found: list[Lease] = []
        room = most - len(heads)
        room_in_bytes = most_bytes - sum(each.payload_bytes for each in heads)
        for lease in heads:
            found.append(lease)
            last, count = lease, 1
            while count < batching.per_key and room > 0 and room_in_bytes > 0 and fits(last):
                follower = self._runs.follower_of(last, fits)
                if follower is None:
                    break
                found.append(follower)
                last, count = follower, count + 1
                room, room_in_bytes = room - 1, room_in_bytes - follower.payload_bytes
        return found

    def start(self, leases: list[Lease], is_stopping: Callable[[], bool]) -> list[Lease]:
        """Start those that may start; wait for a renewal of their leases if need be."""
        if self._queue.closed:
            for each in leases:
                self._queue.turn_away(each)
        started = self.held.start(leases)
        if started == leases:
            return started
        left = [each for each in leases if not each.started_at]
        for each in left:
            if not each.turned_away:
                self.held.wait_current(each, is_stopping)
        if not is_stopping():
            self.held.start(left)
        return [each for each in leases if each.started_at]

    def of(self, leases: list[Lease]) -> Delivery:
        """Return the delivery of events that have started."""
        pauses, report = self._queue.known_pauses.pauses, self._queue.report
        return Delivery(leases, self.alias, self.held.is_current, pauses, report)

    def pass_on(self, delivery: Delivery) -> list[Lease]:
        """Have decisions settled; return the events behind them that may run before that."""
        decided, delivery.decided = delivery.decided, []
        if delivery.to_repeat:  # first: once its stream goes on, an event is read anew
            self._runs.wait_again(delivery.to_repeat)
            delivery.to_repeat = []
        last: dict[str, tuple[Lease, Decision]] = {}  # of each stream
        for each in decided:
            if each[0].stream is not None:
                last[each[0].stream] = each
        ahead = [self._runs.next(*each) for each in last.values()] if last else []
        for each in decided:
            self._pools.settle(each)
        return [each for each in ahead if each is not None] if ahead else []

    def put(self, leases: Sequence[Lease]) -> None:
        """Queue events for the threads of their queues."""
        if leases:
            self._pools.put(leases)

    def put_all_but_one(self, followers: list[Lease]) -> None:
        """Queue what may run next, but for a single event: the same thread goes on with that."""
        if len(followers) > 1 or any(map(batch_listener, followers)):
            self._pools.put(followers)
            followers.clear()

    def end(self, delivery: Delivery) -> None:
        """Pass on what a delivery has decided that went wrong; what it left comes back."""
        delivery.decided += [(lease, AFTER_ERROR) for lease in delivery.left.values()]
        delivery.left.clear()
        self.put(self.pass_on(delivery))
