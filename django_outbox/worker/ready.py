"""What waits: offers for the claimer, events and batches for threads, decisions for the settler."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from sys import maxsize
from typing import Generic, NamedTuple, TypeVar

from ..clocks import monotonic
from ..delivery.delivery import Delivery
from ..delivery.lease import Lease
from ..delivery.route import batch_listener, batch_size
from ..events import Event
from ..listeners.outcomes import Decision
from ..listeners.registry import Listener
from .polling import Wakeup

T = TypeVar("T")

logger = logging.getLogger("django_outbox")

WARN_EVERY = 60.0  # seconds between two warnings that the hot queue is full


class BlockingQueue(Generic[T]):
    """A queue from which threads take one item or a batch; it does not limit its own size."""

    def __init__(self, on_idle: Callable[[], None] = lambda: None) -> None:
        """``on_idle`` is called by a thread that finds the queue empty, before it waits."""
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self.add: Callable[[T], None] = self._queue.put
        self._on_idle = on_idle
        self._idle: deque[None] = deque()  # one for each thread that waits; its methods are atomic

    def __len__(self) -> int:
        return self._queue.qsize()

    @property
    def idle(self) -> int:
        """Return how many threads wait for an item."""
        return len(self._idle)

    def get(self, timeout: float) -> T | None:
        """Return the next item, or None after ``timeout`` seconds or when woken to stop."""
        try:
            return self._queue.get_nowait()
        except Empty:
            self._idle.append(None)
        try:
            self._on_idle()
            return self._queue.get(timeout=timeout)
        except Empty:
            return None
        finally:
            self._idle.pop()

    def get_all(self, most: int) -> list[T]:
        """Return the items that are queued now, at most ``most``, without waiting."""
        found: list[T] = []
        with suppress(Empty):
            while len(found) < most:
                if (item := self._queue.get_nowait()) is not None:
                    found.append(item)
        return found

    def get_each(self, most: int) -> Iterator[T]:
        """Yield the next items, at most ``most``, without waiting; leave what wakes threads."""
        with suppress(Empty):
            for _ in range(most):
                if (item := self._queue.get_nowait()) is None:
                    self._queue.put(None)
                    return
                yield item

    def wake(self, takers: int = 1) -> None:
        """End the wait of that many threads; their ``get`` returns None."""
        for _ in range(takers):
            self._queue.put(None)


def popped(items: deque[T]) -> T | None:
    """Return the next item, taken from them, or None if another thread took the last."""
    try:
        return items.popleft()
    except IndexError:
        return None


class Offer(NamedTuple):
    """A row that this process committed."""

    id: str
    listener: str | None  # its title; None: it is not routed
    event: Event


class Offers:
    """The hot queue: rows that this process committed and not yet claimed. It never blocks."""

    def __init__(
        self,
        capacity: int,
        *,
        most_bytes: int,
        lock: AbstractContextManager[object],
        wakeup: Wakeup,
    ) -> None:
        """Limit it to ``capacity`` rows, and to about ``most_bytes`` of payload text."""
        self._capacity, self._most_bytes = capacity, most_bytes
        self._bytes, self._lock = 0, lock  # the lock guards it, as several writers offer at once
        self._rows: deque[Offer] = deque()  # appended by writers, taken by the claimer
        self._open = True
        self._warn_at = 0.0  # monotonic; the earliest time of the next warning
        self._wakeup = wakeup

    def __len__(self) -> int:
        return len(self._rows)

    def offer(self, row: Offer) -> bool:
        if not self._open:
            return False
        if len(self._rows) >= self._capacity or self._bytes > self._most_bytes:
            self._warn(monotonic())
            return False
        with self._lock:
            self._bytes += payload_bytes(row.event)
        self._rows.append(row)
        self._wakeup.wake()
        return True

    def take(self, most: int) -> list[Offer]:
        if found := [self._rows.popleft() for _ in range(min(most, len(self._rows)))]:
            taken = sum(payload_bytes(each.event) for each in found)
            with self._lock:
                self._bytes -= taken
        return found

    def close(self) -> None:
        self._open = False

    def _warn(self, now: float) -> None:
        if now >= self._warn_at:  # two writers at once may both log it
            self._warn_at = now + WARN_EVERY
            logger.warning(
                "hot queue full; further events arrive by the cold route capacity=%d",
                self._capacity,
            )


def payload_bytes(event: Event) -> int:
    """Return the size of the event's payload text in characters, as nearly all are ASCII."""
    return len(event._payload_text or "")


Decisions = BlockingQueue[tuple[Lease, Decision]]


class Lane:
    """The events that wait for one batch listener, in batches of one size."""

    def __init__(self, listener: Listener, size: int) -> None:
        assert listener.batching is not None
        self.listener, self.size = listener, size
        self.within = listener.batching.within  # seconds
        self.leases: deque[Lease] = deque()  # its methods are atomic
        self.is_queued = False  # a thread finds it in the queue, or has it

    @property
    def ripe_at(self) -> float:
        """When (monotonic) it is to be delivered, full or not."""
        if len(self.leases) >= self.size or not self.within:
            return 0.0
        try:
            first = self.leases[0]
        except IndexError:  # another thread has taken it
            return 0.0
        return (first.handed_out_at or first.claimed_at) + self.within

    def take(self, most: int, most_bytes: int) -> list[Lease]:
        """Return the events of the next batch; the last may overshoot ``most_bytes``."""
        found: list[Lease] = []
        size = 0
        while len(found) < most and size < most_bytes and (lease := popped(self.leases)):
            found.append(lease)
            size += lease.payload_bytes
        return found


