"""The threads of a queue: each takes an event or a batch, delivers it and passes decisions on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from ..clocks import monotonic
from ..delivery.call import Call, CallAbandoned
from ..delivery.delivery import Delivery
from ..delivery.drivers import drive
from ..delivery.lease import Lease
from ..delivery.route import is_async
from ..listeners.outcomes import DONE
from .connection_cleanup import BrokenSessions, ConnectionCleanup
from .deliveries import Deliveries
from .gate import Gate
from .ready import Item, Lane, popped
from .settler import log_failed
from .threads import thread_name

logger = logging.getLogger("django_outbox")

# Seconds of listener time that a thread may be ahead of the settler. If the process dies, that much
# is repeated, or one event per thread; without a limit, all that a group commit had gathered.
RUN_AHEAD = 0.0005
AT_ONCE = 16  # events that a thread takes at once from a backlog, at most: each costs less then
# Seconds; behind a longer call no event waits for the same thread, and it counts as this long: one
# that had to wait for the interpreter says nothing about the others.
SLOW_CALL = 0.001
FIRST_CALL = RUN_AHEAD / 2  # seconds that a listener is taken to need before its first call
IDLE_WAIT = 1.0  # seconds after which an idle thread checks whether it should end


class Seat:
    """A place among the threads of a queue: a thread, and what it delivers."""

    def __init__(self, executor: Executor, name: str) -> None:
        self._executor, self._deliveries = executor, executor.deliveries
        self._held, self._gate = executor.deliveries.held, executor.gate
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Only the thread sets these.
        self.delivery: Delivery  # the last one
        self.call: Call | None = None  # that it is in
        self._cleanup: ConnectionCleanup
        self._followers: list[Lease] = []  # events behind those delivered, which may run next
        self._ahead = 0.0  # seconds of listener time that are not known to be settled
        # What it has taken and not begun: events that count as started, and what comes behind them.
        # The watchdog takes from them, too; their methods are atomic.
        self._started: deque[Lease] = deque()
        self._next_up: deque[Item] = deque()

    def _run(self) -> None:
        self._cleanup = ConnectionCleanup(self._held.lease, self._executor.sessions)
        try:
            while not self._executor.stopping:
                found = self._next()
                self._gate.made_room()
                if found is not None:
                    self._work(found)
                while self._followers and not self._executor.stopping:
                    self._work(self._followers.pop())
        except CallAbandoned:
            self._cleanup.close_half_made()
            self._cleanup.after(self.delivery.lead)
        self.give_back()
        self._cleanup.close()

    def _next(self) -> Item | None:
        found = popped(self._next_up)
        return self._gate.ready.take(IDLE_WAIT) if found is None else found

    def _work(self, found: Item) -> None:
        executor, deliveries = self._executor, self._deliveries
        if isinstance(found, Delivery):  # another thread has left its fallbacks
            left, stops = found.left.values(), executor.is_stopping
            if all(self._held.wait_current(each, stops) for each in left):
                self._deliver(found)
            else:
                found.leave()
            return
        if found.listener.is_awaited if isinstance(found, Lane) else is_async(found):
            executor.to_loop(found)
            return
        if isinstance(found, Lane):
            if leases := deliveries.start(deliveries.take(found), executor.is_stopping):
                self._deliver(deliveries.of(leases))
                self._pass_time(leases)
            return
        leases, then = [found], None
        if (most := executor.at_once(found)) > 1:
            others, then = self._gate.ready.take_alike(found, most - 1)
            leases += others
        self._deliver_each(deliveries.start(leases, executor.is_stopping), then)

    def _deliver_each(self, started: list[Lease], then: Item | None) -> None:
        """Deliver events of one listener one by one; ``then`` comes next, here or elsewhere."""
        self._started.extend(started)
        if then is not None:
            self._next_up.append(then)
        seconds, delivered = 0.0, 0
        while (lease := popped(self._started)) is not None:  # the watchdog may give back the rest
            if delivered and not self._may_go_on(lease):
                self._started.appendleft(lease)
                self.give_back()
                break
            self._deliver(self._deliveries.of([lease]))
            self._pass_time([lease])
            seconds += min(lease.duration, SLOW_CALL)
            delivered += 1
        if delivered:
            self._executor.note(started[0].listener, seconds / delivered)

    def _may_go_on(self, lease: Lease) -> bool:
        """Return whether an event that was started with another may be delivered still."""
        if self._executor.stopping or self._gate.closed:
            return False
        return lease in lease.run.out and monotonic() < lease.run.deadline

    def give_back(self) -> None:
        """Queue what it has taken and not begun, unstarted; called by the watchdog, too."""
        while (lease := popped(self._started)) is not None:
            lease.started_at = 0.0
            self._gate.ready.add(lease)
        if (found := popped(self._next_up)) is not None:
            self._gate.ready.add(found)

    def _pass_time(self, leases: list[Lease]) -> None:
        if self._followers:
            self._deliveries.put_all_but_one(self._followers)
        if self._ahead > RUN_AHEAD:
            self._held.wait_settled(leases, self._executor.is_stopping)
            self._ahead = 0.0

    def _deliver(self, delivery: Delivery) -> None:
        self.delivery = delivery
        try:
            self._cleanup.before()
            delivery.context.run(drive, delivery.steps(), self)
        except CallAbandoned:
            raise
        except BaseException:  # noqa: BLE001 - whatever it is, the thread must go on
            log_failed(delivery.lead)
            self.call = None
            self._deliveries.end(delivery)
        self._cleanup.after(delivery.lead)

    def make(self, call: Call) -> object:
        """Make a call."""
        self.call = call
        answer = call.make()
        self.call = None
        return answer

    def tidy(self) -> bool:
        """Clean up after a call; return whether more may be called."""
        self._cleanup.after(self.delivery.lead)
        return self._held.is_current(self.delivery.lead) and not self._executor.stopping

    def pass_on(self) -> None:
        """Have what was decided settled."""
        for lease, decision in self.delivery.decided:
            if decision is not DONE:
                self._cleanup.close_half_made()
            if not decision.written:
                self._ahead += lease.duration
        self._followers += self._deliveries.pass_on(self.delivery)


class Executor:
    """The ``WORKERS`` threads of one queue, which deliver what is ready; replaced if they hang.

    A thread whose call exceeds its timeout is written off: the call has failed, another thread
    takes its place, and it ends when the call returns. It is not interrupted: asynchronous
    exceptions leave locks held.
    """

    def __init__(
        self,
        *,
        gate: Gate,
        deliveries: Deliveries,
        stuck_after: float,
        sessions: BrokenSessions,
        to_loop: Callable[[Lease | Lane], None],
    ) -> None:
        """``to_loop`` has the event loop deliver an event, or the next batch of a lane."""
        self.gate, self.deliveries = gate, deliveries
        self.sessions, self.to_loop = sessions, to_loop
        self._held, self._stuck_after = deliveries.held, stuck_after  # seconds
        self.stopping = False  # set by ``stop``
        self._means: dict[str | None, float] = {}  # seconds of a call, by the listener's title
        self._seats = [
            Seat(self, thread_name(deliveries.alias, gate.name, f"worker-{number}"))
            for number in range(gate.settings.WORKERS)
        ]
        # Only the watchdog's thread changes these: what hangs, what replaces it, what was logged.
        self._abandoned: list[threading.Thread] = []
        self._to_start: list[threading.Thread] = []
        self._is_deciding = False  # in place of a thread that hangs
        self._was_stuck = self._had_too_many_hung_threads = False

    def start(self) -> None:
        for seat in self._seats:
            seat.thread.start()

    def stop(self) -> None:
        """Stop the threads from starting another event; may be called again."""
        self.stopping = True
        self.gate.ready.wake(len(self._seats))

    def at_once(self, lease: Lease) -> int:
        """Return how many events of a listener a thread may take at once: fewer if it is slow.

        Others are left for the other threads.
        """
        mean = self._means.get(lease.listener, FIRST_CALL)
        return min(int(RUN_AHEAD / mean), AT_ONCE, len(self.gate.ready) // len(self._seats))

    def note(self, title: str | None, seconds: float) -> None:
        """Note how long a call of a listener took."""
        mean = self._means.get(title, FIRST_CALL)
        self._means[title] = max(mean + (seconds - mean) / 8, 1e-6)

    def is_stopping(self) -> bool:
        """Return whether no other event may be started."""
        return self.stopping

    def join(self, give_up: Callable[[], bool]) -> bool:
        """Wait for running listeners, except abandoned ones; return whether all ended."""
        while self._is_busy() and not give_up():
            time.sleep(0.005)
        self.gate.ready.take_all()
        return not self._is_busy()

    def _is_busy(self) -> bool:
        with self._held.lock:
            return self._is_deciding or any(each.thread.is_alive() for each in self._seats)

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
            call = seat.call
            if call is not None and 0.0 < call.started < now - SLOW_CALL:
                seat.give_back()
            if call is not None and now > call.ends_at:
                self._write_off(number, seat, call)
        self._abandoned = [each for each in self._abandoned if each.is_alive()]
        self._report()
        while self._to_start:
            self._to_start[0].start()  # if that fails, it is tried again
            del self._to_start[0]

    def _write_off(self, number: int, seat: Seat, call: Call) -> None:
        """Have another thread in place of one whose call hangs, and decide that it has failed."""
        with self._held.lock:
            if not call.end():  # it has returned in the meantime
                return
            self._abandoned, self._is_deciding = [*self._abandoned, seat.thread], True
            self._seats[number] = successor = Seat(self, seat.thread.name)
        delivery = seat.delivery
        try:
            delivery.context = delivery.context.copy()  # the policy may read what the listener set
            delivery.context.run(delivery.give_up, call)
            self.deliveries.put(self.deliveries.pass_on(delivery))
        except BaseException:  # noqa: BLE001 - the watchdog must go on
            log_failed(delivery.lead)
            self.deliveries.end(delivery)
        if delivery.left:
            self.gate.ready.add(delivery)
        self._is_deciding = False
        self._to_start.append(successor.thread)

    def _report(self) -> None:
        seconds, calls = self._stuck()
        if seconds and not self._was_stuck:
            leads = [each.leases[0] for each in calls]
            logger.error(
                "every thread is in a call that does not end seconds=%.0f events=%s queue=%s",
                seconds,
                ", ".join(f"{each.event_id} ({each.event_type})" for each in leads),
                self.gate.name,
            )
        self._was_stuck = seconds > 0
        if self.has_too_many_hung_threads and not self._had_too_many_hung_threads:
            logger.error(
                "as many threads hang as the worker has, past the timeouts of their listeners; "
                "only a new process helps threads=%d queue=%s",
                self._hanging(),
                self.gate.name,
            )
        self._had_too_many_hung_threads = self.has_too_many_hung_threads

    def _hanging(self) -> int:
        return sum(each.is_alive() for each in self._abandoned)

    def _stuck(self) -> tuple[float, list[Call]]:
        """Return how long (seconds) every thread has been in one call, and the calls.

        Return 0.0 and no calls if that is not longer than ``STUCK_AFTER``.
        """
        found = [seat.call for seat in self._seats]
        calls = [each for each in found if each is not None and each.started]
        latest = max((each.started for each in calls), default=0.0)
        seconds = monotonic() - latest
        if len(calls) < len(found) or not latest or seconds <= self._stuck_after:
            return 0.0, []
        return seconds, calls
