"""Runs the events of each leased stream in order, and releases the streams afterwards.

A stream falls due as a row does. One of its events is handed out at a time: it is in the ready
queue, in a thread, or decided and waiting to be settled, with those that the thread ran next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from math import ceil, inf

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..delivery.deliver import listener_of
from ..delivery.lease import Lease
from ..listeners.outcomes import DONE, LOST, Decision, Status
from ..signals import announce, lease_lost
from ..sql import dialect_of
from ..sql.values import Release
from .rescues import kept_count
from .stream import READ_WAITS, LeasedStreams, Stream, of_streams, release_of, unstarted

logger = logging.getLogger("django_outbox")

RENEW_BATCH = 500  # streams renewed by one statement
LOCKED_RETRY_TIME = 0.5  # seconds for which a stopping worker tries to release locked streams


class Streams(LeasedStreams):
    """All streams of this worker, each from its claim to its release."""

    # -- for the claimer -------------------------------------------------------------------------

    def claimed(self, streams: Iterable[Stream]) -> list[str]:
        """Add claimed streams; return the names of the new ones. A known one was only renewed."""
        new = []
        with self._lock:
            for stream in streams:
                known = self._streams.setdefault(stream.name, stream)
                if known is stream:
                    new.append(stream.name)
                else:
                    self._set_deadline(known, stream.deadline)
                    known.locked_at = stream.locked_at
                    for lease in (*known.waiting, *known.handed_out):
                        lease.locked_at = stream.locked_at
        return new

    def add_events(self, stream: Stream, seq: int, leases: Sequence[Lease], due: float) -> None:
        """Add the events read of a stream and hand out the first; without any, release it."""
        with self._lock:
            stream.seq, stream.due, stream.read_at, stream.released_to_others = seq, due, inf, False
            for lease in leases:
                lease.deadline = stream.deadline
            self._held.add(leases)
            stream.waiting.extend(leases)
            stream.alone = max(stream.alone - 1, 0)
            for lease in leases:
                self._held.load(lease.queue).followers += 1
            if leases:
                stream.pause = READ_WAITS[0]
                self._hand_out(stream)
            else:
                self._to_release.append(stream)

    def add_decided(self, stream: Stream, seq: int, lease: Lease, due: float) -> None:
        """Add an event that was decided without being run."""
        with self._lock:
            stream.seq, stream.due, stream.read_at = seq, due, inf
            self._held.add([lease])
            lease.decided = True
            stream.handed_out.append(lease)

    def drop_lost(self, streams: Iterable[Stream]) -> None:
        """Drop streams that other workers own; settles of their running events will be refused."""
        with self._lock:
            lost = [each for each in streams if self._streams.get(each.name) is each]
            for stream in lost:
                del self._streams[stream.name]
                self._clear(stream)
                self._held.drop(each for each in stream.handed_out if each.is_waiting)
        if lost:
            logger.warning("lost leases of streams count=%d", len(lost))
            announce(lease_lost, sender=self._alias, count=len(lost))

    # -- for the threads -------------------------------------------------------------------------

    def next(self, lease: Lease, decision: Decision) -> Lease | None:
        """Return the next event if the same thread may run it before ``decision`` is settled.

        Only a plain DONE may run ahead of its settle. Any other decision is settled first, to keep
        the order, and so is every decision before an atomic listener, which commits its own.
        """
        if decision is not DONE or lease.stream is None:
            return None
        with self._lock:
            stream = self.get(lease.stream)
            if stream is None or not stream.waiting:
                return None
            if not stream.handed_out or stream.handed_out[-1] is not lease:
                return None
            follower = stream.waiting[0]
            listener = listener_of(follower)
            if listener is not None and listener.atomic:
                return None
            if follower.queue != lease.queue or not self._pools.accepts(follower.queue):
                return None
            follower.handed_out_at = monotonic()  # before, it did not wait for a thread
            return self._pop_first(stream)

    def settled(self, batch: Iterable[tuple[Lease, Decision]]) -> None:
        """Continue streams whose decisions are settled; mark finished ones for release."""
        with self._lock:
            for lease, decision in batch:
                stream = self.get(lease.stream)
                if stream is None or lease not in stream.handed_out:
                    continue
                stream.handed_out.remove(lease)
                stream.rescues = min(stream.rescues, kept_count(self._settings))
                self._apply(stream, lease, decision)
                if not stream.handed_out:
                    is_end = decision.delay is None or decision.status is Status.RETRY
                    is_end &= decision is not LOST
                    stream.is_innocent = is_end and not stream.released_to_others
                    self._continue(stream)

    def _apply(self, stream: Stream, lease: Lease, decision: Decision) -> None:
        settings, now = self._settings, monotonic()
        if decision is LOST:
            self._stop(stream, now)
        elif decision.delay is not None:
            stream.next_queue = lease.queue
            if decision.status is Status.NEW or settings.STOP_ON_FIRST_FAILURE:
                self._stop(stream, now + decision.delay)
            else:
                stream.due = min(stream.due, now + decision.delay)
        elif decision.status is Status.DEAD and settings.ON_DEAD == "block":
            self._stop(stream, inf if settings.STOP_ON_FIRST_FAILURE else stream.due)

    def _stop(self, stream: Stream, due: float) -> None:
        self._clear(stream)
        stream.due, stream.alone = due, 0

    def _continue(self, stream: Stream) -> None:
        if stream.waiting:
            self._hand_out(stream)
        elif stream.alone:
            stream.read_at = 0.0
            self._wakeup.expect(0.0)
        else:
            self._to_release.append(stream)

    def _hand_out(self, stream: Stream) -> None:
        queue = stream.waiting[0].queue
        if not self._pools.accepts(queue):
            self._leave_to(stream, queue)
            return
        head = self._pop_first(stream)
        head.handed_out_at = monotonic()
        self._pools.put(head)

    def leave_to(self, stream: Stream, queue: str) -> None:
        """Release a stream to the workers of another queue, to which its first event belongs."""
        with self._lock:
            self._leave_to(stream, queue)

    def _leave_to(self, stream: Stream, queue: str) -> None:
        self._clear(stream)
        stream.due, stream.read_at, stream.next_queue = monotonic(), inf, queue
        stream.released_to_others, stream.is_innocent = True, False
        self._to_release.append(stream)

    # -- giving back -----------------------------------------------------------------------------

    def release(self, connection: BaseDatabaseWrapper) -> None:
        """Release finished streams; read those again that have changed since or are locked."""
        if not (finished := self._remove_finished(now := monotonic())):
            return
        releases = [release_of(each, now) for each in finished]
        try:
            freed = dialect_of(connection).release_streams(me=self._me, streams=releases)
        except BaseException:
            with self._lock:
                self._to_release += [each for each in finished if self._put_back(each)]
            raise
        soonest = min(self._finish_release(each, each.name in freed) for each in finished)
        if any(each.released_to_others and each.name in freed for each in finished):
            doorbell.ring(connection)
        if soonest < inf:
            self._wakeup.expect(max(soonest - monotonic(), 0.0))

    def _remove_finished(self, now: float) -> list[Stream]:
        """Remove the streams to be released, so that a claim right afterwards adds them as new."""
        with self._lock:
            finished, self._to_release = self._to_release, []
            finished = [each for each in finished if self._streams.get(each.name) is each]
            for stream in finished:
                del self._streams[stream.name]
                if stream.released_to_others:
                    self._left_to_others[stream.name] = now + 2 * self._settings.PROBE_INTERVAL
            return finished

    def _finish_release(self, stream: Stream, freed: bool) -> float:
        """Note that a stream was released or must be read again; return when due (monotonic)."""
        with self._lock:
            if freed:
                return max(stream.due, self._left_to_others.get(stream.name, 0.0))
            stream.read_at = monotonic() + stream.pause
            stream.pause = min(2 * stream.pause, READ_WAITS[1])
            self._put_back(stream)
            return stream.read_at

    def release_all(self, connection: BaseDatabaseWrapper) -> int:
        """Release all streams that are not running, due now; the others once they are settled.

        Return how many were released. Locked streams stay for the next call.
        """
        with self._lock:
            for stream in self._streams.values():
                stream.alone = 0  # it is not read again
                self._release_to_others(stream)
            self._to_release = []
            left = {key: each for key, each in self._streams.items() if not each.handed_out}
            self._streams = {key: each for key, each in self._streams.items() if each.handed_out}
        count, until, dialect = len(left), monotonic() + LOCKED_RETRY_TIME, dialect_of(connection)
        try:
            while left:  # a business transaction that locks one may end soon
                releases = [Release(each.name, each.locked_at, None, 0.0) for each in left.values()]
                for key in dialect.release_streams(me=self._me, streams=releases):
                    del left[key]
                if monotonic() > until:
                    break
                time.sleep(0.01 if left else 0)
        finally:
            with self._lock:
                for stream in left.values():
                    self._put_back(stream)
        return count - len(left)

    def hand_back(self, connection: BaseDatabaseWrapper, *, after: float | None) -> int:
        """Give back running streams, too, whose settles will be refused; return how many."""
        with self._lock:
            leases = of_streams(self._streams.values())
        dialect = dialect_of(connection)
        return dialect.hand_back_streams(me=self._me, leases=leases, after=after)

    # -- for the heartbeat, and after a refused settle -------------------------------------------

    def renew(self, connection: BaseDatabaseWrapper, streams: Sequence[Stream]) -> None:
        """Renew the leases of these streams; drop those that other workers own."""
        for start in range(0, len(streams), RENEW_BATCH):
            some = {each.name: each for each in streams[start : start + RENEW_BATCH]}
            deadline = self._held.deadline(monotonic())
            renewed, mine = dialect_of(connection).renew_streams(
                me=self._me, leases=of_streams(some.values()), lease=self._held.lease
            )
            with self._lock:
                for key in renewed:
                    self._set_deadline(some[key], deadline)
                self._held.changed.notify_all()
            self.drop_lost(each for key, each in some.items() if key not in mine)

    def release_surplus(self, others: Sequence[int]) -> None:
        """Release streams beyond a fair share; ``others``: how many each other worker has.

        A running event goes on, and its stream is released once the event is settled. So a new
        worker gets its share, however long the events take that this worker has read.
        """
        with self._lock:
            kept = [each for each in self._streams.values() if not each.released_to_others]
            fair = ceil((len(kept) + sum(others)) / (len(others) + 1))
            able = [each for each in kept if not each.alone and unstarted(each)]
            # Those without a running event first.
            able.sort(key=lambda each: any(lease.started_at for lease in each.handed_out))
            for stream in able[: len(kept) - fair]:
                self._release_to_others(stream)

    def shed(self, before: float, queue: str) -> bool:
        """Release streams whose first event has waited for a thread since before ``before``.

        ``before`` is monotonic, ``queue`` that of the event. Return whether there were any.
        A suspect is kept, unless a thread has turned its event away.
        """
        with self._lock:
            late = [
                each
                for each in self._streams.values()
                if each.handed_out
                and each.handed_out[0].queue == queue
                and (each.handed_out[0].turned_away or not each.alone)
                and each.handed_out[0].handed_out_at < before
                and all(lease.is_waiting for lease in each.handed_out)
            ]
            for stream in late:
                self._release_to_others(stream)
        return bool(late)

    def _release_to_others(self, stream: Stream) -> None:
        self._held.drop(dropped := unstarted(stream))
        self._clear(stream)
        stream.handed_out = [each for each in stream.handed_out if not each.is_waiting]
        stream.due, stream.released_to_others, stream.is_innocent = monotonic(), True, False
        stream.next_queue = dropped[0].queue if dropped else stream.next_queue
        if not stream.handed_out:
            self._to_release.append(stream)
