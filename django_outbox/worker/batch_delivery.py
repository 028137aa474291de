"""Delivers batches: in a queue's threads, and what the event loop and ``drain()`` share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import Protocol

from ..conf import current
from ..delivery.batch import Batch
from ..delivery.batch_call import BatchCall
from ..delivery.call import Call, call_fallback
from ..delivery.decide import deferred_after_error
from ..delivery.deliver import batch_listener, batch_size
from ..delivery.lease import Lease
from ..delivery.timeouts import CallAbandoned, TimedCall
from ..listeners.outcomes import DONE, Decision, Status
from ..listeners.registry import Listener
from .connection_cleanup import ConnectionCleanup
from .gate import Gate
from .gates import Gates
from .held import Held
from .ready import Lane
from .runs import Runs
from .settle_log import log_failed

Between = Callable[[Lease], bool]


class Place(Protocol):
    """A thread's place in its queue: what a thread that replaces it goes on with."""

    lease: Lease | None
    batch: list[Lease]
    fallbacks: deque[Call]


class BatchDelivery:
    """Delivers the lanes of one queue, for its threads."""

    def __init__(
        self,
        *,
        alias: str,
        gate: Gate,
        gates: Gates,
        held: Held,
        runs: Runs,
        is_stopping: Callable[[], bool],
        to_loop: Callable[[Lane], None],
    ) -> None:
        self._alias, self._gate, self._gates = alias, gate, gates
        self._held, self._runs = held, runs
        self._is_stopping, self._to_loop = is_stopping, to_loop

    def deliver(
        self, place: Place, lane: Lane, cleanup: ConnectionCleanup, between: Between
    ) -> float:
        """Deliver a lane's next batch; return the seconds of it that are not settled yet."""
        if lane.is_awaited:
            self._to_loop(lane)
            return 0.0
        place.batch = self._start(place, next_batch(lane, self._gate, self._runs))
        if not place.batch:
            return 0.0
        batch = None
        try:
            cleanup.before()
            place.lease = place.batch[0]
            batch = Batch(
                lane.listener,
                place.batch,
                alias=self._alias,
                between=between,
                is_current=self._held.is_current,
                pauses=self._gate.pauses,
                report=self._gate.report,
            )
            batch.context = context = copy_context()
            context.run(batch.run)
        except CallAbandoned:
            raise
        except BaseException:  # noqa: BLE001 - whatever it is, the thread must go on
            log_failed(place.batch[0])
        if batch is None:
            place.lease = None
            for lease in place.batch:
                self._gates.settle(lease, deferred_after_error())
            return 0.0
        self._settle(place, batch, cleanup, between)
        return 0.0 if lane.listener.atomic else sum(each.duration for each in place.batch)

    def wait_settled(self, place: Place) -> None:
        """Wait until the last batch of a thread is settled."""
        self._held.wait_settled(place.batch, self._is_stopping)
        place.batch = []  # not to be kept in memory

    def _start(self, place: Place, leases: list[Lease]) -> list[Lease]:
        """Start those events of a batch that may start; return them."""
        able = []
        held_up: set[str] = set()  # streams
        for lease in leases:
            if lease.stream not in held_up and self._may_start(lease):
                able.append(lease)
            elif lease.stream is not None:
                held_up.add(lease.stream)
        if not self._is_stopping():
            self._held.start_all(able)
        return [each for each in leases if each.started_at]

    def _may_start(self, lease: Lease) -> bool:
        if not self._gate.may_start(lease):
            return False  # the claimer releases it
        return self._held.is_current(lease) or self._held.wait_current(lease, self._is_stopping)

    def finish(
        self, place: Place, timed: TimedCall, cleanup: ConnectionCleanup, between: Between
    ) -> None:
        """Finish a batch that an abandoned thread delivered."""
        assert isinstance(timed.call, BatchCall)
        batch = timed.call.batch
        assert batch.context is not None
        place.lease = batch.lead
        try:
            batch.context.copy().run(batch.take_over, timed.call, timed.seconds, between)
        except CallAbandoned:
            raise
        except BaseException:  # noqa: BLE001 - it is logged
            log_failed(batch.lead)
        self._settle(place, batch, cleanup, between)

    def _settle(
        self, place: Place, batch: Batch, cleanup: ConnectionCleanup, between: Between
    ) -> None:
        """Have a batch's decisions settled, and call its fallbacks."""
        place.lease = None
        place.fallbacks.extend(batch.fallbacks)
        if any(decision.status is not Status.DONE for _, decision in batch.decided):
            cleanup.close_half_made()
        cleanup.after(batch.lead)
        place.batch = settle_rest(batch, self._gates, self._runs, deferred_after_error())
        self.fall_back(place, cleanup, between)

    def fall_back(self, place: Place, cleanup: ConnectionCleanup, between: Between) -> None:
        """Call the fallbacks that are left, one by one."""
        while place.fallbacks:
            fallback = place.fallbacks.popleft()
            lease = place.lease = fallback.lease
            fallback.between = between
            try:
                cleanup.before()
                decision = call_fallback(fallback)
            except CallAbandoned:
                raise
            except BaseException:  # noqa: BLE001 - it is logged
                log_failed(lease)
                decision = deferred_after_error()
            place.lease = None
            self._gates.settle(lease, decision)
            place.batch.append(lease)
            cleanup.after(lease)


