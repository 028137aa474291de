"""The oracle: what was intended, what the witness saw, what broke, what the table says.

A start is legal when it is the first of its event, when the table had counted a failure since (the
listener is told more attempts), or when the run before it was deferred; and when none before it
has ended well. Every other start is a repeat, and must be explained by a fault that struck the
processes of the runs that should have been the last, by a stop that handed the event back, or by
its call having been written off, after which the listener may still have done something.

All of this holds for each listener of an event by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from tests.faults import slots, stored
from tests.faults.witness import Line

WAKING = 1.0  # seconds in which a thread that goes on is past the look at its lease
LEFT = 2 / 3  # of a lease, at least, whenever a server goes away: it is renewed each third
# Seconds in which PostgreSQL flushes a claim, which does not wait for that: a crash may lose it.
UNFLUSHED = 1.0
WATCHED = 1.0  # seconds from the moment in which a call is written off to the line that says so

HAND_BACK, WRITE_OFF = "hand-back", "write-off"  # of one event; the log says them
GIVEN_UP = (HAND_BACK, WRITE_OFF)
STOPPED = ("pause", "suspend")  # all threads of a process, for a while
# After which leases may be found left behind.
CRASHES = ("kill", "crash", "terminate", "take over", *STOPPED)
UNCOUNTED = ("deferred", "shared")  # outcomes after which the next run has seen no more attempts
ATOMIC = ("booked", "charged", "ledger")  # kinds whose listener leaves a booking
WORN_OUT = ("raises", "sifted.bad")  # kinds whose events die of all attempts that they have


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    event_id: str
    kind: str
    key: str | None
    writer: int
    n: int
    at: float
    due: float = 0.0  # monotonic; 0: at once
    begun: float = 0.0  # monotonic, before the write; only of delayed ones
    cancelled: int = 0  # deliveries; each cancel said how many


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An event as the table has it at the end."""

    event_id: str
    status: int
    attempts: int
    key: str | None
    seq: int | None
    leased: bool
    rescues: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: str
    at: float  # monotonic
    until: float
    pids: frozenset[int] = frozenset()  # the processes that it struck
    held: frozenset[str] | None = None  # events and keys that they had leased; None: not known
    listener: str = ""  # the title of the one that was given up, with one event


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """A worker found an event leased by one that it took for lost."""

    event_id: str
    at: float  # monotonic
    listener: str = ""  # its title; each listener of an event is rescued for itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """What people asked of events; it touches those that are dead, or are given up by it."""

    what: str  # "replay", "discard", "skip"
    ids: Collection[str]
    at: float  # monotonic
    until: float


@dataclass(kw_only=True)
class Delivery:
    """The calls in which a thread delivered one batch; they are settled when the last has ended."""

    ids: set[str] = field(default_factory=set)
    until: float = 0.0  # monotonic; when it last said something


@dataclass(kw_only=True)
class Run:
    """One execution of a listener, as the witness saw it."""

    id: str
    attempts: int
    pid: int
    start: float
    end: float | None = None
    # "end", "failed", "deferred"; "shared": it failed with others, and is called again uncounted,
    # or counted once; empty: never seen to end
    outcome: str = ""
    silent_since: float = 0.0  # monotonic; when its thread had said something before
    listener: str = ""  # its title
    delivery: Delivery | None = field(default=None, repr=False)  # of a batch


