"""What connects a worker's threads: queues of offers, leases and decisions, and all leases."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from ..clocks import monotonic
from ..delivery.lease import Lease
from ..events import Event
from ..listeners.outcomes import Decision, Status
from .wakeup import Wakeup

T = TypeVar("T")

logger = logging.getLogger("django_outbox")

WARN_EVERY = 60.0  # seconds between two warnings that the hot queue is full
SAFE_PART = 0.8  # of a lease's length; nothing is started after it without a renewal


class BlockingQueue(Generic[T]):
    """A queue from which threads take one item or a batch; it does not limit its own size."""

    def __init__(self, on_idle: Callable[[], None] = lambda: None) -> None:
        """``on_idle`` is called by a thread that finds the queue empty, before it waits."""
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._on_idle = on_idle
        self._idle: deque[None] = deque()  # one for each thread that waits; its methods are atomic

    def __len__(self) -> int:
        return self._queue.qsize()

    @property
    def idle(self) -> int:
        """Return how many threads wait for an item."""
        return len(self._idle)

    def put(self, item: T) -> None:
        self._queue.put(item)

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

    def __init__(self, capacity: int, *, most_bytes: int, wakeup: Wakeup) -> None:
        """Limit it to ``capacity`` rows, and to about ``most_bytes`` of payload text."""
        self._capacity, self._most_bytes = capacity, most_bytes
        self._bytes = 0  # guarded by the lock below, as several writers offer at once
        self._counting = threading.Lock()
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
        with self._counting:
            self._bytes += payload_bytes(row.event)
        self._rows.append(row)
        self._wakeup.wake()
        return True

    def take(self, most: int) -> list[Offer]:
        found: list[Offer] = []
        while self._rows and len(found) < most:
            found.append(self._rows.popleft())
        taken = sum(payload_bytes(each.event) for each in found)
        with self._counting:
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


class Load:
    """What a worker has of one queue; guarded by ``Held``'s lock."""

    def __init__(self) -> None:
        self.held = 0  # leases
        self.followers = 0  # leases that wait behind the event of their stream in progress
        self.payload_bytes = 0  # of all leases
        self.last_start = 0.0  # monotonic; when a lease was last started
        # Starts since the last ``reset_starts``, and the longest wait (seconds) before one.
        self.started, self.longest_wait = 0, -inf

    def reset_starts(self) -> None:
        """Reset the count of starts and the longest wait."""
        self.started, self.longest_wait = 0, -inf

    def count(self, lease: Lease, sign: int) -> None:
        """Add a lease (``sign`` 1) or remove one (-1)."""
        self.held += sign
        self.payload_bytes += sign * lease.payload_bytes