def next_batch(lane: Lane, gate: Gate, runs: Runs) -> list[Lease]:
    """Take the next batch from a lane."""
    most, most_bytes = 1 if gate.probing else lane.size, current().BATCH_BYTES
    heads = lane.take(most, most_bytes)
    gate.ready.put_back(lane)
    return with_followers(lane.listener, heads, runs, most=most, most_bytes=most_bytes)


def with_followers(
    listener: Listener, heads: list[Lease], runs: Runs, *, most: int, most_bytes: int
) -> list[Lease]:
    """Return up to ``most`` events: ``heads``, and what ``per_key`` lets follow them.

    The last one may overshoot ``most_bytes`` of payload text.
    """
    batching = listener.batching
    assert batching is not None
    if batching.per_key == 1:
        return heads

    def fits(lease: Lease) -> bool:
        is_next = batch_listener(lease) is listener
        return is_next and batch_size(listener, lease) == batching.size

    found: list[Lease] = []
    room, room_in_bytes = most - len(heads), most_bytes - sum(each.payload_bytes for each in heads)
    for lease in heads:
        found.append(lease)
        last, count = lease, 1
        while count < batching.per_key and room > 0 and room_in_bytes > 0 and fits(last):
            follower = runs.follower_of(last, fits)
            if follower is None:
                break
            found.append(follower)
            last, count = follower, count + 1
            room, room_in_bytes = room - 1, room_in_bytes - follower.payload_bytes
    return found


def settle_batch(batch: Batch, gates: Gates, runs: Runs) -> list[Lease]:
    """Have the decisions of a batch settled; those of its fallbacks come later.

    Return the events to be settled.
    """
    decided, batch.decided = batch.decided, []
    batch.gone.update(lease.id for lease, _ in decided)
    batch.gone.update(lease.id for lease in batch.to_repeat)
    runs.wait_again(batch.to_repeat)  # first: once its stream goes on, an event is read anew
    batch.to_repeat = []
    last = {each.stream: each for each, _ in decided if each.stream is not None}
    ahead = [
        runs.next(lease, decision)
        for lease, decision in decided
        if decision is DONE and lease.stream and last[lease.stream] is lease
    ]
    for each in decided:
        gates.settle(*each)
    gates.put([each for each in ahead if each is not None])
    return [lease for lease, _ in decided]


def settle_rest(batch: Batch, gates: Gates, runs: Runs, decision: Decision) -> list[Lease]:
    """Settle a batch whose delivery has ended; events that it left undecided get ``decision``."""
    batch.decided += [(lease, decision) for lease in batch.undecided()]
    return settle_batch(batch, gates, runs)
