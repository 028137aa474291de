"""``Runs``: hands out the events of each stream in order, one after the other.

A stream falls due as a row does. One of its events is out at a time: it is in the ready queue, in a
thread, or decided and waiting to be settled, with those that the thread ran next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import ceil, inf
from typing import NamedTuple, Protocol

from .. import doorbell
from ..clocks import monotonic
from ..conf import Settings
from ..delivery.lease import Lease, Run
from ..listeners import registry
from ..listeners.outcomes import DONE, LOST, Decision, Status
from ..queue_settings import parked_by
from ..sql.values import STREAMS, SUSPECT_FROM, Release, Row
from .effects import Steps, ask
from .held import Held
from .polling import Wakeup

READ_WAITS = (0.01, 0.2)  # seconds before an unreleased stream is read again: at first, and at most


class Threads(Protocol):
    """What delivers events: a worker's threads and event loops, or the one of ``drain()``."""

    def put(self, leases: Sequence[Lease]) -> None:
        """Queue events for the threads of their queues."""

    def accepts(self, queue: str) -> bool:
        """Return whether events of this queue may be started here."""

    def claimed(self, leases: Sequence[Lease]) -> None:
        """Note events that were claimed, and are to run here."""

    def settle(self, decided: tuple[Lease, Decision], /) -> None:
        """Have a decision settled."""


class StreamRead(NamedTuple):
    """What was read of a stream."""

    run: Run
    seq: int  # its version
    leases: list[Lease]  # its next events in order
    due: float  # monotonic; when it is due again behind them; inf: idle
    queue: str | None = None  # where it waits, if its first event is paused or not due yet


