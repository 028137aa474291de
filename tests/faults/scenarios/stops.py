"""Workers that come and go: deploys under listeners that outlast them, shares of a backlog."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from itertools import pairwise

import psutil

from tests.faults import clock, oracle, witness
from tests.faults.log import rescues
from tests.faults.oracle import HAND_BACK, Evidence, Run, Struck
from tests.faults.rig import Rig
from tests.faults.scenarios.registry import ALL, scenario


@scenario(*ALL)
def deploys(rig: Rig) -> None:
    """Workers are replaced again and again while listeners outlast the drain; one crashes."""
    rig.outbox["DRAIN_TIMEOUT"] = rig.pick(ci=0.5, full=1.5)
    stops = rig.pick(ci=4, full=20)
    rig.start_workers(2)
    rig.wait_until_they_run()
    long = [rig.write("long", {}), rig.write("awaited", {}), rig.write("long", {}, key="deploys")]
    for _ in range(3):
        rig.write("plain", {}, key="deploys")
    rate = rig.pick(ci=30, full=50, sqlite=30)
    rig.start_writers(
        1,
        events=rate * rig.pick(ci=10, full=120),
        rate=rate,
        keys=20,
        keyed=0.3,
        fail=0.05,
        batch=1,
    )
    strikes = ["SIGTERM"] * stops
    strikes.insert(stops // 2, "kill")
    silent, lost = 0, 0
    for number in rig.schedule(len(strikes), rig.pick(ci=(0.2, 0.5), full=(1.0, 5.0))):
        rig.wait_until_running(long)
        victim = long[number % len(long)]  # each in its turn is in the middle of it
        place = rig.place_of(victim)
        assert place is not None
        if strikes[number] == "SIGTERM":
            pid = rig.workers[place].pid
            code = rig.hand_over(place)
            silent += code != 1 or not rig.handed_back_by(pid)
        else:
            held = [each for each in long if rig.place_of(each) == place]
            rig.kill(place)
            rig.wait_until_running(long)
            lost = sum(rescued(rig, each) != 1 for each in held)
    rig.wait_until_running(long)
    rig.wait_for_writers()
    rig.heal()
    rig.settle_down()
    rig.nothing_disturbed()
    evidence = rig.evidence()
    runs = oracle.executions(evidence, oracle.Verdict())
    rig.measure("stops that did not say what they handed back", silent, most=0)
    rig.measure("events of the crash that were not rescued once", lost, most=0)
    found = restarts(evidence, runs)
    rig.measure("events handed back that were run again", len(found), least=stops)
    rig.measure("longest wait for that after the exit, s", max(found), most=2, timed=True)
    beside = neighbours(evidence, runs, ("plain",), but="deploys")
    rig.measure("95 % of the neighbours' waits, s", beside, most=1, timed=True)


def rescued(rig: Rig, event_id: str) -> int:
    return sum(each.event_id == event_id for each in rescues(rig.told()))


def restarts(evidence: Evidence, runs: dict[str, list[Run]]) -> list[float]:
    """Seconds from the end of a worker to the next start of what it had handed back."""
    struck = Struck(evidence.faults, evidence.lease)
    return [
        after.start - given.until
        for each in runs.values()
        for before, after in pairwise(each)
        if (given := struck.given_up(before, HAND_BACK)) and given.at <= after.start
    ]


def neighbours(
    evidence: Evidence, runs: dict[str, list[Run]], kinds: Collection[str], but: str = ""
) -> float | None:
    """The wait that 95 % of the events of these kinds did not exceed, but for those of a key."""
    wanted = {
        each.event_id
        for each in evidence.intents.values()
        if each.kind in kinds and each.key != (but or "-")
    }
    innocent = {event_id: each for event_id, each in runs.items() if event_id in wanted}
    return oracle.percentile(oracle.latencies(evidence, innocent), 0.95)


@scenario(*ALL)
def suspect(rig: Rig) -> None:
    """An event that two workers crashed with is tried while other listeners run for hours."""
    lease, slow = rig.outbox["LEASE"], 6.0
    rig.start_workers(2)
    rig.wait_until_they_run()
    long = [rig.write("long", {}) for _ in range(3)]
    for _ in rig.schedule(2, (0.2, 0.4)):
        rig.wait_until_running(long[:1])
        place = rig.place_of(long[0])
        assert place is not None
        rig.kill(place)
    rig.wait_until_they_run()
    began, written = clock.now(), []
    while clock.now() < began + rig.pick(ci=2 * lease, full=60.0):
        written.append(rig.write("plain", {}))
        time.sleep(0.2)  # a steady load
    time.sleep(slow)  # what has not begun by then waits for the suspect
    evidence = rig.evidence()
    runs = oracle.executions(evidence, oracle.Verdict())
    late = sum(not runs.get(each) or first_wait(evidence, runs[each]) > slow for each in written)
    rig.measure(f"events that waited longer than {slow:g} s", late, most=0)
    later = {
        each: runs[each]
        for each in written
        if each in runs and evidence.intents[each].at > began + 5
    }
    waits = oracle.percentile(oracle.latencies(evidence, later), 0.95)
    rig.measure("95 % of the waits after 5 s, s", waits, most=1, timed=True)
    rig.heal()
    rig.settle_down()
    rig.nothing_disturbed()


def first_wait(evidence: Evidence, runs: list[Run]) -> float:
    return runs[0].start - evidence.intents[runs[0].id].at


TAKES = 0.2  # seconds of each listener in ``join``


@scenario(*ALL)
def join(rig: Rig) -> None:
    """Workers join a backlog of slow listeners, and come and go: each gets its share."""
    rig.backlog = True
    rig.outbox["RETRY"] = {"policy": "fixed", "delay": 0.05, "max_attempts": 100}
    events, alone = rig.pick(ci=(200, 1.5), full=(1000, 8.0))
    first = [rig.write("plain", {"seconds": TAKES}) for _ in range(events)]
    hands = Hands(rig)
    rig.start_workers(1)
    rig.wait_until_they_run()
    hands.watch(alone)
    rig.start_workers(2)
    hands.watch_until_empty()
    runs = oracle.executions(rig.evidence(), oracle.Verdict())
    pids, shares = [each.pid for each in rig.workers], Counter[int]()
    for each in first:
        shares.update({run.pid for run in runs[each]})
    for number, pid in enumerate(pids, 1):
        rig.measure(f"share of worker {number}", shares[pid] / events, least=0.01)
    begun = [min(run.start for run in each) for each in runs.values()]
    took = max(run.end or 0.0 for each in runs.values() for run in each) - min(begun)
    shortest = ideal(events * TAKES / rig.outbox["WORKERS"], [rig.began(pid) for pid in pids])
    rig.measure(
        "the time that the backlog took, times the ideal", took / shortest, most=1.25, timed=True
    )
    for _ in range(events // 2):
        rig.write("plain", {"seconds": TAKES})
    hands.watch(0.5)
    for number in (0, 1):  # they come and go
        if number:
            rig.kill(number)
        else:
            with rig.fault("SIGTERM"):
                rig.roll(number)
        hands.watch(1.0)
    hands.watch_until_empty()
    rig.settle_down()
    rig.measure("most events that waited in one worker", hands.most, most=100)
    rig.measure("longest wait in a worker while another was idle, s", hands.longest, most=4)


def ideal(work: float, began: Iterable[float]) -> float:
    """Seconds that workers need who begin at these times for so many seconds of all threads."""
    times = sorted(began)
    for number, (at, after) in enumerate(pairwise([*times, float("inf")]), 1):
        if work <= (after - at) * number:
            return at + work / number - times[0]
        work -= (after - at) * number
    raise AssertionError("the last of them goes on for ever")


class Hands:
    """What waits for a thread in each worker, seen from the table."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.most = 0  # events at a time, in one worker
        self.longest = 0.0  # seconds in which an event waited although another worker was idle
        self._since: dict[str, float] = {}  # monotonic, by event

    def watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look()
            time.sleep(0.1)  # between two looks

    def watch_until_empty(self) -> None:
        until = time.monotonic() + self._rig.patience
        while not self._rig.is_quiet() and time.monotonic() < until:
            self._look()

    def _look(self) -> None:
        from django_outbox.models import OutboxEvent

        held = OutboxEvent.objects.exclude(locked_by=None).values_list("event_id", "locked_by")
        waiting: defaultdict[int, set[str]] = defaultdict(set)
        leased = [(event_id, int(owner.split("-")[-2])) for event_id, owner in held]
        lines, now = witness.heard(self._rig.witness), time.monotonic()  # later: it has begun
        begun, running = {line.id for line in lines}, {*witness.running(lines).values()}
        for event_id, pid in leased:
            if event_id not in begun:
                waiting[pid].add(event_id)
        self.most = max([self.most, *map(len, waiting.values())])
        idle = {each.pid for each in self._rig.workers if self._is_idle(each, running)}
        late = {each for pid, those in waiting.items() for each in those if idle - {pid}}
        self._since = {each: self._since.get(each, now) for each in late}
        self.longest = max([self.longest, *(now - since for since in self._since.values())])

    def _is_idle(self, worker: psutil.Popen, running: Collection[int]) -> bool:
        return worker.pid not in running and self._rig.running(worker)
