"""What lies between the machines: offers, leases waiting, leases held, decisions to settle."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from ..delivery import Lease
from ..events import Event
from ..outcomes import Decision

T = TypeVar("T")

logger = logging.getLogger("django_outbox")

WARN_EVERY = 60.0  # seconds
SAFE_PART = 0.8  # of a lease: nothing is started later than this without a renewal


class Waiting(Generic[T]):
    """An unbounded queue with a batch take; whoever feeds it keeps the bound."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._closed = False

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, item: T) -> None:
        self._queue.put(item)

    def take(self, timeout: float) -> T | None:
        """Return the next item, or None after ``timeout`` seconds or when woken to stop."""
        try:
            return self._queue.get(timeout=timeout)
        except Empty:
            return None

    def take_all(self, most: int) -> list[T]:
        """Return what waits now, at most ``most``, without waiting."""
        found: list[T] = []
        while len(found) < most:
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            if item is not None:
                found.append(item)
        return found

    def wake(self, takers: int = 1) -> None:
        """Let that many waiting takers look up."""
        for _ in range(takers):
            self._queue.put(None)


class Offers:
    """The hot queue: committed events of this process, not yet claimed; bounded, never blocking."""

    def __init__(
        self, capacity: int, *, wake: Callable[[], None], look: Callable[[], None]
    ) -> None:
        self._capacity = capacity
        self._events: deque[Event] = deque()  # appended by writers, taken by the claimer
        self._open = True
        self._warn_at = 0.0  # monotonic; not before is the next warning
        self._wake = wake
        self.look = look

    def __len__(self) -> int:
        return len(self._events)

    def offer(self, event: Event) -> bool:
        if not self._open:
            return False
        if len(self._events) >= self._capacity:
            self._warn(time.monotonic())
            return False
        self._events.append(event)
        self._wake()
        return True

    def take(self, most: int) -> list[Event]:
        found: list[Event] = []
        while self._events and len(found) < most:
            found.append(self._events.popleft())
        return found

    def close(self) -> None:
        self._open = False

    def _warn(self, now: float) -> None:
        if now >= self._warn_at:  # two writers at once: a line too many, no harm
            self._warn_at = now + WARN_EVERY
            logger.warning(
                "hot queue full; what it refuses arrives by the cold route capacity=%d",
                self._capacity,
            )


class Held:
    """Every lease of this worker, from its claim to its settle; nothing claimed is forgotten."""

    def __init__(self, lease: float) -> None:
        self.lease = lease  # seconds
        self._leases: dict[str, Lease] = {}
        self.awaited = 0  # threads that wait for a settle
        self.changed = threading.Condition()  # guards the dict and every deadline in it

    def __len__(self) -> int:
        return len(self._leases)

    def deadline(self, since: float) -> float:
        """Return until when a lease asked for at ``since`` (monotonic) is surely ours."""
        return since + SAFE_PART * self.lease

    def add(self, leases: Iterable[Lease]) -> list[Lease]:
        """Take leases in; return the new ones. One that is held already was only renewed.

        Not so a row without our name: it was settled, and due again, before its lease was dropped.
        """
        new = []
        with self.changed:
            for lease in leases:
                known = self._leases.get(lease.event_id)
                if known is None or not lease.renewal:
                    self._leases[lease.event_id] = lease
                    new.append(lease)
                else:
                    known.deadline = lease.deadline
            self.changed.notify_all()
        return new

    def drop(self, leases: Iterable[Lease]) -> None:
        """Forget leases: settled, released or lost. A newer one of the same event stays."""
        with self.changed:
            for lease in leases:
                if self.has(lease):
                    del self._leases[lease.event_id]
            self.changed.notify_all()

    def to_renew(self, now: float) -> list[Lease]:
        """Return the leases of rows that are older than a third of their time."""
        limit = now + SAFE_PART * self.lease - self.lease / 3
        with self.changed:
            return [each for each in self._leases.values()
                    if each.key is None and each.deadline <= limit]  # fmt: skip

    def renewed(self, leases: Iterable[Lease], deadline: float) -> None:
        with self.changed:
            for lease in leases:
                lease.deadline = deadline
            self.changed.notify_all()

    def is_current(self, lease: Lease) -> bool:
        """Say whether the lease may be started now."""
        return self.has(lease) and time.monotonic() < lease.deadline

    def start(self, lease: Lease) -> bool:
        """Begin with a lease that is current; from now on nobody gives it back."""
        with self.changed:
            if not self.is_current(lease):
                return False
            lease.started_at = time.monotonic()
            return True

    def wait_current(self, lease: Lease, give_up: Callable[[], bool]) -> bool:
        """Wait until the lease is renewed (True), or lost or given up (False)."""
        with self.changed:
            while self.has(lease) and not give_up():
                if time.monotonic() < lease.deadline:
                    return True
                self.changed.wait(0.1)
        return False

    def wait_settled(self, lease: Lease, give_up: Callable[[], bool]) -> None:
        """Wait until the lease is settled, or given up."""
        with self.changed:
            self.awaited += 1
            while self.has(lease) and not give_up():
                self.changed.wait(0.1)
            self.awaited -= 1

    def wait_empty(self, timeout: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: not self._leases, timeout)

    def unstarted(self) -> list[Lease]:
        """Return the leases of rows that nothing was done with."""
        with self.changed:
            return [each for each in self._leases.values()
                    if each.key is None and not each.started_at]  # fmt: skip

    def running(self) -> list[Lease]:
        with self.changed:
            return [each for each in self._leases.values() if each.started_at]

    def has(self, lease: Lease) -> bool:
        """Say whether the lease is still held."""
        return self._leases.get(lease.event_id) is lease


Ready = Waiting[Lease]
Decisions = Waiting[tuple[Lease, Decision]]
