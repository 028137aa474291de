"""Gates, one for each queue: whether, how many and when of its events a worker may claim."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from ..clocks import monotonic
from ..conf import Settings
from ..delivery.lease import Lease, Run
from ..delivery.route import is_async
from ..events import Event
from ..listeners.queues import batch_room, has_only_batches, routes_of_new, row_id
from ..queue_settings import QueueSettings
from ..setting_rules import CENTURY
from ..sql.values import EVENTS, STREAMS, Branch, Found, Table
from .held import Held
from .pauses import READ_INTERVAL, Breaker, KnownPauses
from .polling import TokenBucket, Wakeup, Watermark
from .ready import Decisions, Offer, Offers, Ready

SHRINK_ABOVE = 1.0  # seconds from the claim to the start; what waits longer was claimed too early
# Seconds; after shorter waits the limit doubles. Twice as many events wait twice as long, and idle
# workers lack them.
GROW_BELOW = 0.2
# Seconds; after shorter waits, eight times as many events will start soon, too.
GROW_FAST_BELOW = 0.02
BUSY_AFTER = 0.25  # seconds without a free thread after which other workers may be faster
RECENT = 0.05  # seconds; a queue whose last start is longer ago waits for slow listeners
MIN_PER_THREAD = 2  # times the threads: the smallest limit, however long listeners take
CLAIMS_TO_FILL = 4  # claims that it takes to fill a worker's memory with large payloads
ASSUMED_PAYLOAD = 1024.0  # bytes that a payload is expected to have before the first claim
MAX_THREAD_WAIT = 2.0  # seconds that an event waits for a thread before it is left to others
RELEASE_INTERVAL = 0.5  # seconds between two searches for events that have waited that long
MAX_EXCLUDED = 1000  # events that are left out of claims; beyond that, the list is cleared


class Gate:
    """One queue in this worker: what may be claimed of it, and what waits for its threads.

    Claims take what will start soon, not all that fits: 1,000 events of 0.2 s took 51 s with three
    workers, because the first one had claimed them all; 22 s were possible. So the limit grows
    while events start soon after their claim, and shrinks otherwise.
    """

    def __init__(
        self,
        queue: QueueSettings,
        *,
        alias: str,
        settings: Settings,
        most_bytes: int,
        held: Held,
        known_pauses: KnownPauses,
        wakeup: Wakeup,
    ) -> None:
        """``most_bytes``: the queue's share of the payload text that may be in memory."""
        self.name, self.settings = queue.name, queue
        self.breaker = Breaker(
            queue, alias=alias, held=held, known_pauses=known_pauses, wakeup=wakeup
        )
        self.rate = TokenBucket(queue.RATE) if queue.RATE else None
        self.ready = Ready(on_idle=self.made_room)
        self.offers = Offers(
            settings.HOT_QUEUE_CAPACITY, most_bytes=most_bytes, lock=held.lock, wakeup=wakeup
        )
        # Called with each decision.
        self.report = self.breaker.record if queue.BREAKER else None
        self.known_pauses, self._wakeup = known_pauses, wakeup
        self._held, self._load, self._most_bytes = held, held.load(queue.name), most_bytes
        self._max_size, self._batch = settings.COLD_QUEUE_CAPACITY, settings.POLL_BATCH_SIZE
        self._wants_room = False  # the claimer waits for room
        # Only the claimer's thread uses what follows.
        self._marks = {EVENTS: Watermark(margin=settings.SKIP_RECENT), STREAMS: Watermark()}
        self.free = 0  # events that may be claimed in this step
        self.more = False  # more was due than the last claim took
        self.has_left_offers = False  # offers were left to other workers in this step
        self.poll_at = 0.0  # monotonic; the next poll; 0: as something was reported
        self.asked_at = -inf  # monotonic; when the table was last asked for what is due
        self._release_at = self._rate_at = 0.0  # monotonic; not before
        self._size = self._min_size  # events that may wait for a thread
        self._mean_payload = ASSUMED_PAYLOAD  # bytes
        # By id, since when (monotonic) events were due that the event loop had no place for. Claims
        # leave them to other workers for as long as the loop is full.
        self.excluded: dict[str, float] = {}
        self._was_closed = False

    # -- for any thread --------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the queue is paused, by a person or by its circuit breaker."""
        return bool(self.breaker.trip_reason) or self.name in self.known_pauses.closed

    @property
    def probing(self) -> bool:
        """Whether one event is tried while its circuit breaker is open."""
        return self.breaker.is_probing

    def turn_away(self, lease: Lease) -> None:
        """Note that an event may not start while the gate is closed, unless it is its probe.

        The thread drops the event then, and the claimer releases it.
        """
        lease.turned_away = not self.breaker.is_probe(lease)

    def made_room(self) -> None:
        """Report that an event has left the queue; a claimer that waits for room goes on."""
        if self._wants_room:
            self._wakeup.wake()

    def starts_soon(self, now: float) -> bool:
        """Return whether events wait for threads that are not busy for long."""
        return len(self.ready) > 0 and self._load.last_start > now - RECENT

    # -- how many now ----------------------------------------------------------------------------

    def room(self, now: float) -> int:
        """Return how many events may be claimed; 0 until that is a fair part of a batch."""
        closed = self.closed
        if self._was_closed and not closed:
            self.poll_soon(CENTURY)
        self._was_closed, self._wants_room, self.free = closed, not closed, 0
        self.has_left_offers = False
        if closed:
            self.leave_offers()  # the next poll after the pause finds them
        elif self._is_busy(now):
            self.has_left_offers = self.leave_offers()
        elif (places := self._places(now)) > 0:
            self._wants_room = False
            self.free = self._within_rate(now, places)
            self.has_left_offers = not self.free and self.leave_offers()
        return self.free

    def leave_offers(self) -> bool:
        """Leave what this process offered to other workers; return whether there was anything."""
        return bool(self.offers.take(len(self.offers)))

    def _is_busy(self, now: float) -> bool:
        """Return whether no thread was free for a while, so that a claimed event would wait."""
        is_idle = self.ready.idle or not self._load.held
        return not is_idle and now - self._load.last_start > BUSY_AFTER

    def _places(self, now: float) -> int:
        """Return how many more events may wait, in memory and for a thread or the event loop.

        Others wait behind the first events of their streams. Those that wait for the event loop
        take no room from the threads: a blocked loop must not stop them.
        """
        waiting, for_loop, load = len(self.ready), self.ready.waiting_for_loop, self._load
        if self.excluded and not for_loop:
            self._marks[EVENTS].lower(now - min(self.excluded.values()))
            self.excluded.clear()
        self._resize()
        in_flight = self.settings.WORKERS + self.settings.ASYNC_CONCURRENCY
        room = min(
            self._size - waiting,
            max(self._size, self.settings.ASYNC_CONCURRENCY) - for_loop,
            self._max_size - waiting - for_loop - load.followers,
            2 * self._max_size + in_flight - load.held,  # or wait to be settled
            max(int(self._bytes_left / self._mean_payload), 1),
        )
        if load.payload_bytes >= self._most_bytes:
            return 0
        worthwhile = min(self._batch, self._size) // 2
        return room if room >= worthwhile or (room > 0 and not waiting) else 0

    def _resize(self) -> None:
        """Adapt the limit to the waits of started events, once these are more than the threads.

        The first ones start at once, however long their listeners take.
        """
        load, least = self._load, self._min_size
        self._size, waited = max(self._size, least), load.longest_wait
        if load.started <= self.settings.WORKERS and waited <= SHRINK_ABOVE:
            return
        with self._held.lock:
            load.started, load.longest_wait = 0, -inf
        if waited > SHRINK_ABOVE:
            self._size = max(self._size // 2, least)
        elif waited < GROW_BELOW and (self.more or len(self.offers)):
            factor = 8 if waited < GROW_FAST_BELOW else 2
            self._size = min(factor * self._size, self._max_size)

    @property
    def _min_size(self) -> int:
        """The smallest limit: two events for each thread, or a whole batch for each listener.

        In a queue with other listeners, too, only those count that have had events: a backlog of
        the others may be slow, and is to be shared.
        """
        batches = batch_room(self.name) if has_only_batches(self.name) else self.ready.batch_room
        return min(max(MIN_PER_THREAD * self.settings.WORKERS, batches), self._max_size)

    def _within_rate(self, now: float, places: int) -> int:
        """Return how many of ``places`` the rate leaves; if there are none, ask again in time."""
        if self.rate is None:
            return places
        available, wait = self.rate.available(), self.rate.wait()
        if available < 1 or (self.more and wait > 0):
            self._rate_at = now + max(wait, 0.001)
            return 0
        return min(places, available)

    @property
    def _bytes_left(self) -> int:
        """How many bytes of payload text one claim may bring.

        That is part of what the queue's share of PREFETCH_BYTES leaves, since the driver keeps a
        second copy of the rows while it returns them.
        """
        return max((self._most_bytes - self._load.payload_bytes) // CLAIMS_TO_FILL, 1)

    # -- when again ------------------------------------------------------------------------------

    def again(self, now: float) -> float:
        """Return when (monotonic) to ask again, unless something wakes the claimer before."""
        if self.free:
            return self.poll_at
        if self.closed:  # the pause may end
            return min(now + READ_INTERVAL, self.breaker.due_at)
        return min(now + RELEASE_INTERVAL, self._rate_at if self._rate_at > now else inf)

    def poll_soon(self, waited: float = 0.0) -> None:
        """Poll as soon as there is room, for what has been due for ``waited`` seconds."""
        for each in self._marks.values():
            each.lower(waited)
        self.poll_at = 0.0

    def ended_poll(self, until: float | None, *, asked_at: float) -> None:
        """Poll again ``until`` (monotonic), because nothing more is due; None: more is."""
        self.more, self.asked_at = until is None, asked_at
        self.poll_at = min(self.poll_at, asked_at) if until is None else until

    # -- claims and releases ---------------------------------------------------------------------

    def branch(self, table: Table, limit: int, *, scan: bool) -> Branch:
        """Return what a claim takes of this queue, at most ``limit`` rows."""
        since = self._marks[table].begin_claim(scan=scan)
        return Branch(self.name, limit, since, self._bytes_left if table is EVENTS else None)

    def polled(self, table: Table, found: Found) -> None:
        """Note what a claim of its branch has found, of all that is due."""
        self._marks[table].end_claim(found)

    def claimed(self, leases: Sequence[Lease]) -> None:
        """Note events that were claimed, and are to run here."""
        if not leases:
            return
        self.free -= len(leases)
        mean = sum(each.payload_bytes for each in leases) / len(leases)
        self._mean_payload = max(mean, self._mean_payload / 2, 1.0)
        if self.rate is not None:
            self.rate.spend(len(leases))

    def to_release(self, now: float) -> list[Run]:
        """Return what other workers are to have: all while it is closed, or what waits too long."""
        if self.closed and not self.probing:
            return self._held.late(inf, self.name) if self._load.held else []
        if now < self._release_at:
            return []
        self._release_at = now + RELEASE_INTERVAL
        return self._held.late(now - MAX_THREAD_WAIT, self.name)

    def released(self, rows: Sequence[Lease], now: float) -> None:
        """Note that events were released unstarted; poll again as soon as a thread is free."""
        if not rows:
            return
        if self.rate is not None:
            self.rate.spend(-len(rows))
        if len(self.excluded) > MAX_EXCLUDED:
            self.excluded.clear()
        self.excluded |= {each.id: each.claimed_at - each.lag for each in rows if is_async(each)}
        self.poll_soon(max(each.lag + now - each.claimed_at for each in rows))


class Gates:
    """The gates of a worker: what writers, threads and verbs know of its queues."""

    def __init__(self, gates: Iterable[Gate], *, wakeup: Wakeup) -> None:
        self.by_queue = {each.name: each for each in gates}
        self.decisions, self.wakeup = Decisions(), wakeup
        self.settle = self.decisions.add  # has a decision settled
        self.others = 0  # other live workers; set by the heartbeat

    def __iter__(self) -> Iterator[Gate]:
        return iter(self.by_queue.values())

    def serves(self, queue: str) -> bool:
        """Return whether this worker delivers events of the queue."""
        return queue in self.by_queue

    def offer(self, event: Event) -> bool:
        """Take the rows of a committed event; return False if some are left out. Never raise."""
        taken = True
        for place, route in enumerate(routes_of_new(event)):
            gate = self.by_queue.get(route.queue)
            id_ = row_id(event.event_id, route.digest) if place else event.event_id
            taken &= gate is not None and gate.offers.offer(Offer(id_, route.title, event))
        return taken

    def poll(self) -> None:
        """Have the claimer poll the table, where an event is due now or later."""
        self.wakeup.poll()

    def close(self) -> None:
        """Accept no more offers."""
        for gate in self:
            gate.offers.close()

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
        for name, gate in self.by_queue.items():
            gate.ready.put(*[each for each in leases if each.queue == name])

    def claimed(self, leases: Sequence[Lease]) -> None:
        """Note events that were claimed, and are to run here."""
        for queue, gate in self.by_queue.items():
            gate.claimed([each for each in leases if each.queue == queue])