class Runs:
    """What becomes of the streams of a worker, between their claim and their release."""

    def __init__(
        self, *, me: str, settings: Settings, held: Held, pools: Threads, wakeup: Wakeup
    ) -> None:
        self.settings, self.held, self.pools, self._wakeup = settings, held, pools, wakeup
        self.me, self._lock = me, held.lock
        self._ended: list[Run] = []  # streams to be released
        # Ids that only other workers may claim, each until a time (monotonic).
        self._left_to_others: dict[str, float] = {}

    def __len__(self) -> int:
        """Return how many streams are leased."""
        return len(self.held.of(STREAMS))

    # -- for the claimer -------------------------------------------------------------------------

    def exclude(self, stream: str) -> None:
        """Have a stream left to other workers, by all further claims."""
        self._left_to_others[stream] = inf

    def excluded(self, now: float) -> list[str]:
        """Return the names of the streams that a claim leaves out.

        These are streams of ours whose leases may have ended, and those left to other workers.
        """
        with self._lock:
            left = self._left_to_others
            self._left_to_others = {key: until for key, until in left.items() if until > now}
            outdated = [each.id for each in self.held.of(STREAMS) if each.deadline < now]
            return [*self._left_to_others, *outdated]

    def next_exclusion_end(self) -> float:
        """Return when (monotonic) a claim may include streams again that were left to others."""
        with self._lock:
            return min(self._left_to_others.values(), default=inf)

    def next_read(self) -> float:
        """Return when (monotonic) the next stream is to be read."""
        return min((each.read_at for each in self.held.of(STREAMS)), default=inf)

    def to_read(self, now: float, most: int) -> list[Run]:
        return [each for each in self.held.of(STREAMS) if each.read_at <= now][:most]

    def suspect(self) -> Run | None:
        """Return the stream whose events run one by one, if there is one."""
        return next((each for each in self.held.of(STREAMS) if each.alone), None)

    def add_events(self, reads: Iterable[StreamRead]) -> None:
        """Add the events of streams and hand out the first of each; without any, release it.

        A stream that another worker has taken since it was read is passed over.
        """
        ready = list[Run]()
        with self._lock:
            for run, seq, leases, due, queue in reads:
                if self.held.get(run.id) is not run:
                    continue
                run.seq, run.due, run.read_at = seq, due, inf
                run.is_left = run.interrupted = False
                run.next_queue = queue
                run.alone = max(run.alone - 1, 0)
                if leases:
                    run.pause = 0.0
                    self.held.add_waiting(run, leases)
                    ready.append(run)
                else:
                    self._ended.append(run)
            self._hand_out(ready)

    # -- for the threads -------------------------------------------------------------------------

    def next(self, lease: Lease, decision: Decision) -> Lease | None:
        """Return the next event if the same thread may run it before ``decision`` is settled.

        Only a plain DONE may run ahead of its settle. Any other decision is settled first, to keep
        the order, and so is every decision before an atomic listener, which commits its own.
        """
        if decision is not DONE or not lease.run.waiting:
            return None
        return self.follower_of(lease, self._runs_ahead)

    def _runs_ahead(self, lease: Lease) -> bool:
        listener = registry.by_title(lease.listener)
        is_atomic = listener is not None and listener.atomic
        return not is_atomic and self.pools.accepts(lease.queue)

    def follower_of(self, lease: Lease, fits: Callable[[Lease], bool]) -> Lease | None:
        """Hand out the event behind the last one of its stream that was, if it ``fits``."""
        run = lease.run
        with self._lock:
            if not run.waiting or run.out[-1:] != [lease]:
                return None
            follower = run.waiting[0]
            if follower.queue != lease.queue or not fits(follower):
                return None
            return self.held.hand_out(run)

    def wait_again(self, leases: Sequence[Lease]) -> None:
        """Let events wait again, unstarted, behind one of their key that is not done."""
        with self._lock:
            for lease in reversed(leases):
                self.held.wait_again(lease)

    def settled(self, batch: Iterable[tuple[Lease, Decision]]) -> None:
        """Continue streams whose decisions are settled; mark finished ones for release."""
        kept, ready = kept_count(self.settings), list[Run]()
        with self._lock:
            for lease, decision in batch:
                run = lease.run
                if not self.held.remove(lease) or self.held.get(run.id) is not run:
                    continue
                run.rescues = min(run.rescues, kept)
                if decision is not DONE:
                    self._apply(run, lease, decision)
                if run.out:
                    continue
                is_end = decision.delay is None or decision.status is Status.RETRY
                run.is_innocent = is_end and decision is not LOST and not run.interrupted
                if run.waiting:
                    ready.append(run)
                elif run.alone:
                    run.read_at = 0.0
                    self._wakeup.expect(0.0)
                else:
                    self._ended.append(run)
            self._hand_out(ready)
            self.held.changed.notify_all()

    def _apply(self, run: Run, lease: Lease, decision: Decision) -> None:
        settings, now = self.settings, monotonic()
        if decision is LOST:
            self._stop(run, now)
        elif decision.delay is not None:
            run.next_queue = lease.queue
            if decision.status is Status.NEW or settings.STOP_ON_FIRST_FAILURE:
                self._stop(run, now + decision.delay)
            else:
                run.due = min(run.due, now + decision.delay)
        elif decision.status is Status.DEAD and settings.ON_DEAD == "block":
            self._stop(run, inf if settings.STOP_ON_FIRST_FAILURE else run.due)

    def _stop(self, run: Run, due: float) -> None:
        self.held.drop([*run.waiting])
        run.due, run.alone = due, 0

    def _hand_out(self, runs: Sequence[Run]) -> None:
        """Hand out the next event of each stream, but leave those whose queue is closed.

        No thread gets one that is decided already.
        """
        queues = {each.waiting[0].queue for each in runs}
        accepted = {each for each in queues if self.pools.accepts(each)}
        for run in runs:
            if run.waiting[0].queue not in accepted:
                self.leave(run)
        heads = [self.held.hand_out(each) for each in runs if each.waiting]
        self.pools.put([each for each in heads if not each.decided])

    # -- giving back -----------------------------------------------------------------------------

    def leave(self, run: Run, queue: str | None = None) -> None:
        """Interrupt a stream, and leave it to other workers for a while."""
        with self._lock:
            run.is_left = True
            self.interrupt(run, queue)

    def interrupt(self, run: Run, queue: str | None = None) -> None:
        """Have a stream released, due at once, when what runs of it is settled.

        ``queue`` is that of its first event, if that has not been added.
        """
        with self._lock:
            unstarted = run.unstarted
            self.held.drop(unstarted)
            run.next_queue = queue or (unstarted[0].queue if unstarted else run.next_queue)
            run.due, run.read_at, run.alone = monotonic(), inf, 0
            run.interrupted, run.is_innocent = True, False
            if not run.out:
                self._ended.append(run)

    def leave_surplus(self, others: Sequence[int]) -> None:
        """Leave streams beyond a fair share; ``others``: how many each other worker has.

        A running event goes on, and its stream is released once the event is settled. So a new
        worker gets its share, however long the events take that this worker has read.
        """
        with self._lock:
            kept = [each for each in self.held.of(STREAMS) if not each.interrupted]
            fair = ceil((len(kept) + sum(others)) / (len(others) + 1))
            able = [each for each in kept if not each.alone and each.unstarted]
            # Those without a running event first.
            able.sort(key=lambda each: any(lease.started_at for lease in each.out))
            for run in able[: len(kept) - fair]:
                self.leave(run)

    def release_ended(self) -> Steps[int]:
        """Release streams that have ended; return how many were.

        Those that have changed since, or are locked, are to be read again.
        """
        now, held = monotonic(), self.held
        with self._lock:
            ended, self._ended = [each for each in self._ended if held.get(each.id) is each], []
            for run in ended:
                held.forget(run)  # now, so that a claim right afterwards adds it as new
                if run.is_left:
                    until = now + 2 * self.settings.PROBE_INTERVAL
                    self._left_to_others.setdefault(run.id, until)
        if not ended:
            return 0
        given = [release_of(each, now) for each in ended]
        try:
            freed = yield ask("release_streams", me=self.me, streams=given)
        except BaseException:
            with self._lock:
                self._ended += [each for each in ended if held.put_back(each)]
            raise
        soonest = inf
        with self._lock:
            for run in ended:
                if run.id in freed:  # this worker may claim it again
                    soonest = min(soonest, max(run.due, self._left_to_others.get(run.id, 0.0)))
                elif held.put_back(run):
                    run.pause = min(2 * run.pause, READ_WAITS[1]) or READ_WAITS[0]
                    run.read_at = monotonic() + run.pause
                    soonest = min(soonest, run.read_at)
        if any(each.is_left and each.id in freed for each in ended):
            yield doorbell.ring
        if soonest < inf:
            self._wakeup.expect(max(soonest - monotonic(), 0.0))
        return len(freed)


def kept_count(settings: Settings) -> int:
    """Return how many lost workers a suspected stream is left with once its head has ended.

    So it stays a suspect for the events behind, of which none dies for what was before it.
    """
    return min(SUSPECT_FROM, settings.MAX_RESCUES - 1)


def release_of(run: Run, now: float) -> Release:
    """Return how a stream is released."""
    release = partial(Release, run.id, run.locked_at, is_innocent=run.is_innocent)
    if run.due == inf:
        return release(run.seq, None)
    # If it is due at once, its next claim reads what was written in the meantime.
    delay, waits = max(run.due - now, 0.0), parked_by(run.next_queue) is not None
    return release(run.seq if delay or waits else None, delay, run.next_queue)


def stream_run(row: Row, *, deadline: float, me: str, alone: int) -> Run:
    """Create the run of a claimed stream; ``alone`` events of it are to run one by one."""
    name, queue, rescues, _due, was, locked_at = row
    return Run(
        table=STREAMS,
        id=name,
        queue=queue,
        locked_at=locked_at,
        deadline=deadline,
        rescues=rescues,
        lost_worker=was if was != me else None,
        alone=alone,
        read_at=0.0,  # also if the read fails that follows
    )
