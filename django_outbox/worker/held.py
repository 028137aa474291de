"""``Held``: all that a worker has leased, each run from its claim to its release or last settle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Any

from ..clocks import monotonic
from ..delivery.lease import Lease, Run
from ..listeners.outcomes import Decision, Status
from ..sql.values import EVENTS, Table, in_parts

AT_ONCE = 20  # leases added or removed without a pause; threads need the lock at each start
SAFE_PART = 0.8  # of a lease's length; nothing is started after it without a renewal


class Load:
    """What a worker has of one queue; guarded by ``Held``'s lock."""

    def __init__(self) -> None:
        self.held = 0  # events that are leased
        self.followers = 0  # of these, those that wait behind others of their stream
        self.payload_bytes = 0  # of all of them
        self.last_start = 0.0  # monotonic; when one was last started
        # Starts since the gate last asked, and the longest wait (seconds) before one.
        self.started, self.longest_wait = 0, -inf


class Held:
    """The runs of a worker. An event is held while it is in one of the two lists of its run."""

    def __init__(self, lease: float, *, safe_part: float = SAFE_PART) -> None:
        """``lease``: seconds, in whose ``safe_part`` events may be started."""
        self.lease, self._safe_part = lease, safe_part
        self._rows: dict[str, Run] = {}
        self._streams: dict[str, Run] = {}
        self._loads: dict[str, Load] = {}
        self._ended: set[str] | None = None  # ids of what ended as done during a claim
        self.settle_waiters = 0  # threads that wait for a settle
        self.lock = threading.RLock()  # guards all of these, and the runs
        self.changed = threading.Condition(self.lock)  # entering it takes twice as long

    def __len__(self) -> int:
        """Return how many events are held."""
        return sum(each.held for each in [*self._loads.values()])

    def load(self, queue: str) -> Load:
        """Return what is held of a queue."""
        found = self._loads.get(queue)
        return found if found is not None else self._loads.setdefault(queue, Load())

    def deadline(self, since: float) -> float:
        """Return until when a lease requested at ``since`` is certainly ours (both monotonic)."""
        return since + self._safe_part * self.lease

    def get(self, run_id: str) -> Run | None:
        """Return the run of a row or stream that is leased."""
        return self._rows.get(run_id) or self._streams.get(run_id)  # their ids differ

    def of(self, table: Table) -> list[Run]:
        """Return the runs of a table."""
        with self.lock:
            return [*self._of(table).values()]

    def _of(self, table: Table) -> dict[str, Run]:
        return self._rows if table is EVENTS else self._streams

    # -- for what leases and renews --------------------------------------------------------------

    def begin_claim(self) -> None:
        """Note from now on what ends as done, until the answer of a claim is added."""
        self._ended = set()

    def add(self, runs: Iterable[Run]) -> list[Run]:
        """Add runs; return the new ones. If we have a run already, the claim only renewed it.

        So it did if its row has ended as done since the claim began. A row that we did not own is
        new: settled and due again before its old lease was dropped, if our call does not go on.
        """
        new: list[Run] = []
        for some in in_parts([*runs], AT_ONCE):
            with self.lock:
                new += [each for each in some if self._add(each)]
        with self.changed:
            self._ended = None
            self.changed.notify_all()
        return new

    def _add(self, run: Run) -> bool:
        runs = self._rows if run.table is EVENTS else self._streams
        known = runs.get(run.id)
        if self._ended and run.renewal and run.id in self._ended:
            run.out.clear()
            return False
        if known is not None:
            if not is_new(known, run):
                known.deadline, known.locked_at = run.deadline, run.locked_at
                run.out.clear()
                return False
            self.forget(known)
        runs[run.id] = run
        for lease in run.out:
            load = self.load(lease.queue)
            load.held += 1
            load.payload_bytes += lease.payload_bytes
        return True

    def add_rows(self, leases: Iterable[Lease]) -> list[Lease]:
        """Add rows, each a run; return the leases of the new ones."""
        runs = []
        for lease in leases:
            lease.run.out.append(lease)
            runs.append(lease.run)
        return [each.out[0] for each in self.add(runs)]

    def put_back(self, run: Run) -> bool:
        """Hold a stream again, unless it was claimed anew meanwhile; return whether it is held."""
        with self.lock:
            return self._of(run.table).setdefault(run.id, run) is run

    def to_renew(self, now: float) -> list[Run]:
        """Return the runs whose leases are older than a third of their length."""
        limit = self.deadline(now) - self.lease / 3
        with self.lock:
            return [each for each in self._all() if each.deadline <= limit]

    def renewed(self, runs: Iterable[Run], deadline: float) -> None:
        with self.lock:
            for run in runs:
                run.deadline = deadline
            self.changed.notify_all()

    def lose(self, runs: Iterable[Run]) -> int:
        """Give up runs that other workers own; return how many events of them will not start here.

        Calls go on, and their settles will be refused.
        """
        with self.lock:
            lost = [each for each in runs if self._of(each.table).get(each.id) is each]
            unstarted = [lease for run in lost for lease in run.unstarted]
            for run in lost:
                run.deadline = 0.0
                if run.table is not EVENTS:
                    del self._streams[run.id]
            self.drop(unstarted)
        return len(unstarted)

    # -- for what ends ---------------------------------------------------------------------------

    def drop(self, leases: Iterable[Lease]) -> None:
        """Remove events that are released or lost; what is not held any more, is passed over."""
        with self.lock:
            for lease in leases:
                self.remove(lease)
            self.changed.notify_all()

    def remove(self, lease: Lease) -> bool:
        """Remove an event from its run, under the lock; return whether it was held.

        A row is not leased any more then, as far as this worker knows.
        """
        run, load = lease.run, self._loads[lease.queue]
        if lease in run.out:
            run.out.remove(lease)
        elif lease in run.waiting:
            run.waiting.remove(lease)
            load.followers -= 1
        else:
            return False
        load.held -= 1
        load.payload_bytes -= lease.payload_bytes
        if run.table is EVENTS and self._rows.get(run.id) is run:
            del self._rows[run.id]
        return True

    # -- the events of streams, under the lock ---------------------------------------------------

    def add_waiting(self, run: Run, leases: Sequence[Lease]) -> None:
        """Add events that were read of a stream."""
        run.waiting += leases
        for lease in leases:
            load = self.load(lease.queue)
            load.held += 1
            load.payload_bytes += lease.payload_bytes
            load.followers += 1

    def hand_out(self, run: Run) -> Lease:
        """Return the next event of a stream, which waits for a thread from now on."""
        lease = run.waiting.pop(0)
        lease.handed_out_at = monotonic()
        self._loads[lease.queue].followers -= 1
        run.out.append(lease)
        return lease

    def wait_again(self, lease: Lease) -> None:
        """Let an event that was handed out wait behind its stream's others that are out."""
        lease.started_at = 0.0
        if lease in lease.run.out:
            lease.run.out.remove(lease)
            lease.run.waiting.insert(0, lease)
            self._loads[lease.queue].followers += 1

    def forget(self, run: Run) -> None:
        """Remove a run with its events, under the lock."""
        for lease in [*run.out, *run.waiting]:
            self.remove(lease)
        if (runs := self._of(run.table)).get(run.id) is run:
            del runs[run.id]

    def settled(self, part: Iterable[tuple[Lease, Decision]]) -> None:
        """Remove rows whose decisions are settled."""
        for some in in_parts([*part], AT_ONCE):
            with self.lock:
                for lease, decision in some:
                    self.remove(lease)
                    if self._ended is not None and decision.status is Status.DONE:
                        self._ended.add(lease.id)
        with self.changed:
            self.changed.notify_all()

    # -- for the threads that call listeners -----------------------------------------------------

    def has(self, lease: Lease) -> bool:
        """Return whether this worker still has an event that was handed out."""
        return lease in lease.run.out

    def is_current(self, lease: Lease) -> bool:
        """Return whether an event may be started now."""
        return self.has(lease) and monotonic() < lease.run.deadline

    def start(self, leases: Sequence[Lease]) -> list[Lease]:
        """Start those events that are current; return them. They are not released any more.

        None starts behind one of its key that does not.
        """
        started: list[Lease] = []
        held_up: set[str] = set()  # streams
        with self.lock:
            now = monotonic()
            for lease in leases:
                if lease.stream not in held_up and self._start(lease, now):
                    started.append(lease)
                elif lease.stream is not None:
                    held_up.add(lease.stream)
        return started

    def _start(self, lease: Lease, now: float) -> bool:
        run = lease.run
        if lease.turned_away or lease not in run.out or now >= run.deadline:
            return False
        load = self._loads[lease.queue]
        lease.started_at = load.last_start = now
        wait = now - (lease.handed_out_at or lease.claimed_at)
        load.started += 1
        if wait > load.longest_wait:
            load.longest_wait = wait
        return True

    def wait_current(self, lease: Lease, give_up: Callable[[], bool]) -> bool:
        """Wait until an event is current (True), lost (False) or ``give_up()`` is true (False)."""
        with self.changed:
            while self.has(lease) and not give_up():
                if monotonic() < lease.run.deadline:
                    return True
                self.changed.wait(0.1)
        return False

    def wait_settled(self, leases: Iterable[Lease], give_up: Callable[[], bool]) -> None:
        """Wait until the events are settled or refused, or ``give_up()`` is true."""
        with self.changed:
            self.settle_waiters += 1
            for lease in leases:
                while self.has(lease) and not (lease.refused or give_up()):
                    self.changed.wait(0.1)
            self.settle_waiters -= 1

    # -- what waits and what runs ----------------------------------------------------------------

    def late(self, before: float, queue: str) -> list[Run]:
        """Return the runs that have waited for a thread of a queue since before ``before``.

        ``before`` is monotonic. A suspect is left out, unless a thread has turned it away.
        """
        with self.lock:
            return [each for each in self._all() if _is_late(each, before, queue)]

    def running(self) -> list[Lease]:
        with self.lock:
            return [one for run in self._all() for one in run.out if one.started_at]

    def _all(self) -> Iterator[Run]:
        yield from self._rows.values()
        yield from self._streams.values()


def is_new(known: Run, run: Run) -> bool:
    """Return whether a row was leased anew, and the call on the known lease does not go on.

    It goes on with a row that a worker had leased meanwhile that was lost in its turn: a second
    call would be of no use.
    """
    if run.table is not EVENTS or run.renewal:
        return False
    before, after = known.out[0], run.out[0]
    return not (after.rescued and before.started_at and after.attempts == before.attempts)


def _is_late(run: Run, before: float, queue: str) -> bool:
    if not run.out or run.out[0].queue != queue:
        return False
    head = run.out[0]
    if run.alone and not head.turned_away:
        return False
    since = head.handed_out_at or head.claimed_at
    return since < before and all(lease.is_waiting for lease in run.out)


def ids_and_leases(leased: Iterable[Run | Lease]) -> dict[str, Any]:
    """Return the ids of runs or rows, each with when it or its stream was leased."""
    return {each.id: each.locked_at for each in leased}
