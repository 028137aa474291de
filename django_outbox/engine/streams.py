"""Streams in hand: which of their events wait, which are out, and when they are given back.

A stream is one more thing that is due. One of its events is out at a time: in the ready queue, with
a thread, or decided and waiting to be settled together with those that the same thread did next.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import dialects, registry
from ..conf import Settings
from ..delivery import Lease
from ..dialects.vocabulary import Release
from ..outcomes import DONE, LOST, Decision, Status
from ..signals import announce, lease_lost
from .queues import Held, Ready

logger = logging.getLogger("django_outbox")

AGAIN = (0.01, 0.2)  # seconds until a stream that could not be released is read, and at most

LAST_TRY = 0.5  # seconds that a stop tries to give locked streams back


@dataclass(slots=True, eq=False)
class Stream:
    """A leased stream; its fields are guarded by ``Held``'s lock."""

    key: str
    deadline: float  # monotonic; none of its events is started later without a renewal
    careful: int = 0  # events to be run one by one, for a worker was lost with this stream
    seq: int = 0  # its version, as it was read
    waiting: deque[Lease] = field(default_factory=deque)
    out: list[Lease] = field(default_factory=list)  # handed out and not settled
    due: float = inf  # monotonic; when it will be due once it is given back; inf: idle
    read_at: float = 0.0  # monotonic; when it is to be read; inf: it is in hand
    pause: float = AGAIN[0]
    parked: bool = False  # its head is a suspect, which waits to be run alone