@dataclass(kw_only=True)
class Verdict:
    """What is counted; all but the first group must be zero."""

    events: int = 0
    runs: int = 0
    repeats: int = 0
    dead: int = 0

    lost: int = 0  # intended, committed, and no effect
    ghosts: int = 0  # effects or rows of what never committed
    done_without_effect: int = 0
    unexplained: int = 0  # repeats that no fault explains
    overlaps: int = 0  # two runs of a listener with one event at a time, neither process struck
    inversions: int = 0
    stuck: int = 0  # neither finished nor given up, though all was quiet
    false_dead: int = 0
    booked_twice: int = 0
    foreign: int = 0  # lines of processes that are not of this run
    false_attempts: int = 0  # counted though no execution failed
    false_rescues: int = 0  # counted though no worker was lost with the event

    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    VIOLATIONS = (
        "lost",
        "ghosts",
        "done_without_effect",
        "unexplained",
        "overlaps",
        "inversions",
        "stuck",
        "false_dead",
        "booked_twice",
        "foreign",
        "false_attempts",
        "false_rescues",
    )

    def count(self, what: str, example: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        if len(self.examples[what]) < 5:
            self.examples[what].append(example)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    intents: Mapping[str, Intent]
    rows: Mapping[str, Row]
    lines: Sequence[Line]
    faults: Sequence[Fault]
    pids: Collection[int]  # that were started by this run
    bookings: Mapping[str, int]  # how many of each event
    lease: float
    mortal: Collection[str] = ()  # kinds whose events end dead
    purged: bool = False  # finished rows were deleted on the way
    attempts: int = 10  # executions after which an event of these is dead
    deeds: Sequence[Deed] = ()
    rescues: Sequence[Rescue] = ()
    listeners: Mapping[str, Collection[str]] = field(default_factory=dict)  # titles, by kind
    # Titles by kind, too: listeners that may get an event after later ones of its key.
    unordered: Mapping[str, Collection[str]] = field(default_factory=dict)
    relayed: Collection[str] = ()  # kinds whose events a relay sends to a broker
    # Ids of what the broker holds in the end, in its order; None: nobody could read it.
    stored: Sequence[str] | None = None

    def done_to(self, what: str) -> dict[str, list[Deed]]:
        """Return what of a kind was asked, by event."""
        found: defaultdict[str, list[Deed]] = defaultdict(list)
        for deed in self.deeds:
            for event_id in deed.ids if deed.what == what else ():
                found[event_id].append(deed)
        return found

    def listeners_of(self, intent: Intent) -> int:
        return len(self.listeners.get(intent.kind, ("",)))

    def ended(self, event_id: str, runs: Sequence[Run]) -> float | None:
        """Return when the last of an event's listeners had ended well; None: one has not."""
        ends: dict[str, float] = {}
        for run in runs:
            if run.outcome == "end" and run.end is not None:
                ends[run.listener] = min(run.end, ends.get(run.listener, run.end))
        intent = self.intents.get(event_id)
        wanted = self.listeners.get(intent.kind, ()) if intent else ()
        return max(ends.values(), default=None) if ends.keys() >= {*wanted} else None

    def ended_in(self, lane: str, event_id: str, runs: Sequence[Run]) -> float:
        """Return when an event had ended well in a lane; inf: it has not.

        An event without a listener in the lane holds up nothing there. What has one listener has
        one without a name.
        """
        kind = intent.kind if (intent := self.intents.get(event_id)) else ""
        wanted = {*self.listeners.get(kind, ("",))} - {*self.unordered.get(kind, ())}
        if not any(lane_of(title) == lane for title in wanted):
            return 0.0
        ends = [
            run.end
            for run in runs
            if lane_of(run.listener) == lane and run.outcome == "end" and run.end is not None
        ]
        return min(ends, default=float("inf"))


def by_listener(runs: Iterable[Run]) -> list[list[Run]]:
    """Return the runs of each listener of an event."""
    found: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.listener].append(run)
    return [*found.values()]


def judge(evidence: Evidence) -> Verdict:
    verdict = Verdict(events=len(evidence.intents))
    runs = executions(evidence, verdict)
    verdict.runs = sum(map(len, runs.values()))
    _judge_events(evidence, runs, verdict)
    _judge_repeats(evidence, runs, verdict)
    _judge_order(evidence, runs, verdict)
    _judge_attempts(evidence, runs, verdict)
    _judge_rescues(evidence, runs, verdict)
    stored.judge(evidence, verdict)
    slots.judge(evidence, runs, verdict)
    return verdict


