"""Runs the events of each leased stream in order, and releases the streams afterwards.

A stream falls due as a row does. One of its events is out at a time: in the ready queue, with a
thread, or decided and waiting to be settled, together with those that the same thread ran next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from math import ceil, inf

from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..delivery.lease import Lease
from ..listeners import registry
from ..listeners.outcomes import DONE, LOST, Decision, Status
from ..signals import announce, lease_lost
from ..sql import dialect_of
from ..sql.values import Release
from .stream import READ_WAITS, InFlight, Stream, release_of, unstarted

logger = logging.getLogger("django_outbox")

BATCH = 500  # streams renewed by one statement
LAST_TRY = 0.5  # seconds for which a stopping worker tries to release locked streams


class Streams(InFlight):
    """All streams of this worker, each from its claim to its release."""

    # -- for the claimer -------------------------------------------------------------------------

    def claimed(self, streams: Iterable[Stream]) -> list[str]:
        """Add claimed streams; return the keys of the new ones. A known one was only renewed."""
        new = []
        with self._changed:
            for stream in streams:
                known = self._streams.setdefault(stream.key, stream)
                if known is stream:
                    new.append(stream.key)
                else:
                    self._prolong(known, stream.deadline)
        return new

    def take_in(self, stream: Stream, seq: int, leases: Sequence[Lease], due: float) -> None:
        """Add the events read of a stream and hand out the first; without any, release it."""
        with self._changed:
            stream.seq, stream.due, stream.read_at, stream.leaving = seq, due, inf, False
            for lease in leases:
                lease.deadline = stream.deadline
            self._held.add(leases)
            stream.waiting.extend(leases)
            self.followers += len(leases)
            if leases:
                stream.pause = READ_WAITS[0]
                self._hand_out(stream)
            else:
                self._over.append(stream)

    def bury(self, stream: Stream, seq: int, lease: Lease, due: float) -> None:
        """Add an event that was decided without being run."""
        with self._changed:
            stream.seq, stream.due, stream.read_at = seq, due, inf
            self._held.add([lease])
            lease.decided = True
            stream.out.append(lease)

    def park(self, stream: Stream, seq: int, due: float) -> None:
        """Keep a stream, with its lease renewed, until its suspect may run."""
        with self._changed:
            stream.seq, stream.due, stream.read_at = seq, due, inf

    def lose(self, streams: Iterable[Stream]) -> None:
        """Drop streams that other workers own; settles of their running events will be refused."""
        with self._changed:
            lost = [each for each in streams if self._streams.get(each.key) is each]
            for stream in lost:
                del self._streams[stream.key]
                self._clear(stream)
                self._held.drop(each for each in stream.out if each.is_waiting)
        if lost:
            logger.warning("lost leases of streams count=%d", len(lost))
            announce(lease_lost, sender=self._alias, count=len(lost))

    # -- for the threads -------------------------------------------------------------------------

    def next(self, lease: Lease, decision: Decision) -> Lease | None:
        """Return the next event if the same thread may run it before ``decision`` is settled.

        Only a plain DONE may run ahead of its settle. Any other decision is settled first, to keep
        the order, and so is every decision before an atomic listener, which commits its own.
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
            follower.handed_out_at = inf  # it waited for the event before it, not for a thread
            return self._pop(stream)

    def settled(self, batch: Iterable[tuple[Lease, Decision]]) -> None:
        """Continue streams whose decisions are settled; mark finished ones for release."""
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
        settings, now = self._settings, monotonic()
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
            self._wakeup.expect(0.0)
        else:
            self._over.append(stream)

    def _hand_out(self, stream: Stream) -> None:
        head = self._pop(stream)
        head.handed_out_at = monotonic()
        self._ready.put(head)

    # -- giving back -----------------------------------------------------------------------------

    def release(self, connection: BaseDatabaseWrapper) -> None:
        """Release finished streams; read those again that have changed since or are locked."""
        if not (over := self._take_over(now := monotonic())):
            return
        given = [release_of(each, now) for each in over]
        try:
            self._uncount(connection)
            freed = dialect_of(connection).release_streams(connection, me=self._me, streams=given)
        except BaseException:
            with self._changed:
                self._over += [each for each in over if self._put_back(each)]
            raise
        soonest = min(self._after_release(each, each.key in freed) for each in over)
        if any(each.leaving and each.key in freed for each in over):
            doorbell.ring(connection)
        if soonest < inf:
            self._wakeup.expect(max(soonest - monotonic(), 0.0))

    def _take_over(self, now: float) -> list[Stream]:
        """Remove the streams to be released, so that a claim right afterwards adds them as new."""
        with self._changed:
            over, self._over = self._over, []
            over = [each for each in over if self._streams.get(each.key) is each]
            for stream in over:
                del self._streams[stream.key]
                if stream.leaving:
                    self._left[stream.key] = now + 2 * self._settings.PROBE_INTERVAL
            return over

    def _after_release(self, stream: Stream, freed: bool) -> float:
        """Note that a stream was released or must be read again; return when due (monotonic)."""
        with self._changed:
            if freed:
                return max(stream.due, self._left.get(stream.key, 0.0))
            stream.read_at = monotonic() + stream.pause
            stream.pause = min(2 * stream.pause, READ_WAITS[1])
            self._put_back(stream)
            return stream.read_at

    def release_all(self, connection: BaseDatabaseWrapper) -> int:
        """Release all streams that are not running, due now; the others once they are settled.

        Return how many were released. Locked streams stay for the next call.
        """
        with self._changed:
            for stream in self._streams.values():
                stream.careful = 0  # it is not read again
                self._leave(stream)
            self._over = []
            left = {key: each for key, each in self._streams.items() if not each.out}
            self._streams = {key: each for key, each in self._streams.items() if each.out}
        count, until, dialect = len(left), monotonic() + LAST_TRY, dialect_of(connection)
        try:
            self._uncount(connection)
            while left:  # a business transaction that locks one may end soon
                releases = [Release(key, None, 0.0) for key in left]
                for key in dialect.release_streams(connection, me=self._me, streams=releases):
                    del left[key]
                if monotonic() > until:
                    break
                time.sleep(0.01 if left else 0)
        finally:
            with self._changed:
                for stream in left.values():
                    self._put_back(stream)
        return count - len(left)

    def hand_back(self, connection: BaseDatabaseWrapper, *, after: float | None) -> int:
        """Give back running streams, too, whose settles will be refused; return how many."""
        with self._changed:
            keys = [*self._streams]
            self._note_uncounted(each for stream in self._streams.values() for each in stream.out)
        self._uncount(connection)
        dialect = dialect_of(connection)
        return dialect.hand_back_streams(connection, me=self._me, keys=keys, after=after)

    def _note_uncounted(self, leases: Iterable[Lease]) -> None:
        counted = [each for each in leases if each.counted]
        self._uncounted += [each.event_id for each in counted]
        for each in counted:
            each.counted = False  # or it would be undone twice

    def _uncount(self, connection: BaseDatabaseWrapper) -> None:
        """Undo the rescues that were counted before events started, while we own their streams."""
        with self._changed:
            ids, self._uncounted = self._uncounted, []
        try:
            if ids:
                dialect_of(connection).take_back_starts(connection, me=self._me, ids=ids)
        except DatabaseError as error:  # a lock, for example; the streams are released anyway
            logger.warning("count of rescues not taken back error=%s", error)

    # -- for the heartbeat, and after a refused settle -------------------------------------------

    def renew(self, connection: BaseDatabaseWrapper, streams: Sequence[Stream]) -> None:
        """Renew the leases of these streams; drop those that other workers own."""
        for start in range(0, len(streams), BATCH):
            some = {each.key: each for each in streams[start : start + BATCH]}
            deadline = self._held.deadline(monotonic())
            renewed, mine = dialect_of(connection).renew_streams(
                connection, me=self._me, keys=[*some], lease=self._held.lease
            )
            with self._changed:
                for key in renewed:
                    self._prolong(some[key], deadline)
                self._changed.notify_all()
            self.lose(each for key, each in some.items() if key not in mine)

    def share(self, others: Sequence[int]) -> None:
        """Release streams beyond a fair share; ``others``: how many each other worker has.

        A running event goes on, and its stream is released once the event is settled. So a new
        worker gets its share, however long the events take that this worker has read.
        """
        with self._changed:
            kept = [each for each in self._streams.values() if not each.leaving]
            fair = ceil((len(kept) + sum(others)) / (len(others) + 1))
            able = [each for each in kept if not each.careful and unstarted(each)]
            able.sort(key=lambda each: any(lease.started_at for lease in each.out))  # idle first
            for stream in able[: len(kept) - fair]:
                self._leave(stream)

    def shed(self, before: float) -> bool:
        """Release streams whose first event has waited for a thread since before ``before``.

        ``before`` is monotonic. Return whether there were any.
        """
        with self._changed:
            late = [each for each in self._streams.values()
                    if each.out and not each.careful and each.out[0].handed_out_at < before
                    and all(lease.is_waiting for lease in each.out)]  # fmt: skip
            for stream in late:
                self._leave(stream)
        return bool(late)

    def _leave(self, stream: Stream) -> None:
        self._note_uncounted(dropped := unstarted(stream))
        self._held.drop(dropped)
        self._clear(stream)
        stream.out = [each for each in stream.out if not each.is_waiting]
        stream.due, stream.leaving = monotonic(), True
        if not stream.out:
            self._over.append(stream)
