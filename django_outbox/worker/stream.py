"""``Stream``: the leased events of one key; ``LeasedStreams``: all streams of a worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from ..clocks import monotonic
from ..conf import Settings
from ..delivery.lease import Lease
from ..queue_settings import DEFAULT_QUEUE
from ..sql.values import Release
from .queues import Held
from .wakeup import Wakeup

READ_WAITS = (0.01, 0.2)  # seconds before an unreleased stream is read again: at first, and at most


@dataclass(slots=True, eq=False)
class Stream:
    """A leased stream; its fields are guarded by ``Held``'s lock."""

    name: str  # lane and key
    deadline: float  # monotonic; none of its events starts after it without a renewal
    locked_at: Any  # when it was leased, as the claim returned it
    rescues: int = 0  # workers that were lost with it
    lost_worker: str | None = None  # the last of them, until that has been reported
    alone: int = 0  # events to run one by one, each settled before the next: it is a suspect
    is_innocent: bool = False  # what was started of it has come to its end here
    seq: int = 0  # its version when it was read
    waiting: deque[Lease] = field(default_factory=deque)
    handed_out: list[Lease] = field(default_factory=list)  # and not settled
    due: float = inf  # monotonic; when it is due after its release; inf: idle
    read_at: float = 0.0  # monotonic; when it is to be read; inf: it has been read
    pause: float = READ_WAITS[0]  # seconds until the next read if it cannot be released
    released_to_others: bool = False  # its release lets other workers claim it first
    queue: str = DEFAULT_QUEUE  # in which it was claimed
    next_queue: str | None = None  # in which it waits after its release; None: in the same one


class StreamHeads(Protocol):
    """The threads that deliver the first event of each stream."""

    def put(self, lease: Lease) -> None:
        """Queue an event for the threads of its queue."""

    def accepts(self, queue: str) -> bool:
        """Return whether events of this queue may be started here."""


class LeasedStreams:
    """All streams of a worker, and queries of their state; ``Streams`` adds the changes to it."""

    def __init__(
        self,
        *,
        alias: str,
        me: str,
        settings: Settings,
        held: Held,
        pools: StreamHeads,
        wakeup: Wakeup,
    ) -> None:
        self._alias, self._me, self._settings = alias, me, settings
        self._held, self._pools, self._wakeup = held, pools, wakeup
        self._lock = held.lock
        self._streams: dict[str, Stream] = {}
        self._to_release: list[Stream] = []
        # Keys that only other workers may claim, each until a time (monotonic).
        self._left_to_others: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def followers(self) -> int:
        """Return how many events wait behind those that were handed out."""
        with self._lock:
            return sum(len(each.waiting) for each in self._streams.values())

    def excluded_names(self, now: float) -> list[str]:
        """Return the names of the streams that a claim leaves out.

        These are streams of ours whose leases may have ended, and those left to other workers.
        """
        with self._lock:
            left = self._left_to_others
            self._left_to_others = {key: until for key, until in left.items() if until > now}
            outdated = [key for key, each in self._streams.items() if each.deadline < now]
            return [*self._left_to_others, *outdated]

    def next_exclusion_end(self) -> float:
        """Return when (monotonic) a claim may include streams again that were left to others."""
        with self._lock:
            return min(self._left_to_others.values(), default=inf)

    def next_read(self) -> float:
        """Return when (monotonic) the next stream is to be read."""
        with self._lock:
            return min((each.read_at for each in self._streams.values()), default=inf)

    def to_read(self, now: float, most: int) -> list[Stream]:
        with self._lock:
            return [each for each in self._streams.values() if each.read_at <= now][:most]

    def suspect(self) -> Stream | None:
        """Return the stream whose events run one by one, if there is one."""
        with self._lock:
            return next((each for each in self._streams.values() if each.alone), None)

    def to_renew(self, now: float) -> list[Stream]:
        """Return the streams whose leases are older than a third of their length."""
        limit = self._held.deadline(now) - self._held.lease / 3
        with self._lock:
            return [each for each in self._streams.values() if each.deadline <= limit]

    def get(self, key: str | None) -> Stream | None:
        return self._streams.get(key) if key is not None else None

    def follower_of(self, lease: Lease, fits: Callable[[Lease], bool]) -> Lease | None:
        """Hand out the event behind the last one of its stream that was, if it ``fits``."""
        with self._lock:
            stream = self.get(lease.stream)
            if stream is None or not stream.waiting or stream.handed_out[-1:] != [lease]:
                return None
            follower = stream.waiting[0]
            if follower.queue != lease.queue or not fits(follower):
                return None
            follower.handed_out_at = monotonic()
            return self._pop_first(stream)

    def wait_again(self, leases: Sequence[Lease]) -> None:
        """Let events wait again, unstarted, behind one of their key that is not done."""
        with self._lock:
            for lease in reversed(leases):
                lease.started_at = 0.0
                stream = self.get(lease.stream)
                if stream is None or lease not in stream.handed_out:
                    self._held.drop([lease])
                    continue
                stream.handed_out.remove(lease)
                stream.waiting.appendleft(lease)
                self._held.load(lease.queue).followers += 1

    def _pop_first(self, stream: Stream) -> Lease:
        lease = stream.waiting.popleft()
        self._held.load(lease.queue).followers -= 1
        stream.handed_out.append(lease)
        return lease

    def _clear(self, stream: Stream) -> None:
        for lease in stream.waiting:
            self._held.load(lease.queue).followers -= 1
        self._held.drop(stream.waiting)
        stream.waiting.clear()

    def _put_back(self, stream: Stream) -> bool:
        """Add a stream again; return False if it has been claimed anew in the meantime."""
        return self._streams.setdefault(stream.name, stream) is stream

    def _set_deadline(self, stream: Stream, deadline: float) -> None:
        stream.deadline = deadline
        for lease in (*stream.waiting, *stream.handed_out):
            lease.deadline = deadline


def unstarted(stream: Stream) -> list[Lease]:
    return [*stream.waiting, *(each for each in stream.handed_out if each.is_waiting)]


def of_streams(streams: Iterable[Stream]) -> dict[str, Any]:
    """Return the names of streams, each with when it was leased."""
    return {each.name: each.locked_at for each in streams}


def release_of(stream: Stream, now: float) -> Release:
    name, locked_at, is_innocent = stream.name, stream.locked_at, stream.is_innocent
    if stream.due == inf:
        return Release(name, locked_at, stream.seq, None, is_innocent=is_innocent)
    delay, queue = max(stream.due - now, 0.0), stream.next_queue
    # If it is due at once, its next claim reads what was written in the meantime.
    seq = stream.seq if delay else None
    return Release(name, locked_at, seq, delay, queue, is_innocent)