def executions(evidence: Evidence, verdict: Verdict) -> dict[str, list[Run]]:
    """Put the lines together: an end belongs to the last start of its thread."""
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    running: dict[tuple[int, int, str], Run] = {}
    said: dict[tuple[int, int], float] = {}  # by process and thread
    silent: dict[tuple[int, int, float], float] = {}  # as above, and when a batch's call began
    deliveries: defaultdict[tuple[int, int], Delivery] = defaultdict(Delivery)  # the latest
    for line in evidence.lines:
        if line.pid not in evidence.pids:
            verdict.count("foreign", f"pid {line.pid}")
        place = (line.pid, line.thread, line.id)
        if line.phase == "start":
            run = Run(
                id=line.id,
                attempts=line.attempts,
                pid=line.pid,
                start=line.at,
                silent_since=said.get(place[:2], 0.0),
                listener=line.listener,
            )
            if line.since:
                call, delivery = (*place[:2], line.since), deliveries[place[:2]]
                if call not in silent and line.id not in delivery.ids:  # no part of the one before
                    delivery = deliveries[place[:2]] = Delivery()
                delivery.ids.add(line.id)
                run.delivery = delivery
                # What other events of the same call have said does not count.
                run.silent_since = silent.setdefault(call, min(run.silent_since, line.since))
            runs[line.id].append(run)
            running[place] = run
        elif run := running.pop(place, None):
            run.end, run.outcome = line.at, line.phase
            if run.delivery is not None:
                run.delivery.until = line.at
        said[place[:2]] = line.at
    for each in runs.values():
        each.sort(key=lambda run: run.start)
    return runs


def _judge_events(evidence: Evidence, runs: Mapping[str, Sequence[Run]], verdict: Verdict) -> None:
    discarded = evidence.done_to("discard")
    arrived = None if evidence.stored is None else {*evidence.stored}
    _judge_ghosts(evidence, runs, verdict)
    for event_id, intent in evidence.intents.items():
        row = evidence.rows.get(event_id)
        effect = _has_effect(evidence, intent, runs.get(event_id, ()), arrived)
        if (bookings := evidence.bookings.get(event_id, 0)) > 1:
            verdict.count("booked_twice", f"{event_id} {bookings} times")
        if row is None:
            purged = effect and (evidence.purged or intent.cancelled)
            if not purged and (effect or event_id not in discarded):
                verdict.count("lost", f"{event_id} has no row")
        elif row.status == 3:
            verdict.dead += 1
            _judge_death(evidence, intent, row, runs.get(event_id, ()), verdict)
        elif row.status != 1 or row.leased:
            verdict.count("stuck", f"{event_id} {row}")
        elif not effect:
            verdict.count("lost", f"{event_id} {intent.kind}")
            verdict.count("done_without_effect", f"{event_id} {intent.kind}")


def _has_effect(
    evidence: Evidence, intent: Intent, runs: Sequence[Run], arrived: Collection[str] | None
) -> bool:
    """Say whether an event did what it should; one of a slot may leave that to a newer one."""
    if intent.kind in evidence.relayed:
        return arrived is None or intent.event_id in arrived
    if intent.kind in ATOMIC and not evidence.bookings.get(intent.event_id, 0):
        return False
    if intent.cancelled:
        ended = {run.listener for run in runs if run.outcome == "end"}
        return intent.cancelled + len(ended) >= evidence.listeners_of(intent)
    return intent.kind == slots.KIND or evidence.ended(intent.event_id, runs) is not None


def _judge_ghosts(evidence: Evidence, runs: Mapping[str, Sequence[Run]], verdict: Verdict) -> None:
    """There may be nothing of what was undone or cancelled, and no booking of what has failed."""
    for event_id in {*runs, *evidence.rows, *evidence.bookings} - {*evidence.intents}:
        verdict.count("ghosts", event_id)
    for event_id, intent in evidence.intents.items():
        if intent.cancelled:
            _judge_cancelled(evidence, intent, runs.get(event_id, ()), verdict)
    for event_id in evidence.bookings:
        row = evidence.rows.get(event_id)
        if row is not None and row.status == 3:
            verdict.count("ghosts", f"{event_id} is dead, and has left a booking")