Item = Lease | Lane | Delivery


class Ready(BlockingQueue[Item]):
    """A queue of events and lanes, from which threads take one at a time."""

    def __init__(self, on_idle: Callable[[], None] = lambda: None) -> None:
        super().__init__(on_idle)
        self._lanes: dict[tuple[str, int], Lane] = {}
        self.awaited: deque[Lease | Lane] = deque()  # filled by the threads, taken by the loop

    def __len__(self) -> int:
        """Return how many events wait for a thread; a lane in the queue may count as one more."""
        if not self._lanes:
            return self._queue.qsize()
        lanes = [each for each in [*self._lanes.values()] if not each.listener.is_awaited]
        return max(self._queue.qsize() - sum(each.is_queued for each in lanes), 0) + sum(
            len(each.leases) for each in lanes
        )

    @property
    def batch_room(self) -> int:
        """Return how many events make a whole batch for each batch listener that had some."""
        listeners = {each.listener.title: each.listener for each in [*self._lanes.values()]}
        return sum(each.batching.size for each in listeners.values() if each.batching)

    @property
    def waiting_for_loop(self) -> int:
        """Return how many events wait for a place in the event loop."""
        waiting = [*self.awaited]  # the same lane may be in it twice
        lanes = {each for each in waiting if isinstance(each, Lane)}
        return sum(isinstance(each, Lease) for each in waiting) + sum(
            len(each.leases) for each in lanes
        )

    def put(self, *leases: Lease) -> None:
        """Have threads or the event loop deliver events, alone or in batches.

        Lanes are queued at the end, so that no thread takes the first event of a batch alone.
        """
        lanes: set[Lane] = set()
        for lease in leases:
            if (listener := batch_listener(lease)) is None:
                self.add(lease)
                continue
            lane = self._lane(listener, batch_size(listener, lease))
            lane.leases.append(lease)
            lanes.add(lane)
        for lane in lanes:
            if lane.leases and (not lane.is_queued or len(lane.leases) >= lane.size):
                self._queue_lane(lane)

    def _lane(self, listener: Listener, size: int) -> Lane:
        """Return the lane of a batch listener with batches of up to ``size`` events."""
        lane = self._lanes.get((listener.title, size))
        if lane is None or lane.listener is not listener:
            lane = self._lanes[listener.title, size] = Lane(listener, size)
        return lane

    def put_back(self, lane: Lane) -> None:
        """Queue a lane again after a batch was taken from it, if there is more."""
        lane.is_queued = False
        if lane.leases:
            self._queue_lane(lane)

    def take(self, timeout: float) -> Item | None:
        """Return the next event or ripe lane, or None after ``timeout`` seconds or when woken."""
        found = self.get(timeout)
        if not isinstance(found, Lane) or found.ripe_at <= monotonic():
            return found
        return self._take_beside(found, monotonic() + timeout)

    def _take_beside(self, lane: Lane, until: float) -> Item | None:
        """Return what is ripe first by ``until`` (monotonic): ``lane``, or anything else."""
        unripe = [lane]
        try:
            while True:
                soonest = min([until, *[each.ripe_at for each in unripe]])
                found = self.get(max(soonest - monotonic(), 0.0))
                if found is None:
                    now = monotonic()
                    ripe = next((each for each in unripe if each.ripe_at <= now), None)
                    if ripe is not None:
                        unripe.remove(ripe)
                    return ripe
                if not isinstance(found, Lane) or found.ripe_at <= monotonic():
                    if found in unripe:
                        unripe.remove(found)
                    return found
                if found not in unripe:
                    unripe.append(found)
        finally:
            for each in unripe:
                self.add(each)

    def take_all(self) -> list[Lease]:
        """Return the events that wait now, without waiting."""
        found: list[Lease] = []
        for each in self.get_all(maxsize):
            if isinstance(each, Lane):
                found += each.take(maxsize, maxsize)
            elif isinstance(each, Lease):
                found.append(each)
            else:
                each.leave()
        return found

    def take_alike(self, lease: Lease, most: int) -> tuple[list[Lease], Item | None]:
        """Return the next events of the same listener, at most ``most``, without waiting.

        Return what ended them, too: it comes next.
        """
        found: list[Lease] = []
        for each in self.get_each(most):
            if isinstance(each, Lease) and each.listener == lease.listener:
                found.append(each)
            elif isinstance(each, Lane) and each.ripe_at > monotonic():
                self.add(each)
                break
            else:
                return found, each
        return found, None

    def _queue_lane(self, lane: Lane) -> None:
        lane.is_queued = True
        self.add(lane)
