"""``Pool``: a queue's threads and what waits for them; ``Pools``: those of one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..clocks import monotonic
from ..delivery.call import report_nothing
from ..delivery.deliver import batch_listener, batch_size
from ..delivery.lease import Lease
from ..events import Event
from ..listeners.outcomes import Decision
from ..listeners.queues import routes_of_new, row_id
from ..queue_settings import DEFAULT_QUEUE, QueueSettings
from ..sql.values import Pauses
from .breaker import Breaker
from .held import Held
from .pauses import KnownPauses
from .queues import AsyncLoad, Decisions, Offer, Offers
from .rate import RateLimit
from .ready import Lane, Ready
from .wakeup import Wakeup

RECENT = 0.05  # seconds; a queue whose last start is longer ago waits for slow listeners


class Pool:
    """One queue in this worker: its settings, and what waits for its threads."""

    # Set while the parts of a worker are connected:
    async_load: Callable[[], AsyncLoad]  # how busy its event loop is
    to_loop: Callable[[Lease], None]  # has its event loop deliver a lease
    lane_to_loop: Callable[[Lane], None]  # the same, with the next batch of a lane

    def __init__(
        self,
        settings: QueueSettings,
        *,
        offers: Offers,
        breaker: Breaker | None,
        known_pauses: KnownPauses,
        wakeup: Wakeup,
    ) -> None:
        self.name, self.settings = settings.name, settings
        self.offers, self.breaker = offers, breaker
        self.rate = RateLimit(settings.RATE) if settings.RATE else None
        self._known_pauses, self._wakeup = known_pauses, wakeup
        self.needs_room = False  # the claimer waits for room in it; set by its thread
        self.ready = Ready(on_idle=self.made_room)
        self.report = breaker.record if breaker else report_nothing  # called with each decision

    def made_room(self) -> None:
        """Report that an event has left it; a claimer that waits for room goes on."""
        if self.needs_room:
            self._wakeup.wake()

    def thread_name(self, alias: str, role: str) -> str:
        """Return the name of one of its threads, for an alias."""
        name = alias if self.name == DEFAULT_QUEUE else f"{alias}-{self.name}"
        return f"outbox-{name}-{role}"

    @property
    def is_closed(self) -> bool:
        """Return whether the queue is paused, by a person or by its circuit breaker."""
        if self.breaker is not None and self.breaker.is_tripped:
            return True
        return self.name in self._known_pauses.closed

    def may_start(self, lease: Lease) -> bool:
        """Return whether an event may start: the queue is open, or the event is its probe.

        Otherwise, note that: the thread drops the event, and the claimer releases it.
        """
        is_probe = self.breaker is not None and self.breaker.is_probe(lease)
        lease.turned_away = self.is_closed and not is_probe
        return not lease.turned_away

    @property
    def pauses(self) -> Pauses:
        """Return what is paused."""
        return self._known_pauses.pauses

    @property
    def is_probing(self) -> bool:
        """Return whether one event is tried while its circuit breaker is open."""
        return self.breaker is not None and self.breaker.is_probing

    def put(self, *leases: Lease) -> None:
        """Have its threads or its event loop deliver leases, alone or in batches.

        Lanes are offered at the end, so that no thread takes the first event of a batch alone.
        """
        lanes: set[Lane] = set()
        for lease in leases:
            listener = batch_listener(lease)
            if listener is None:
                self.ready.put(lease)
                continue
            lane = self.ready.lane(listener, batch_size(listener, lease))
            lane.leases.append(lease)
            lanes.add(lane)
        for lane in lanes:
            self.ready.offer(lane)


class Pools:
    """The pools of a worker, by queue."""

    def __init__(
        self, pools: Mapping[str, Pool], *, held: Held, decisions: Decisions, wakeup: Wakeup
    ) -> None:
        self._pools, self._held, self._decisions = pools, held, decisions
        self._wakeup = wakeup

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def __len__(self) -> int:
        return len(self._pools)

    # -- the hot queue, for the writers in this process ------------------------------------------

    def serves(self, queue: str) -> bool:
        """Return whether this worker delivers events of the queue."""
        return queue in self._pools

    def offer(self, event: Event) -> bool:
        """Accept the rows of an event that was committed, or return False if some are left out.

        Never block, never raise.
        """
        taken = True
        for place, route in enumerate(routes_of_new(event)):
            pool = self._pools.get(route.queue)
            id_ = row_id(event.event_id, route.digest) if place else event.event_id
            taken &= pool is not None and pool.offers.offer(Offer(id_, route.title, event))
        return taken

    def poll(self) -> None:
        """Have the claimer poll the table, where an event is due now or later."""
        self._wakeup.poll()

    def close(self) -> None:
        """Accept no more offers."""
        for pool in self:
            pool.offers.close()

    # -- the pools -------------------------------------------------------------------------------

    def get(self, queue: str) -> Pool | None:
        """Return the pool of a queue; None if this worker does not serve it."""
        return self._pools.get(queue)

    def made_room(self) -> None:
        """Report that events were settled; a claimer that waits for room goes on."""
        for pool in self:
            pool.made_room()

    def start_soon(self) -> bool:
        """Return whether events wait for threads that are not busy for long."""
        recently = monotonic() - RECENT
        return any(
            len(pool.ready) and self._held.load(pool.name).last_start > recently for pool in self
        )

    def accepts(self, queue: str) -> bool:
        """Return whether this worker serves the queue, and may start events of it."""
        pool = self._pools.get(queue)
        if pool is None:
            return False
        return not pool.is_closed or (pool.breaker is not None and pool.breaker.is_probing)

    def put(self, lease: Lease) -> None:
        """Queue a lease for the threads of its queue."""
        self._pools[lease.queue].put(lease)

    def put_all(self, leases: list[Lease]) -> None:
        """Queue leases for the threads of their queues."""
        for name in {each.queue for each in leases}:
            self._pools[name].put(*[each for each in leases if each.queue == name])

    def settle(self, lease: Lease, decision: Decision) -> None:
        """Have a decision settled."""
        self._decisions.put((lease, decision))