def _judge_cancelled(
    evidence: Evidence, intent: Intent, runs: Sequence[Run], verdict: Verdict
) -> None:
    """What was cancelled must not have begun.

    But a process that was stopped on the way into a listener begins it when it goes on, without a
    lease. Another may have leased and released the event meanwhile, so that it could be cancelled.
    """
    struck = Struck(evidence.faults, evidence.lease)
    begun = {run.listener for run in runs if not struck.woke(run)}
    if intent.cancelled + len(begun) > evidence.listeners_of(intent):
        verdict.count("ghosts", f"{intent.event_id}: {intent.cancelled} cancelled, {begun} begun")


def _judge_death(
    evidence: Evidence, intent: Intent, row: Row, runs: Sequence[Run], verdict: Verdict
) -> None:
    if intent.kind not in evidence.mortal:
        verdict.count("false_dead", f"{intent.event_id} {intent.kind} attempts={row.attempts}")
    elif intent.kind in WORN_OUT and (row.attempts, len({run.attempts for run in runs})) != (
        evidence.attempts,
        evidence.attempts,
    ):
        verdict.count("false_dead", f"{intent.event_id} runs={len(runs)} attempts={row.attempts}")


def _judge_repeats(evidence: Evidence, runs: Mapping[str, Sequence[Run]], verdict: Verdict) -> None:
    struck, replays = Struck(evidence.faults, evidence.lease), evidence.done_to("replay")
    calls = _calls(runs)
    for event_id, each in runs.items():
        for own in by_listener(each):
            for before, after in pairwise(own):
                if after.start < struck.end_of(before) and not struck.during(before, after):
                    verdict.count("overlaps", f"{event_id} {before} {after}")
            for number in range(1, len(own)):
                before, after = own[number - 1], own[number]
                should = _should_have_been_last(own[:number], after, evidence)
                if before.outcome == "failed" and any(
                    before.start <= deed.until and deed.at <= after.start
                    for deed in replays[event_id]
                ):
                    should = [run for run in should if run is not before]
                verdict.repeats += bool(should)
                if _without_the_lost(before, after, evidence, calls):
                    continue
                if not all(struck.explains(run, after) for run in should):
                    verdict.count("unexplained", f"{event_id} {before} {after}")


def _calls(runs: Mapping[str, Sequence[Run]]) -> Mapping[tuple[int, float], set[str]]:
    """Return the events of each call of a batch listener, by process and when the call began."""
    found: defaultdict[tuple[int, float], set[str]] = defaultdict(set)
    for event_id, each in runs.items():
        for run in each:
            found[run.pid, run.silent_since].add(event_id)
    return found


def _without_the_lost(
    before: Run, after: Run, evidence: Evidence, calls: Mapping[tuple[int, float], set[str]]
) -> bool:
    """Say whether an atomic batch that lost events was undone and called again without them.

    The events that it lost were another process's fault; what it left is compared by itself.
    """
    intent = evidence.intents.get(after.id)
    if intent is None or intent.kind != "ledger" or before.pid != after.pid:
        return False
    return calls[after.pid, after.silent_since] < calls[before.pid, before.silent_since]


def _should_have_been_last(earlier: Sequence[Run], after: Run, evidence: Evidence) -> list[Run]:
    """Return the runs after which there should have been none.

    What an atomic listener did may be undone after its last line, when the database refuses to
    commit it; then it has failed.
    """
    intent, last = evidence.intents.get(after.id), earlier[-1]
    atomic = intent is not None and intent.kind in ATOMIC
    found = [] if atomic else [run for run in earlier if run.outcome == "end"]
    if after.attempts <= last.attempts and last.outcome not in UNCOUNTED and last not in found:
        found.append(last)
    return found