class Streams:
    """Every stream of this worker, from its claim to its release; none is forgotten."""

    def __init__(
        self, *, alias: str, me: str, settings: Settings, held: Held, ready: Ready,
        expect: Callable[[float], None],
    ) -> None:  # fmt: skip
        self._alias, self._me, self._settings = alias, me, settings
        self._held, self._ready, self._expect = held, ready, expect
        self._changed = held.changed
        self._streams: dict[str, Stream] = {}
        self._over: list[Stream] = []  # to be released
        self.followers = 0  # events that wait behind the one that is out

    # -- for the claimer -------------------------------------------------------------------------

    def claimed(self, streams: Iterable[Stream]) -> list[str]:
        """Take streams in; return the keys of the new ones: a known one was only renewed."""
        new = []
        with self._changed:
            for stream in streams:
                known = self._streams.setdefault(stream.key, stream)
                if known is stream:
                    new.append(stream.key)
                else:
                    self._prolong(known, stream.deadline)
        return new

    def outdated(self, now: float) -> list[str]:
        """Return the keys whose leases may have ended: a claim leaves them out."""
        with self._changed:
            return [key for key, each in self._streams.items() if each.deadline < now]

    def next_read(self) -> float:
        """Return when (monotonic) a stream is to be read."""
        with self._changed:
            return min((each.read_at for each in self._streams.values()), default=inf)

    def to_read(self, now: float, most: int) -> list[Stream]:
        with self._changed:
            return [each for each in self._streams.values() if each.read_at <= now][:most]

    def get(self, key: str) -> Stream | None:
        return self._streams.get(key)

    def take_in(self, stream: Stream, seq: int, leases: Sequence[Lease], due: float) -> None:
        """Note what was read of a stream, and hand its first event out."""
        with self._changed:
            stream.seq, stream.due, stream.read_at = seq, due, inf
            for lease in leases:
                lease.deadline = stream.deadline
            self._held.add(leases)
            stream.waiting.extend(leases)
            self.followers += len(leases)
            if leases:
                stream.pause = AGAIN[0]
                self._hand_out(stream)
            else:
                self._over.append(stream)

    def bury(self, stream: Stream, seq: int, lease: Lease, due: float) -> None:
        """Note that an event is decided without being run."""
        with self._changed:
            stream.seq, stream.due, stream.read_at = seq, due, inf
            self._held.add([lease])
            stream.out.append(lease)

    def park(self, stream: Stream, seq: int, due: float) -> None:
        """Keep a stream, renewed, until its suspect may be run."""
        with self._changed:
            stream.seq, stream.due, stream.read_at, stream.parked = seq, due, inf, True

    def lose(self, keys: Collection[str]) -> None:
        """Forget streams that others have; what runs of them is refused its settle."""
        with self._changed:
            lost = [each for key in keys if (each := self._streams.pop(key, None))]
            for stream in lost:
                self._clear(stream)
                self._held.drop(each for each in stream.out if not each.started_at)
        if lost:
            logger.warning("lost leases: %d streams", len(lost))
            announce(lease_lost, sender=self._alias, count=len(lost))

    # -- for the threads -------------------------------------------------------------------------

    def next(self, lease: Lease, decision: Decision) -> Lease | None:
        """Return what the thread that decided goes on with, before its decision is settled.

        Only what is simply done lets it: anything else is settled first, in its order, and so is
        what comes before a listener that commits its own decision.
        """
        if lease.key is None or decision is not DONE:
            return None
        with self._changed:
            stream = self._streams.get(lease.key)
            if stream is None or lease not in stream.out or not stream.waiting:
                return None
            follower = stream.waiting[0]
            listeners = registry.route(follower.aggregate_type, follower.event_type)
            if any(each.atomic for each in listeners):
                return None
            return self._pop(stream)

    def settled(self, batch: Iterable[tuple[Lease, Decision]]) -> None:
        """Go on where a settle was waited for; what is through is to be released."""
        with self._changed:
            for lease, decision in batch:
                stream = None if lease.key is None else self._streams.get(lease.key)
                if stream is None or lease not in stream.out:
                    continue
                stream.out.remove(lease)
                self._apply(stream, decision)
                if not stream.out:
                    self._go_on(stream)

    def _apply(self, stream: Stream, decision: Decision) -> None:
        settings, now = self._settings, time.monotonic()
        if decision is LOST:
            self._stop(stream, now)
        elif decision.delay is not None:
            if decision.status is Status.NEW or settings.STOP_ON_FIRST_FAILURE:
                self._stop(stream, now + decision.delay)
            else:
                stream.due = min(stream.due, now + decision.delay)
        elif decision.status is Status.DEAD and settings.ON_DEAD == "block":
            self._stop(stream, inf if settings.STOP_ON_FIRST_FAILURE else stream.due)

    def _stop(self, stream: Stream, due: float) -> None:
        self._clear(stream)
        stream.due, stream.careful = due, 0

    def _go_on(self, stream: Stream) -> None:
        if stream.waiting:
            self._hand_out(stream)
        elif stream.careful:
            stream.read_at = 0.0
            self._expect(0.0)
        else:
            self._over.append(stream)

    def _hand_out(self, stream: Stream) -> None:
        self._ready.put(self._pop(stream))

    def _pop(self, stream: Stream) -> Lease:
        lease = stream.waiting.popleft()
        self.followers -= 1
        stream.out.append(lease)
        return lease

    def _clear(self, stream: Stream) -> None:
        self.followers -= len(stream.waiting)
        self._held.drop(stream.waiting)
        stream.waiting.clear()

    # -- giving back -----------------------------------------------------------------------------

    def release(self, connection: BaseDatabaseWrapper) -> None:
        """Release what is through; what has changed meanwhile, or is locked, is read again."""
        with self._changed:
            over, self._over = self._over, []
            over = [each for each in over if self._streams.get(each.key) is each]
        if not over:
            return
        now = time.monotonic()
        given = [Release(each.key, each.seq, self._delay(each, now)) for each in over]
        try:
            dialect = dialects.of(connection)
            freed = dialect.release_streams(connection, me=self._me, streams=given)
        except BaseException:
            self._over += over
            raise
        soonest = inf
        with self._changed:
            for stream in over:
                if stream.key in freed:
                    self._streams.pop(stream.key, None)
                    soonest = min(soonest, stream.due - now)
                else:
                    stream.read_at = time.monotonic() + stream.pause
                    soonest = min(soonest, stream.pause)
                    stream.pause = min(2 * stream.pause, AGAIN[1])
        if soonest < inf:
            self._expect(max(soonest, 0.0))

    def _delay(self, stream: Stream, now: float) -> float | None:
        return None if stream.due == inf else max(stream.due - now, 0.0)

    def release_all(self, connection: BaseDatabaseWrapper) -> int:
        """Give back all that is not running, due now; return how many."""
        with self._changed:
            idle = [each for each in self._streams.values()
                    if not any(lease.started_at for lease in each.out)]  # fmt: skip
            for stream in idle:
                self._clear(stream)
                self._held.drop(stream.out)
                del self._streams[stream.key]
        given, until = {each.key for each in idle}, time.monotonic() + LAST_TRY
        left = set(given)
        while left:  # a business transaction that has one locked may end soon
            releases = [Release(key, None, 0.0) for key in left]
            dialect = dialects.of(connection)
            left -= dialect.release_streams(connection, me=self._me, streams=releases)
            if time.monotonic() > until:
                break
            time.sleep(0.01 if left else 0)
        return len(given) - len(left)

    # -- for the heartbeat -----------------------------------------------------------------------

    def to_renew(self, now: float) -> list[str]:
        """Return the streams older than a third of a lease, after giving back what waits in them.

        So that who joins gets a share however long the events take that others have read.
        """
        with self._changed:
            old = [each for each in self._streams.values()
                   if each.deadline <= self._held.deadline(now) - self._held.lease / 3]  # fmt: skip
            for stream in old:
                if not stream.parked:
                    self._cut(stream)
            return [each.key for each in old]

    def _cut(self, stream: Stream) -> None:
        unstarted = [each for each in stream.out if not each.started_at]
        if not stream.waiting and not unstarted:
            return
        self._clear(stream)
        self._held.drop(unstarted)
        stream.out = [each for each in stream.out if each.started_at]
        stream.due = time.monotonic()
        if not stream.out:
            stream.careful = 0
            self._over.append(stream)

    def still(self, keys: Collection[str]) -> set[str]:
        """Return which of these are held."""
        return self._streams.keys() & keys

    def renewed(self, keys: Collection[str], deadline: float) -> None:
        with self._changed:
            for key in keys:
                if stream := self._streams.get(key):
                    self._prolong(stream, deadline)
            self._changed.notify_all()

    def _prolong(self, stream: Stream, deadline: float) -> None:
        stream.deadline = deadline
        for lease in (*stream.waiting, *stream.out):
            lease.deadline = deadline
