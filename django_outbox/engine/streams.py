"""Streams in hand: which of their events wait, which are out, and when they are given back.

A stream is one more thing that is due. One of its events is out at a time: in the ready queue, with
a thread, or decided and waiting to be settled together with those that the same thread did next.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import dialects, doorbell, registry
from ..conf import Settings
from ..delivery import Lease
from ..dialects.vocabulary import Release
from ..outcomes import DONE, LOST, Decision, Status
from ..signals import announce, lease_lost
from .queues import Held, Ready

logger = logging.getLogger("django_outbox")

AGAIN = (0.01, 0.2)  # seconds until a stream that could not be released is read, and at most

BATCH = 500  # streams in one renewal

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
    leaving: bool = False  # it is given back for others to take


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
        self._left: dict[str, float] = {}  # monotonic; until when these are for others to take
        self.followers = 0  # events that wait behind the one that is out

    def __len__(self) -> int:
        return len(self._streams)

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

    def left_out(self, now: float) -> list[str]:
        """Return the keys that a claim leaves out.

        Leases of ours that may have ended, and what others have a moment to take.
        """
        with self._changed:
            self._left = {key: until for key, until in self._left.items() if until > now}
            outdated = [key for key, each in self._streams.items() if each.deadline < now]
            return [*self._left, *outdated]

    def next_end(self) -> float:
        """Return when (monotonic) a claim may take again what others did not."""
        with self._changed:
            return min(self._left.values(), default=inf)

    def next_read(self) -> float:
        """Return when (monotonic) a stream is to be read."""
        with self._changed:
            return min((each.read_at for each in self._streams.values()), default=inf)

    def to_read(self, now: float, most: int) -> list[Stream]:
        with self._changed:
            return [each for each in self._streams.values() if each.read_at <= now][:most]

    def get(self, key: str | None) -> Stream | None:
        return self._streams.get(key) if key is not None else None

    def take_in(self, stream: Stream, seq: int, leases: Sequence[Lease], due: float) -> None:
        """Note what was read of a stream, and hand its first event out."""
        with self._changed:
            stream.seq, stream.due, stream.read_at, stream.leaving = seq, due, inf, False
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
            stream.seq, stream.due, stream.read_at = seq, due, inf

    def lose(self, streams: Iterable[Stream]) -> None:
        """Forget streams that others have; what runs of them is refused its settle."""
        with self._changed:
            lost = [each for each in streams if self._streams.get(each.key) is each]
            for stream in lost:
                del self._streams[stream.key]
                self._clear(stream)
                self._held.drop(each for each in stream.out if not each.started_at)
        if lost:
            logger.warning("lost leases of streams count=%d", len(lost))
            announce(lease_lost, sender=self._alias, count=len(lost))

    # -- for the threads -------------------------------------------------------------------------

    def next(self, lease: Lease, decision: Decision) -> Lease | None:
        """Return what the thread that decided goes on with, before its decision is settled.

        Only what is simply done lets it: anything else is settled first, in its order, and so is
        what comes before a listener that commits its own decision.
        """
        if decision is not DONE:
            return None
        with self._changed:
            stream = self.get(lease.key)
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
                stream = self.get(lease.key)
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
        now = time.monotonic()
        over = self._take_over(now)
        if not over:
            return
        given = [release_of(each, now) for each in over]
        try:
            dialect = dialects.of(connection)
            freed = dialect.release_streams(connection, me=self._me, streams=given)
        except BaseException:
            with self._changed:
                self._over += [each for each in over if self._put_back(each)]
            raise
        soonest = min(self._after_release(each, each.key in freed) for each in over)
        if any(each.leaving and each.key in freed for each in over):
            doorbell.ring(connection)
        if soonest < inf:
            self._expect(max(soonest - time.monotonic(), 0.0))

    def _take_over(self, now: float) -> list[Stream]:
        """Take out what is to be released: whoever claims it the next instant has it anew."""
        with self._changed:
            over, self._over = self._over, []
            over = [each for each in over if self._streams.get(each.key) is each]
            for stream in over:
                del self._streams[stream.key]
                if stream.leaving:
                    self._left[stream.key] = now + 2 * self._settings.PROBE_INTERVAL
            return over

    def _after_release(self, stream: Stream, freed: bool) -> float:
        """Note that a stream is given back, or is to be read again; return when to look."""
        with self._changed:
            if freed:
                return max(stream.due, self._left.get(stream.key, 0.0))
            stream.read_at = time.monotonic() + stream.pause
            stream.pause = min(2 * stream.pause, AGAIN[1])
            self._put_back(stream)
            return stream.read_at

    def _put_back(self, stream: Stream) -> bool:
        """Take a stream in again; say whether it was not claimed anew meanwhile."""
        return self._streams.setdefault(stream.key, stream) is stream

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

    # -- for the heartbeat, and a settle that was refused ----------------------------------------

    def to_renew(self, now: float) -> list[Stream]:
        """Return the streams older than a third of a lease."""
        limit = self._held.deadline(now) - self._held.lease / 3
        with self._changed:
            return [each for each in self._streams.values() if each.deadline <= limit]

    def renew(self, connection: BaseDatabaseWrapper, streams: Sequence[Stream]) -> None:
        """Prolong the leases of these; forget those that others have."""
        for start in range(0, len(streams), BATCH):
            some = {each.key: each for each in streams[start : start + BATCH]}
            deadline = self._held.deadline(time.monotonic())
            renewed, mine = dialects.of(connection).renew_streams(
                connection, me=self._me, keys=[*some], lease=self._held.lease
            )
            with self._changed:
                for key in renewed:
                    self._prolong(some[key], deadline)
                self._changed.notify_all()
            self.lose(each for key, each in some.items() if key not in mine)

    def share(self, others: Sequence[int]) -> None:
        """Give back what is beyond a fair share, when others have that many streams each.

        What runs goes on, and its stream leaves once it is settled. So who joins gets a share
        however long the events take that we have read.
        """
        with self._changed:
            kept = [each for each in self._streams.values() if not each.leaving]
            fair = ceil((len(kept) + sum(others)) / (len(others) + 1))
            able = [each for each in kept if not each.careful and unstarted(each)]
            able.sort(key=lambda each: any(lease.started_at for lease in each.out))  # idle first
            for stream in able[: len(kept) - fair]:
                self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        self._held.drop(unstarted(stream))
        self._clear(stream)
        stream.out = [each for each in stream.out if each.started_at]
        stream.due, stream.leaving = time.monotonic(), True
        if not stream.out:
            self._over.append(stream)

    def _prolong(self, stream: Stream, deadline: float) -> None:
        stream.deadline = deadline
        for lease in (*stream.waiting, *stream.out):
            lease.deadline = deadline


def unstarted(stream: Stream) -> list[Lease]:
    return [*stream.waiting, *(each for each in stream.out if not each.started_at)]


def release_of(stream: Stream, now: float) -> Release:
    if stream.due == inf:
        return Release(stream.key, stream.seq, None)
    delay = max(stream.due - now, 0.0)
    # What is due at once is found by whoever claims it, whatever was written meanwhile.
    return Release(stream.key, stream.seq if delay else None, delay)