class Struck:
    """The faults by the process that they struck, and those that struck all."""

    def __init__(self, faults: Iterable[Fault], lease: float) -> None:
        self._lease = lease
        self._by_pid: defaultdict[int, list[Fault]] = defaultdict(list)
        self._outages = [  # in which leases can end, whoever has them
            fault
            for fault in faults
            if fault.kind.startswith("restart") and fault.until - fault.at >= LEFT * lease
        ]
        self._crashes = [fault for fault in faults if fault.kind == "restart immediate"]
        for fault in faults:
            for pid in fault.pids:
                self._by_pid[pid].append(fault)

    def explains(self, before: Run, after: Run) -> bool:
        """Say whether a fault can have kept the first run from being settled.

        So it can if either began without a lease: stopped for longer than that on the way.
        """
        last = after.start if before.end is None else before.end  # it may have gone on till then
        if before.delivery is not None:
            last = max(last, before.delivery.until)
        return (
            self.woke(before)
            or self.woke(after)
            or any(
                fault.until >= before.start and fault.at <= min(last + self._lease, after.start)
                for fault in (*self._of(before), *self._outages)
            )
            or any(  # its claim was not on disk yet
                before.start <= fault.until
                and fault.at <= min(before.start + UNFLUSHED, after.start)
                for fault in self._crashes
            )
            or self._was_handed_back(before, after)
            or self._spoke_late(before, after)
        )

    def _of(self, run: Run) -> list[Fault]:
        """Return what struck its process as a whole."""
        return [each for each in self._by_pid[run.pid] if each.kind not in GIVEN_UP]

    def given_up(self, run: Run, kind: str) -> Fault | None:
        """Return when it was handed back, or written off; None if it was not."""
        found = [
            each
            for each in self._by_pid[run.pid]
            if each.kind == kind
            and run.id in (each.held or ())
            and each.listener in ("", run.listener)
            and each.at >= run.start
        ]
        return min(found, key=lambda each: each.at, default=None)

    def _was_handed_back(self, before: Run, after: Run) -> bool:
        """Say whether it still ran, or was not settled yet, when its worker was stopped."""
        fault = self.given_up(before, HAND_BACK)
        last = after.start if before.end is None else before.end + self._lease
        return fault is not None and fault.at <= min(last, after.start)

    def _spoke_late(self, before: Run, after: Run) -> bool:
        """Say whether what it did came beside its retry: its thread was written off before."""
        fault = self.given_up(before, WRITE_OFF)
        if fault is None or before.end is None or after.attempts <= before.attempts:
            return False
        return before.end > fault.at - WATCHED and fault.at <= after.start

    def woke(self, run: Run) -> bool:
        """Say whether its thread was stopped on the way into this run: the first after that.

        It may have said something until the stop reached it, but nothing while it was stopped.
        """
        return any(
            fault.kind in STOPPED
            and run.silent_since < fault.until <= run.start
            and run.start - fault.until < WAKING
            for fault in self._by_pid[run.pid]
        )

    def end_of(self, run: Run) -> float:
        """When it ended, or others could begin: it was written off, or its process was gone."""
        ends = [float("inf") if run.end is None else run.end]
        if written_off := self.given_up(run, WRITE_OFF):
            ends.append(written_off.at)
        if handed_back := self.given_up(run, HAND_BACK):
            ends.append(handed_back.until)
        if run.end is None:
            ends += [each.at for each in self._of(run) if each.at >= run.start]
        return min(ends)

    def during(self, before: Run, after: Run) -> bool:
        """Say whether a fault struck one of them, or let it begin without a lease."""
        return (
            self.woke(before)
            or self.woke(after)
            or any(
                fault.until >= run.start and fault.at <= (run.end or float("inf"))
                for run in (before, after)
                for fault in self._of(run)
            )
        )


