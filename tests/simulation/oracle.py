"""The oracle: judges a history by the table and by the calls of listeners, and by nothing else.

It reads the tables after each statement that changed them, and compares them with what they said
before. Of calls it is told when they begin and end. It knows nothing of the code that it judges.

**This module and ``evidence`` change only in commits of their own, before the code that they
judge.** A rule that is loosened says here why.

- ``ghost``: a listener is called with an event that the table does not have.
- ``expired``: a call begins though the table says that its worker's lease has ended. A process
  that was stopped between its check and the call cannot know that: it has ``WAKING`` seconds.
- ``taken``: a lease passes to another worker, or is ended by one, before its end.
- ``lapsed``: nothing is made to fail in this history, and yet a lease ends while its call runs.
- ``freed``: a worker gives a lease back while its own call still runs, unless it stops, or the
  call has had its timeout.
- ``twice``: a call begins although another of the same event and listener still runs or has ended
  well. Causes that excuse it: the lease of the former ended, a stop gave it back, a replay.
- ``order``: a call begins before an earlier event of its key and lane has ended, which is not in
  the same batch. What happens in another lane is no reason.
- ``idle``: an event waits that nothing will make due: behind an idle stream, or without due time.
- ``done``: a delivery is done though its listener has not ended well, and it is not coalesced.
- ``coalesced``: a delivery has ended so, and no newer one of its slot is still to be started.
- ``route``: when all is over, an event was not given to one of its listeners.
- ``lost``: an event is gone from the table without having been done.
- ``attempts``: more attempts than failed calls, or than the policy allows.
- ``innocent``: an event is dead without an answer that ended it, all of its attempts, or enough
  workers that were lost with it.
- ``poison``: an event took more workers along than ``MAX_RESCUES``.
- ``state``: a row has the columns of no state of ``docs/explanation/model.md``, or has come to its
  state in a way that the page does not have.
- ``breaker``: a circuit breaker closed without a success since it opened.
- ``parked``: something is moved to the queue of a pause that is over, or is there in the end.
- ``replays``: the log of operations counts other replays than there were, or one is never done.
- ``stuck``: when all faults are over, something does not end, or stays leased.

The scheduler adds ``spin`` (a thread that takes turns without end) and ``crash`` (one that died).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from django_outbox.listeners.registry import digest
from tests.simulation.evidence import Call, Event, Lease, Rules, Table, Tables

WAKING = 0.5  # seconds from the check of a lease to the call, in a process that was stopped there
NEW, DONE, RETRY, DEAD = range(4)
FINAL = {DONE, DEAD}
GOOD = ("done",)
# How the state of a delivery may change.
WAYS = {
    *[("", "waiting"), ("waiting", "waiting"), ("waiting", "leased"), ("ended", "waiting")],
    *[("leased", "waiting"), ("leased", "leased"), ("leased", "ended"), ("ended", "ended")],
}
FAILED = ("failed", "final")
# Rescues that claims may count without a call: later ones are counted for one event alone.
UNCALLED_RESCUES = 2


class Oracle:
    """Judges one history; ``report`` gets the name of each rule that was broken, and how."""

    def __init__(
        self,
        tables: Tables,
        rules: Rules,
        *,
        report: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._tables, self._rules, self._report, self._clock = tables, rules, report, clock
        self.table = tables.read()
        self.calls: list[Call] = []
        self._of_row: defaultdict[str, list[Call]] = defaultdict(list)
        self._of_stream: defaultdict[str, list[Call]] = defaultdict(list)
        self._stopping: set[str] = set()  # workers that were told to stop
        self._woken: dict[str, float] = {}  # by worker: when its process was last resumed
        self._ever_dead: set[str] = set()  # events that were dead once
        self._opened: dict[str, float] = {}  # by queue: when its breaker opened
        self._replays = 0  # deliveries that were final and are pending again
        self._takes: Counter[str] = Counter()  # by event and listener: workers that they killed

    # -- what the driver tells -------------------------------------------------------------------

    def stops(self, worker: str) -> None:
        self._stopping.add(worker)

    def wakes(self, worker: str) -> None:
        """Note that the process of a worker goes on after a suspension."""
        self._woken[worker] = self._clock()

    def killed(self, worker: str) -> None:
        for call in self.calls:
            if call.worker == worker and call.outcome is None:
                call.outcome, call.end = "killed", self._clock()

    def kills(self, delivery: str) -> None:
        """Note that the call of an event, named with its listener, ends its process."""
        self._takes[delivery] += 1
        if self._takes[delivery] > self._rules.max_rescues:
            self._report("poison", f"{delivery} took {self._takes[delivery]} workers along")

    def begins(self, call: Call) -> None:
        self.look("")
        call.start = self._clock()
        event = self.table.row_of(call)
        if event is None:
            self._report("ghost", f"{call}")
            return
        call.replays = event.replays
        call.queue = self._rules.queues.get(call.listener, "")
        self._judge_lease(call, event)
        self._judge_repeat(call, event)
        self._judge_order(event, call)
        self.calls.append(call)
        self._of_row[event.id].append(call)
        if event.stream is not None:
            self._of_stream[event.stream].append(call)

    def ends(self, call: Call, outcome: str) -> None:
        if call.outcome is None:
            call.outcome, call.end = outcome, self._clock()

    # -- calls -----------------------------------------------------------------------------------

    def _judge_lease(self, call: Call, event: Event) -> None:
        lease = self.table.lease_of(event)
        if lease is not None and lease.worker == call.worker and lease.until > self._tables.now():
            return
        if self._clock() - self._woken.get(call.worker, -1e9) > WAKING:
            self._report("expired", f"{call} has {lease} at {self._tables.now()}")

    def _judge_repeat(self, call: Call, event: Event) -> None:
        for former in self._of_row[event.id]:
            if former.is_excused:
                continue
            if former.is_overdue(self._clock()):
                continue  # it counts as failed, whatever it still says
            if former.outcome in GOOD and former.replays == event.replays:
                self._report("twice", f"{call} after the success of {former}")
            elif former.is_running:
                self._report("twice", f"{call} while {former} runs")

    def _judge_order(self, event: Event, call: Call) -> None:
        if event.stream is None:
            return
        for other in self.table.events.values():
            if (
                other.stream != event.stream
                or other.seq >= event.seq
                or other.id in self._ever_dead
            ):
                continue
            if other.status == RETRY and not self._rules.failure_blocks:
                continue
            is_with_it = any(each.number == call.number for each in self._of_row[other.id])
            if (
                other.status not in FINAL
                and not is_with_it
                and not self._has_ended_well(other, call.worker)
            ):
                self._report("order", f"{call} seq={event.seq} before {other}")
        if self._rules.dead_blocks:
            for other in self.table.events.values():
                if other.stream == event.stream and other.seq < event.seq and other.status == DEAD:
                    self._report("order", f"{call} seq={event.seq} behind the dead {other}")

    def _has_ended_well(self, event: Event, worker: str | None = None) -> bool:
        """Return whether a delivery has ended well, in a call of this worker."""
        return any(
            each.outcome in GOOD and worker in (None, each.worker)
            for each in self._of_row[event.id]
        )

    # -- the tables ------------------------------------------------------------------------------

    def look(self, worker: str) -> None:
        """Read the tables if they have changed, by a statement of ``worker``, and judge that."""
        if not self._tables.have_changed():
            return
        before, self.table = self.table, self._tables.read()
        for holder, lease in before.leases.items():
            if self.table.leases.get(holder) != lease:
                self._judge_handover(holder, lease, self.table.leases.get(holder), worker)
        for event_id, event in self.table.events.items():
            was = before.events.get(event_id)
            event.replays = 0 if was is None else was.replays
            if was != event:
                self._judge_change(was, event)
        for event_id, gone in before.events.items():
            is_gone = event_id not in self.table.events and gone.status not in FINAL
            if is_gone and not self._has_ended_well(gone):
                self._report("lost", f"{gone} is gone")
        self._judge_idle()
        self._judge_breakers(before)
        self._judge_parked(before.parked)

    def _judge_handover(self, holder: str, lease: Lease, now: Lease | None, by: str) -> None:
        """Judge that the lease of a row or stream has changed."""
        if now is not None and now.worker == lease.worker:
            return
        calls = [
            each
            for each in (self._of_row.get(holder) or self._of_stream.get(holder, ()))
            if each.worker == lease.worker
        ]
        ended = lease.until <= self._tables.now()
        if not ended and (now is not None or by != lease.worker):
            self._report("taken", f"{holder} {lease} became {now} by {by}")
        if ended and self._rules.is_calm and any(self._runs(each) for each in calls):
            self._report("lapsed", f"{holder} {lease} became {now} during a call")
        is_handed_back = now is None and by == lease.worker and by in self._stopping
        if not ended and not is_handed_back:
            for call in calls:
                if self._runs(call):
                    self._report("freed", f"{holder} {lease} while {call} runs")
        if now is not None or by != lease.worker or is_handed_back:
            for call in calls:
                call.is_excused = call.is_excused or not self._is_settled(call)

    def _runs(self, call: Call) -> bool:
        """Return whether a call runs that nobody has given up."""
        return call.is_running and not (call.is_excused or call.is_overdue(self._clock()))

    def _is_settled(self, call: Call) -> bool:
        """Return whether the table knows that a call has ended well."""
        event = self.table.row_of(call)
        return event is None or (event.status == DONE and event.replays == call.replays)

    def _judge_change(self, was: Event | None, event: Event) -> None:
        if event.status == DEAD:
            self._ever_dead.add(event.id)
        if was is not None and was.status in FINAL and event.status not in FINAL:
            event.replays += 1
            self._replays += 1
        is_new = was is None or was.status != event.status
        if event.status == DONE and is_new and event.is_coalesced:
            self._judge_coalesced(event)
        elif event.status == DONE and is_new and not self._has_ended_well(event):
            self._report("done", f"{event} without a success of its listener")
        self._judge_state(was, event)
        self._judge_attempts(event)
        if event.status == DEAD and is_new:
            self._judge_death(event)

    def _judge_state(self, was: Event | None, event: Event) -> None:
        """Judge a row's state: only one that is coalesced, or has a key, ends without a lease."""
        way = "" if was is None else was.state, event.state
        may_end = event.is_coalesced or event.stream is not None
        has_two_ends = way == ("ended", "ended") and was is not None and was.status != event.status
        if (way not in WAYS and not (way == ("waiting", "ended") and may_end)) or has_two_ends:
            self._report("state", f"{event} was {was}")

    def _judge_coalesced(self, event: Event) -> None:
        newer = [
            each
            for each in self.table.events.values()
            if event.slot is not None
            and (each.slot, each.status in FINAL) == (event.slot, False)
            and (each.seq, each.id) > (event.seq, event.id)
        ]
        if not any(not any(self._runs(call) for call in self._of_row[each.id]) for each in newer):
            self._report("coalesced", f"{event} for none of {newer}")

    def _judge_attempts(self, event: Event) -> None:
        failures = sum(
            each.outcome in FAILED or each.is_overdue(self._clock())
            for each in self._of_row[event.id]
        )
        if event.attempts > min(failures, self._rules.max_attempts):
            self._report("attempts", f"{event} after {failures} failed calls")

    def _judge_death(self, event: Event) -> None:
        calls = self._of_row[event.id]
        if any(each.outcome == "final" for each in calls):
            return
        lost = sum(each.outcome == "killed" or each.is_excused for each in calls)
        if event.attempts >= self._rules.max_attempts:
            return
        if lost < self._rules.max_rescues - UNCALLED_RESCUES:
            self._report("innocent", f"{event} is dead, {lost} workers were lost in its calls")

    def _judge_idle(self) -> None:
        blocked: set[str | None] = set()  # streams
        for event in sorted(self.table.events.values(), key=lambda each: each.seq):
            if event.status == DEAD and self._rules.dead_blocks:
                blocked.add(event.stream)
            if event.status in FINAL:
                continue
            if event.stream is None:
                is_idle = event.due is None
            else:
                is_idle = (
                    self.table.streams.get(event.stream) is None and event.stream not in blocked
                )
            if is_idle:
                self._report("idle", f"{event} has no due time")

    def _judge_breakers(self, before: Table) -> None:
        for queue in self.table.breakers - before.breakers:
            self._opened[queue] = self._clock()
        for queue in before.breakers - self.table.breakers:
            since = self._opened.pop(queue)
            if not any(
                each.queue == queue and each.outcome in (*GOOD, "deferred") and each.start >= since
                for each in self.calls
            ):
                self._report("breaker", f"{queue} closed without a success")

    def _judge_parked(self, before: Mapping[str, str]) -> None:
        for holder, queue in self.table.parked.items():
            if queue not in self.table.pauses and before.get(holder) != queue:
                self._report("parked", f"{holder} is in {queue}, whose pause is over")

    # -- the end ---------------------------------------------------------------------------------

    @property
    def pending(self) -> list[Event]:
        return [
            each
            for each in self.table.events.values()
            if each.status not in FINAL and not self._is_blocked(each)
        ]

    def _is_blocked(self, event: Event) -> bool:
        return self._rules.dead_blocks and any(
            each.stream == event.stream and each.seq < event.seq and each.status == DEAD
            for each in self.table.events.values()
            if event.stream is not None
        )

    def finish(self) -> None:
        """Judge the end of a history, some time after its last fault."""
        self.look("")
        for event in self.table.events.values():
            titles = self._rules.listeners.get(event.type, frozenset())
            if missing := [each for each in titles if digest(each) not in event.routes]:
                self._report("route", f"{event} was not given to {missing}")
        self._judge_parked({})
        table = self.table
        if (table.replayed, table.open_replays) != (self._replays, 0):
            counted = f"{table.replayed} counted, {table.open_replays} not worked off"
            self._report("replays", f"{self._replays} deliveries were replayed, {counted}")
        for event in self.pending:
            self._report("stuck", f"{event} {self.table.lease_of(event)}")
        if not self.pending:
            for holder, lease in self.table.leases.items():
                self._report("stuck", f"{holder} stays {lease}")