class Held:
    """All leases of this worker, each from its claim to its settle."""

    def __init__(self, lease: float) -> None:
        self.lease = lease  # seconds
        self._leases: dict[str, Lease] = {}
        self._loads: dict[str, Load] = {}
        self._ended: set[str] | None = None  # ids of what ended as done during a claim
        self.settle_waiters = 0  # threads that wait for a settle
        self.lock = threading.RLock()  # guards all of these, and every lease's deadline
        self.changed = threading.Condition(self.lock)  # entering it takes twice as long

    def __len__(self) -> int:
        return len(self._leases)

    def load(self, queue: str) -> Load:
        """Return what is held of a queue."""
        found = self._loads.get(queue)
        return found if found is not None else self._loads.setdefault(queue, Load())

    def deadline(self, since: float) -> float:
        """Return until when a lease requested at ``since`` is certainly ours (both monotonic)."""
        return since + SAFE_PART * self.lease

    def begin_claim(self) -> None:
        """Note from now on what ends as done, until the answer of a claim is added."""
        self._ended = set()

    def add(self, leases: Iterable[Lease]) -> list[Lease]:
        """Add leases; return the new ones. If we have a lease already, the claim only renewed it.

        So it did if the row has ended as done since the claim began. A row that we did not own is
        new: settled and due again before its old lease was dropped, if our call does not go on.
        """
        new = []
        load, queue = None, ""  # of the lease before
        with self.lock:
            ended, self._ended = self._ended, None
            for lease in leases:
                known = self._leases.get(lease.id)
                if ended and lease.renewal and lease.id in ended:
                    continue
                if known is None or not (lease.renewal or goes_on(known, lease)):
                    if known is not None:
                        self.load(known.queue).count(known, -1)
                    self._leases[lease.id] = lease
                    if load is None or lease.queue != queue:
                        load, queue = self.load(lease.queue), lease.queue
                    load.held += 1
                    load.payload_bytes += lease.payload_bytes
                    new.append(lease)
                else:
                    known.deadline, known.locked_at = lease.deadline, lease.locked_at
            self.changed.notify_all()
        return new

    def drop(self, leases: Iterable[Lease]) -> None:
        """Remove leases that are settled, released or lost; a newer one of the same event stays."""
        with self.lock:
            held, loads = self._leases, self._loads
            for lease in leases:
                if held.get(lease.id) is lease:
                    del held[lease.id]
                    load = loads[lease.queue]
                    load.held -= 1
                    load.payload_bytes -= lease.payload_bytes
            self.changed.notify_all()

    def drop_settled(self, part: Iterable[tuple[Lease, Decision]]) -> None:
        """Remove leases whose decisions are settled."""
        with self.lock:
            if self._ended is not None:
                self._ended.update(lease.id for lease, each in part if each.status is Status.DONE)
            self.drop(lease for lease, _ in part)

    def to_renew(self, now: float) -> list[Lease]:
        """Return the leases of rows (not streams) that are older than a third of their length."""
        limit = now + SAFE_PART * self.lease - self.lease / 3
        with self.lock:
            return [each for each in self._rows() if each.deadline <= limit]

    def renewed(self, leases: Iterable[Lease], deadline: float) -> None:
        with self.lock:
            for lease in leases:
                lease.deadline = deadline
            self.changed.notify_all()

    def is_current(self, lease: Lease) -> bool:
        """Return whether the lease may be started now."""
        return self.has(lease) and monotonic() < lease.deadline

    def start(self, lease: Lease) -> bool:
        """Start a lease if it is current; return whether it was. Then it is no longer released."""
        with self.lock:
            return self._start(lease, monotonic())

    def _start(self, lease: Lease, now: float) -> bool:
        if self._leases.get(lease.id) is not lease or now >= lease.deadline:
            return False
        load = self._loads[lease.queue]
        lease.started_at = load.last_start = now
        wait = now - (lease.handed_out_at or lease.claimed_at)
        load.started += 1
        if wait > load.longest_wait:
            load.longest_wait = wait
        return True

    def start_all(self, leases: Iterable[Lease]) -> None:
        """Start those leases that are current; the others keep a ``started_at`` of 0.

        None starts behind one of its key that does not.
        """
        held_up: set[str] = set()  # streams
        with self.lock:
            now = monotonic()
            for lease in leases:
                if lease.stream in held_up or self._start(lease, now):
                    continue
                if lease.stream is not None:
                    held_up.add(lease.stream)

    def wait_current(self, lease: Lease, give_up: Callable[[], bool]) -> bool:
        """Wait until the lease is current (True), lost (False) or ``give_up()`` is true (False)."""
        with self.changed:
            while self.has(lease) and not give_up():
                if monotonic() < lease.deadline:
                    return True
                self.changed.wait(0.1)
        return False

    def wait_settled(self, leases: Iterable[Lease], give_up: Callable[[], bool]) -> None:
        """Wait until the leases are settled or refused, or ``give_up()`` is true."""
        with self.changed:
            self.settle_waiters += 1
            for lease in leases:
                while self.has(lease) and not (lease.refused or give_up()):
                    self.changed.wait(0.1)
            self.settle_waiters -= 1

    def wait_empty(self, timeout: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: not self._leases, timeout)

    def unstarted(self) -> list[Lease]:
        """Return the leases of rows (not streams) that are neither started nor decided."""
        with self.lock:
            return [each for each in self._rows() if each.is_waiting]

    def waiting_since(self, before: float, queue: str) -> list[Lease]:
        """Return a queue's unstarted leases of rows claimed before ``before`` (monotonic)."""
        with self.lock:
            mine = [each for each in self._rows() if each.queue == queue and each.is_waiting]
            return [each for each in mine if each.claimed_at < before]

    def _rows(self) -> list[Lease]:
        return [each for each in self._leases.values() if each.stream is None]

    def running(self) -> list[Lease]:
        with self.lock:
            return [each for each in self._leases.values() if each.started_at]

    def has_id(self, row_id: str) -> bool:
        """Return whether this worker has a lease of the row, by an earlier claim too."""
        return row_id in self._leases

    def has(self, lease: Lease) -> bool:
        """Return whether this worker still has the lease."""
        return self._leases.get(lease.id) is lease


def goes_on(known: Lease, lease: Lease) -> bool:
    """Return whether the call on a known lease goes on with an event that was claimed anew.

    A worker that was lost in its turn had leased it meanwhile. A second call would be of no use.
    """
    return bool(
        lease.rescued
        and known.started_at
        and known.stream is None
        and lease.attempts == known.attempts
    )


class AsyncLoad(NamedTuple):
    """How busy the event loop is."""

    waiting: int  # leases that wait for one of its places
    is_full: bool


Decisions = BlockingQueue[tuple[Lease, Decision]]
