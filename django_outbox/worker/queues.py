"""What connects a worker's threads: queues of offers, events and decisions."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from ..clocks import monotonic
from ..delivery.lease import Lease
from ..events import Event
from ..listeners.outcomes import Decision
from .wakeup import Wakeup

T = TypeVar("T")

logger = logging.getLogger("django_outbox")

WARN_EVERY = 60.0  # seconds between two warnings that the hot queue is full


class BlockingQueue(Generic[T]):
    """A queue from which threads take one item or a batch; it does not limit its own size."""

    def __init__(self, on_idle: Callable[[], None] = lambda: None) -> None:
        """``on_idle`` is called by a thread that finds the queue empty, before it waits."""
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self.put: Callable[[T], None] = self._queue.put
        self._on_idle = on_idle
        self._idle: deque[None] = deque()  # one for each thread that waits; its methods are atomic

    def __len__(self) -> int:
        return self._queue.qsize()

    @property
    def idle(self) -> int:
        """Return how many threads wait for an item."""
        return len(self._idle)

    def take(self, timeout: float) -> T | None:
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

    def take_all(self, most: int) -> list[T]:
        """Return the items that are queued now, at most ``most``, without waiting."""
        found: list[T] = []
        with suppress(Empty):
            while len(found) < most:
                if (item := self._queue.get_nowait()) is not None:
                    found.append(item)
        return found

    def wake(self, takers: int = 1) -> None:
        """End the wait of that many threads; their ``take`` returns None."""
        for _ in range(takers):
            self._queue.put(None)


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
        found: list[Offer] = []
        while self._rows and len(found) < most:
            found.append(self._rows.popleft())
        if found:
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