def _judge_attempts(
    evidence: Evidence, runs: Mapping[str, Sequence[Run]], verdict: Verdict
) -> None:
    """One failure, or one timeout, counts one attempt; a stop or a crash counts none."""
    struck = Struck(evidence.faults, evidence.lease)
    for event_id, each in runs.items():
        intent, row = evidence.intents.get(event_id), evidence.rows.get(event_id)
        atomic = intent is not None and intent.kind in ATOMIC  # its commit may be refused
        early, most = [], 0
        for own in by_listener(each):
            spent = _failures(own, struck, atomic=atomic)
            most = max(most, spent[-1])
            early += [
                f"{run}, {before} failed before"
                for run, before in zip(own, spent, strict=False)
                if run.attempts > before
            ]
        if early:
            verdict.count("false_attempts", f"{event_id} {early[0]}")
        elif row is not None and row.attempts > most:
            verdict.count("false_attempts", f"{event_id} {row}, {most} failed")


def _failures(runs: Sequence[Run], struck: Struck, *, atomic: bool) -> list[int]:
    """Return how many of one listener's runs had failed before each, and in the end."""
    failed = (
        run.outcome in ("failed", "shared")
        or (atomic and run.outcome == "end")
        or struck.given_up(run, WRITE_OFF) is not None
        for run in runs
    )
    return [*accumulate(failed, initial=0)]


def _judge_rescues(evidence: Evidence, runs: Mapping[str, Sequence[Run]], verdict: Verdict) -> None:
    """An event is rescued, and counted as such, once for each worker that was lost with it."""
    crashes = [
        fault
        for fault in evidence.faults
        if fault.kind in CRASHES or fault.kind.startswith("restart")
    ]
    rescues: defaultdict[str, defaultdict[str, list[float]]]
    rescues = defaultdict(lambda: defaultdict(list))  # by event and listener
    for rescue in evidence.rescues:
        rescues[rescue.event_id][rescue.listener].append(rescue.at)
    pids = _pids(evidence, runs)
    for event_id in {*rescues, *(each.event_id for each in evidence.rows.values() if each.rescues)}:
        names = _names(event_id, evidence)
        lost = [
            fault
            for fault in crashes
            if fault.held is None
            or names & fault.held
            or any(fault.pids & pids[name] for name in names)
        ]
        if any(fault.held is None for fault in lost):
            continue
        # What of a key has failed is counted anew when it starts again after a crash.
        again = sum(run.outcome in ("failed", "deferred") for run in runs.get(event_id, ()))
        again *= len(names) > 1
        row = evidence.rows.get(event_id)
        if row is not None and row.rescues > len(lost):
            verdict.count("false_rescues", f"{event_id} {row}, {len(lost)} workers lost")
        for own in rescues[event_id].values():
            for number, at in enumerate(sorted(own), 1):
                if number > again + sum(fault.at <= at for fault in lost):
                    verdict.count("false_rescues", f"{event_id} rescued at {at}, time {number}")


def _names(event_id: str, evidence: Evidence) -> set[str]:
    """The event and its key: either may be leased."""
    intent = evidence.intents.get(event_id)
    return {event_id, *([intent.key] if intent and intent.key else [])}


