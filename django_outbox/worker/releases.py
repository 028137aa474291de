"""Release and renew: the verbs that give leases back, and that keep them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from math import inf

from .. import doorbell
from ..clocks import monotonic
from ..delivery.lease import Lease, Run
from ..queue_settings import parked_by
from ..signals import announce, lease_lost
from ..sql import dialect_of
from ..sql.values import EVENTS, STREAMS, Release, Unclaimed
from .effects import Statement, Steps, Wait
from .held import Held, ids_and_leases
from .runs import Runs
from .wakeup import Wakeup

logger = logging.getLogger("django_outbox")

LOCKED_RETRY_TIME = 0.5  # seconds for which locked streams are tried again
AT_ONCE = 500  # leases renewed by one statement


class Releases:
    """Gives back the runs of a worker. Each verb is for one thread; several may be in progress."""

    def __init__(self, *, alias: str, me: str, held: Held, runs: Runs, wakeup: Wakeup) -> None:
        self.alias, self.me, self.held, self.runs = alias, me, held, runs
        self._wakeup = wakeup

    def release_ended(self) -> Steps[int]:
        """Release streams that have ended; return how many were.

        Those that have changed since, or are locked, are to be read again.
        """
        now = monotonic()
        if not (ended := self.runs.take_ended(now)):
            return 0
        given = [release_of(each, now) for each in ended]
        try:
            freed = yield self._statement("release_streams", streams=given)
        except BaseException:
            self.runs.put_back(ended)
            raise
        released = [each for each in ended if each.id in freed]
        refused = [each for each in ended if each.id not in freed]
        soonest = [self.runs.next_claim(released), *map(self.runs.read_again, refused)]
        if any(each.is_left for each in released):
            yield doorbell.ring
        if min(soonest) < inf:
            self._wakeup.expect(max(min(soonest) - monotonic(), 0.0))
        return len(released)

    def give_back(self, runs: Sequence[Run]) -> Steps[tuple[list[Lease], int]]:
        """Release what has not started of runs, due as before; return these rows, and streams.

        It is not started here any more: a thread that is about to, waits, and then may not. A
        stream of which an event runs is released once that is settled. What is locked stays held.
        """
        with self.held.changed:
            rows = [one for run in runs if run.table is EVENTS for one in run.unstarted]
            self.held.drop(rows)
            for run in runs:
                if run.table is STREAMS:
                    self.runs.leave(run)
        streams = yield from self.release_ended()
        if not rows:
            return [], streams
        try:
            left = yield self._statement("unclaim", due=as_before(rows))
        except BaseException:
            self.held.add_rows(rows)  # they are renewed, and may still start
            raise
        if left:
            self.held.add_rows(each for each in rows if each.id in left)
        yield doorbell.ring
        return [each for each in rows if each.id not in left], streams

    def release_streams(self) -> Steps[int]:
        """Release all streams, those that run once they are settled; return how many were.

        A business transaction that locks one may end soon: it is tried again for a moment.
        """
        count, until = 0, monotonic() + LOCKED_RETRY_TIME
        while True:
            for run in self.held.of(STREAMS):
                self.runs.interrupt(run)
            count += yield from self.release_ended()
            if all(each.out for each in self.held.of(STREAMS)) or monotonic() > until:
                return count
            yield Wait(0.01)

    def hand_back(self, after: float | None) -> Steps[int]:
        """Release what still runs, whose settles will be refused; return how many runs were.

        They are due ``after`` seconds from now; with None, when their leases would have ended.
        """
        count = 0
        for table in (EVENTS, STREAMS):
            if runs := self.held.of(table):
                leases = ids_and_leases(runs)
                count += yield self._statement("release", table=table, leases=leases, after=after)
        yield doorbell.ring
        return count

    def renew(self, runs: Sequence[Run]) -> Steps[None]:
        """Renew the leases of runs; give up those that other workers own."""
        for table in (EVENTS, STREAMS):
            mine = [each for each in runs if each.table is table]
            for start in range(0, len(mine), AT_ONCE):
                some, deadline = mine[start : start + AT_ONCE], self.held.deadline(monotonic())
                renewed, held = yield self._statement(
                    "renew", table=table, leases=ids_and_leases(some), lease=self.held.lease
                )
                self.held.renewed([each for each in some if each.id in renewed], deadline)
                self._lose([each for each in some if each.id not in held])

    def _lose(self, runs: Sequence[Run]) -> None:
        if count := self.held.lose(runs):
            logger.warning("lost leases before their start count=%d", count)
            announce(lease_lost, sender=self.alias, count=count)

    def _statement(self, name: str, **given: object) -> Statement:
        return lambda connection: getattr(dialect_of(connection), name)(me=self.me, **given)


def as_before(leases: Iterable[Lease]) -> list[Unclaimed]:
    """Return how rows are released unstarted: due as before, and where they were."""
    return [Unclaimed(each.id, each.locked_at, each.due_at, each.run.queue) for each in leases]


def release_of(run: Run, now: float) -> Release:
    """Return how a stream is released."""
    release = partial(Release, run.id, run.locked_at, is_innocent=run.is_innocent)
    if run.due == inf:
        return release(run.seq, None)
    # If it is due at once, its next claim reads what was written in the meantime.
    delay, waits = max(run.due - now, 0.0), parked_by(run.next_queue) is not None
    return release(run.seq if delay or waits else None, delay, run.next_queue)
