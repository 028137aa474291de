"""Limits how many claimed events wait for a thread: those that start soon, not all that fit."""

from __future__ import annotations

from ..conf import Settings
from ..listeners.queues import batch_room, has_only_batches
from ..queue_settings import QueueSettings
from .held import Held
from .ready import Ready

SHRINK_ABOVE = 1.0  # seconds from the claim to the start; what waits longer was claimed too early
# Seconds; after shorter waits the limit doubles. Twice as many events wait twice as long, and idle
# workers lack them.
GROW_BELOW = 0.2
# Seconds; after shorter waits, eight times as many events will start soon, too.
GROW_FAST_BELOW = 0.02
BUSY_AFTER = 0.25  # seconds without a free thread after which other workers may be faster
MIN_PER_THREAD = 2  # times the threads: the smallest limit, however long listeners take
CLAIMS_TO_FILL = 4  # claims that it takes to fill a worker's memory with large payloads
ASSUMED_PAYLOAD = 1024  # bytes that a payload is expected to have before the first claim


class Prefetch:
    """Grows while events start soon after their claim, and shrinks otherwise. One thread only.

    Claiming all that fit would leave other workers idle: 1,000 events of 0.2 s took 51 s with three
    workers, because the first one had claimed them all; 22 s were possible.
    """

    def __init__(
        self, settings: Settings, queue: QueueSettings, *, held: Held, ready: Ready, most_bytes: int
    ) -> None:
        """Limit the events of one queue; ``most_bytes``: of payload text that may be in memory."""
        self._settings, self._queue, self._most_bytes = settings, queue, most_bytes
        self._held, self._load, self._ready = held, held.load(queue.name), ready
        self._max_size = settings.COLD_QUEUE_CAPACITY
        self._in_flight = queue.WORKERS + queue.ASYNC_CONCURRENCY
        self._mean_payload = float(ASSUMED_PAYLOAD)  # bytes of a payload
        self.size = self._min_size

    @property
    def _min_size(self) -> int:
        """The smallest limit: two events for each thread, or a whole batch for each listener.

        In a queue with other listeners, too, only those count that have had events: a backlog of
        the others may be slow, and is to be shared.
        """
        name = self._queue.name
        batches = batch_room(name) if has_only_batches(name) else self._ready.batch_room
        least = max(MIN_PER_THREAD * self._queue.WORKERS, batches)
        return min(least, self._max_size)

    def adapt(self, *, backlog: bool) -> None:
        """Adapt the limit to the waits of started events, once these are more than the threads.

        The first ones start at once, however long their listeners take.
        """
        load = self._load
        self.size = max(self.size, self._min_size)
        waited = load.longest_wait
        if load.started <= self._queue.WORKERS and waited <= SHRINK_ABOVE:
            return
        with self._held.changed:
            load.reset_starts()
        if waited > SHRINK_ABOVE:
            self.size = max(self.size // 2, self._min_size)
        elif backlog and waited < GROW_BELOW:
            self.size = min((8 if waited < GROW_FAST_BELOW else 2) * self.size, self._max_size)

    @property
    def holds_any(self) -> bool:
        """Return whether any event of the queue is leased."""
        return self._load.held > 0

    def is_busy(self, now: float) -> bool:
        """Return whether no thread was free for a while, so that a claimed event would wait."""
        if self._ready.idle or not self._load.held:
            return False
        return now - self._load.last_start > BUSY_AFTER

    def room(self, *, for_loop: int) -> int:
        """Return how many events to claim; 0 until that is a fair part of a batch.

        ``for_loop`` events wait for the event loop, others behind the first events of their
        streams. The former take no room from the threads: a blocked loop must not stop them.
        """
        waiting, settings, load = len(self._ready), self._settings, self._load
        room = min(
            self.size - waiting,
            max(self.size, self._queue.ASYNC_CONCURRENCY) - for_loop,
            self._max_size - waiting - for_loop - load.followers,
            2 * self._max_size + self._in_flight - load.held,  # or wait to be settled
            self._affordable,
        )
        worthwhile = min(settings.POLL_BATCH_SIZE, self.size) // 2
        return room if room >= worthwhile or (room > 0 and not waiting) else 0

    @property
    def bytes_left(self) -> int:
        """Return how many bytes of payload text one claim may bring.

        That is part of what the queue's share of PREFETCH_BYTES leaves, since the driver keeps a
        second copy of the rows while it returns them.
        """
        return max((self._most_bytes - self._load.payload_bytes) // CLAIMS_TO_FILL, 1)

    @property
    def _affordable(self) -> int:
        """Return how many events of recent size a claim may bring; 0 if the memory is used up."""
        if self._load.payload_bytes >= self._most_bytes:
            return 0
        return max(int(self.bytes_left / self._mean_payload), 1)

    def note_sizes(self, count: int, total: int) -> None:
        """Note that a claim brought ``count`` payloads of ``total`` bytes."""
        if count:
            self._mean_payload = max(total / count, self._mean_payload / 2, 1.0)
