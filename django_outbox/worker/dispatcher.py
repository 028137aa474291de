"""A queue's threads: each takes an event or a batch, delivers it and passes the decisions on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context

from ..clocks import monotonic
from ..delivery.batch_call import BatchCall
from ..delivery.call import Call
from ..delivery.decide import deferred_after_error
from ..delivery.deliver import batch_listener, deliver, finish, is_async
from ..delivery.lease import Lease
from ..delivery.timeouts import CallAbandoned, TimedCall
from ..listeners.outcomes import Decision, Status
from .batch_delivery import BatchDelivery
from .connection_cleanup import BrokenSessions, ConnectionCleanup
from .gate import Gate
from .gates import Gates
from .held import Held
from .ready import Lane
from .runs import Runs
from .settle_log import log_failed
from .threads import thread_name

logger = logging.getLogger("django_outbox")

# Seconds of listener time that a thread may be ahead of the settler. If the process dies, that much
# is repeated, or one event per thread; without a limit, all that a group commit had gathered.
RUN_AHEAD = 0.0005
IDLE_WAIT = 1.0  # seconds after which an idle thread checks whether it should end

Between = Callable[[Lease], bool]


class Seat:
    """A place among the threads: its thread, and the lease that the thread delivers."""

    def __init__(
        self,
        run: Callable[[Seat], None],
        name: str,
        inherited: TimedCall | None = None,
        fallbacks: deque[Call] | None = None,
    ) -> None:
        self.inherited = inherited  # a call that hangs; this thread finishes its delivery
        self.fallbacks = deque() if fallbacks is None else fallbacks  # of a batch, to be called
        # What the thread delivers, of a batch the first; only the thread sets it.
        self.lease: Lease | None = None
        self.batch: list[Lease] = []  # the events of its last batch
        self.thread = threading.Thread(target=run, args=(self,), name=name, daemon=True)

    @property
    def is_taken(self) -> bool:
        """Return whether its thread runs, or has yet to be started for an inherited call."""
        is_late = self.inherited is not None and self.thread.ident is None
        return is_late or self.thread.is_alive()


class Dispatcher:
    """The ``WORKERS`` threads of one queue, which deliver what is ready; replaced if they hang.

    A thread whose call exceeds its timeout is abandoned: another thread takes its place, and it
    ends when the call returns. It is not interrupted: asynchronous exceptions leave locks held.
    """

    def __init__(
        self,
        *,
        alias: str,
        gate: Gate,
        gates: Gates,
        stuck_after: float,
        held: Held,
        runs: Runs,
        sessions: BrokenSessions,
        to_loop: Callable[[Lease | Lane], None],
    ) -> None:
        """``to_loop`` has the queue's event loop deliver an event, or the next batch of a lane."""
        self._alias, self._held, self._ready = alias, held, gate.ready
        self._gate, self._gates, self._runs, self._sessions = gate, gates, runs, sessions
        self._stuck_after, self._to_loop = stuck_after, to_loop  # seconds
        self.stopping = False  # set by ``stop``
        self._batches = BatchDelivery(
            alias=alias,
            gate=gate,
            gates=gates,
            held=held,
            runs=runs,
            is_stopping=self._is_stopping,
            to_loop=to_loop,
        )
        self._seats = [
            Seat(self._run, thread_name(alias, gate.name, f"worker-{number}"))
            for number in range(gate.settings.WORKERS)
        ]
        self._abandoned: list[threading.Thread] = []  # changed only by the watchdog's thread
        # What the watchdog has logged; set only by its thread.
        self._was_stuck = self._had_too_many_hung_threads = False

    def start(self) -> None:
        for seat in self._seats:
            seat.thread.start()

    def stop(self) -> None:
        """Stop the threads from starting another event; may be called again."""
        self.stopping = True
        self._ready.wake(len(self._seats))

    def _is_stopping(self) -> bool:
        return self.stopping

    def join(self, give_up: Callable[[], bool]) -> bool:
        """Wait for running listeners, except abandoned ones; return whether all ended."""
        while self._is_busy() and not give_up():
            time.sleep(0.005)
        self._ready.take_all()
        return not self._is_busy()

    def dead_reason(self, longest: float) -> str | None:
        """Return why only a new process helps: threads hang, or ended without being told to.

        A listener without a timeout may take as long as it needs.
        """
        if self.has_too_many_hung_threads:
            return f"{self._hanging()} threads hang in listeners past their timeouts"
        ended = [
            each.thread.name
            for each in self._seats
            if each.thread.ident and not each.thread.is_alive()
        ]
        return f"{', '.join(ended)} ended" if ended and not self.stopping else None

    def unready_reason(self, longest: float) -> str | None:
        """Return a reason if every thread has been in one call for ``STUCK_AFTER`` seconds."""
        seconds, _ = self._stuck()
        return f"every thread has been in one call for {seconds:.0f} s" if seconds else None

    @property
    def has_too_many_hung_threads(self) -> bool:
        """Return whether as many threads hang as the queue has."""
        return self._hanging() >= len(self._seats)

    # -- for the watchdog ------------------------------------------------------------------------

    def watch(self) -> None:
        """Write off calls past their timeouts; log when all threads are stuck or too many hang."""
        now = monotonic()
        for number, seat in enumerate(self._seats):
            if seat.inherited is not None and seat.thread.ident is None:
                seat.thread.start()  # an earlier start failed
            lease = seat.lease
            timed = lease.timed if lease is not None else None
            if timed is not None and now > timed.ends_at:
                self._replace(number, seat, timed)
        self._abandoned = [each for each in self._abandoned if each.is_alive()]
        self._report()

    def _replace(self, number: int, seat: Seat, timed: TimedCall) -> None:
        with self._held.lock:
            if not timed.abandon():  # it has returned in the meantime
                return
            self._abandoned = [*self._abandoned, seat.thread]
            self._seats[number] = successor = Seat(
                self._run, seat.thread.name, timed, seat.fallbacks
            )
        successor.thread.start()

    def _report(self) -> None:
        seconds, leases = self._stuck()
        if seconds and not self._was_stuck:
            events = ", ".join(f"{each.event_id} ({each.event_type})" for each in leases)
            logger.error(
                "every thread is in a call that does not end seconds=%.0f events=%s queue=%s",
                seconds,
                events,
                self._gate.name,
            )
        self._was_stuck = seconds > 0
        if self.has_too_many_hung_threads and not self._had_too_many_hung_threads:
            logger.error(
                "as many threads hang as the worker has, past the timeouts of their listeners; "
                "only a new process helps threads=%d queue=%s",
                self._hanging(),
                self._gate.name,
            )
        self._had_too_many_hung_threads = self.has_too_many_hung_threads

    def _hanging(self) -> int:
        return sum(each.is_alive() for each in self._abandoned)

    def _stuck(self) -> tuple[float, list[Lease]]:
        """Return how long (seconds) every thread has been in one call, and the leases of the calls.

        Return 0.0 and no leases if that is not longer than ``STUCK_AFTER``.
        """
        leases = [seat.lease for seat in self._seats]
        calls = [each for each in leases if each is not None and each.called_at]
        latest = max((each.called_at for each in calls), default=0.0)
        seconds = monotonic() - latest
        if len(calls) < len(leases) or not latest or seconds <= self._stuck_after:
            return 0.0, []
        return seconds, calls

    def _is_busy(self) -> bool:
        with self._held.lock:
            return any(each.is_taken for each in self._seats)

    # -- the threads -----------------------------------------------------------------------------

    def _run(self, seat: Seat) -> None:
        cleanup = ConnectionCleanup(self._held.lease, self._sessions)

        def between(lease: Lease) -> bool:
            cleanup.after(lease)
            return self._held.is_current(lease) and not self.stopping

        try:
            if seat.inherited is not None:
                self._finish(seat, seat.inherited, cleanup, between)
                self._batches.fall_back(seat, cleanup, between)
            self._work(seat, cleanup, between)
        except CallAbandoned:  # another thread now has the lease and all that is shared
            assert seat.lease is not None
            cleanup.close_half_made()
            cleanup.after(seat.lease)
        cleanup.close()

    def _work(self, seat: Seat, cleanup: ConnectionCleanup, between: Between) -> None:
        ahead = 0.0
        follower: Lease | None = None  # the next event of the stream just delivered
        while not self.stopping:
            lease = follower or self._ready.take(IDLE_WAIT)
            follower = None
            self._gate.made_room()
            if lease is None:
                continue
            if isinstance(lease, Lane):
                ahead += self._batches.deliver(seat, lease, cleanup, between)
                if ahead > RUN_AHEAD:
                    self._batches.wait_settled(seat)
                    ahead = 0.0
            elif is_async(lease):
                self._to_loop(lease)
            elif self._may_start(lease):
                decision = self._deliver(seat, lease, cleanup, between)
                follower = self._runs.next(lease, decision)
                self._settle(lease, decision, cleanup)
                if follower is not None and batch_listener(follower) is not None:
                    self._gate.ready.put(follower)
                    follower = None
                ahead += 0.0 if decision.written else lease.duration
                if ahead > RUN_AHEAD:
                    self._held.wait_settled([lease], self._is_stopping)
                    ahead = 0.0

    def _finish(
        self, seat: Seat, timed: TimedCall, cleanup: ConnectionCleanup, between: Between
    ) -> None:
        """Finish what an abandoned thread delivered: its call has failed."""
        if isinstance(timed.call, BatchCall):
            self._batches.finish(seat, timed, cleanup, between)
            return
        lease = seat.lease = timed.call.lease
        try:
            decision = copy_context().run(finish, timed, between=between)
        except CallAbandoned:
            raise
        except BaseException:  # noqa: BLE001 - it is logged
            log_failed(lease)
            decision = deferred_after_error()
        seat.lease = None
        self._settle(lease, decision, cleanup)
        self._held.wait_settled([lease], self._is_stopping)

    def _settle(self, lease: Lease, decision: Decision, cleanup: ConnectionCleanup) -> None:
        """Have a decision settled."""
        self._gates.settle(lease, decision)
        if decision.status is not Status.DONE:
            cleanup.close_half_made()
        cleanup.after(lease)

    def _may_start(self, lease: Lease) -> bool:
        if not self._gate.may_start(lease):
            return False  # the claimer releases it
        if self.stopping:
            return False
        while not self._held.start(lease):
            if not self._held.wait_current(lease, self._is_stopping):
                return False
        return True

    def _deliver(
        self, seat: Seat, lease: Lease, cleanup: ConnectionCleanup, between: Between
    ) -> Decision:
        try:
            cleanup.before()
            seat.lease = lease
            # In a separate context, so that a language, a time zone or any other context variable
            # that a listener sets is gone afterwards.
            decision = copy_context().run(
                deliver,
                lease,
                alias=self._alias,
                between=between,
                pauses=self._gate.pauses,
                report=self._gate.report,
            )
        except CallAbandoned:
            raise
        except BaseException:  # noqa: BLE001 - whatever it is, the thread must go on
            log_failed(lease)
            decision = deferred_after_error()
        seat.lease = None
        return decision