def _pids(evidence: Evidence, runs: Mapping[str, Sequence[Run]]) -> Mapping[str, set[int]]:
    """The processes that ran each event, and something of each key."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for event_id, each in runs.items():
        for name in _names(event_id, evidence):
            found[name] |= {run.pid for run in each}
    return found


def _judge_order(evidence: Evidence, runs: Mapping[str, Sequence[Run]], verdict: Verdict) -> None:
    """Nothing of a key starts in a lane before all that was written earlier has ended there.

    A lane is what the listeners of one name see of a key; those without a name share one.
    """
    passed = {*evidence.done_to("replay"), *evidence.done_to("skip")}  # in the lane that was dead
    keys: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for row in evidence.rows.values():
        if row.key is not None and row.seq is not None and row.event_id in evidence.intents:
            keys[row.key].append((row.seq, row.event_id))
    for key, events in keys.items():
        events.sort()
        _judge_writers(key, [evidence.intents[event_id] for _, event_id in events], verdict)
        lanes = {lane_of(run.listener) for _, each in events for run in runs.get(each, ())}
        for lane in lanes or {""}:
            latest, whose = 0.0, ""  # when the last of those before has ended
            for _, event_id in events:
                own = [each for each in runs.get(event_id, ()) if lane_of(each.listener) == lane]
                if own and min(run.start for run in own) < latest:
                    pair = f"{event_id} started before {whose} ended"
                    verdict.count("inversions", f"{key}, lane {lane!r}: {pair}")
                is_well = bool(own) and all(run.outcome in ("end", "deferred") for run in own)
                if not own and evidence.intents[event_id].cancelled:
                    continue
                stood = is_well or (evidence.rows[event_id].status != 3 and event_id not in passed)
                end = evidence.ended_in(lane, event_id, runs.get(event_id, ()))
                if stood and end > latest:
                    latest, whose = end, event_id


def lane_of(title: str) -> str:
    """Return the name of a listener: its title is an event type, a space and the name."""
    return title.partition(" ")[2]


def _judge_writers(key: str, intents: Sequence[Intent], verdict: Verdict) -> None:
    """The places in a stream must agree with the order in which each writer wrote."""
    latest: dict[int, int] = {}
    for intent in intents:
        if intent.n < latest.get(intent.writer, 0):
            verdict.count("inversions", f"{key}: {intent.event_id} was written later")
        latest[intent.writer] = max(intent.n, latest.get(intent.writer, 0))


def recoveries(
    evidence: Evidence, runs: Mapping[str, Sequence[Run]]
) -> tuple[list[float], list[float]]:
    """Seconds from the end of a process to the next start of each event that it was running.

    First of those that were lost once, then of those that others were lost with, too: a second loss
    makes an event a suspect, which has to wait until it can be run alone, and one that a worker had
    in hand unstarted counts. Their time counts from the last loss, for each makes them wait until
    another lease has ended.
    """
    kills = [fault for fault in evidence.faults if fault.kind == "kill"]
    found: tuple[list[float], list[float]] = ([], [])
    for event_id, each in runs.items():
        intent = evidence.intents.get(event_id)
        lost, since = 0, intent.at if intent else each[0].start
        for before, after in pairwise(each):
            if before.end is None and any(before.pid in kill.pids for kill in kills):
                losses = _losses(event_id, before, since, after.start, kills, evidence)
                lost += len(losses)
                found[lost > 1].append(after.start - max(losses))
            since = before.end or after.start
    return found


def _losses(
    event_id: str, run: Run, since: float, until: float, kills: Sequence[Fault], evidence: Evidence
) -> list[float]:
    """When processes were killed that ran an event or had it in hand between two times."""
    names = _names(event_id, evidence)
    return [
        kill.at
        for kill in kills
        if run.pid in kill.pids or (since < kill.at < until and names & (kill.held or frozenset()))
    ]


def latencies(evidence: Evidence, runs: Mapping[str, Sequence[Run]]) -> list[float]:
    """Seconds from the commit, or the due time, to the first start, lowest first."""
    return sorted(
        each[0].start - max(evidence.intents[event_id].at, evidence.intents[event_id].due)
        for event_id, each in runs.items()
        if event_id in evidence.intents
    )


def percentile(values: Sequence[float], part: float) -> float | None:
    """Return the value below which that part of the sorted values lies."""
    if not values:
        return None
    place = bisect_right(range(len(values)), part * (len(values) - 1)) - 1
    return round(values[place], 4)


def evidence_of(verdict: Verdict) -> dict[str, Any]:
    """The numbers of a verdict, for a line of JSON."""
    return {name: value for name, value in vars(verdict).items() if name != "examples"}
