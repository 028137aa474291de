"""Queues: one is full of slow events, or its circuit breaker is open; the others go on."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle, pairwise

from django.db import transaction

from tests.faults import clock, oracle
from tests.faults.oracle import Evidence, Run, by_listener
from tests.faults.receiver import Receiver
from tests.faults.rig import Rig
from tests.faults.scenarios.registry import ALL, scenario
from tests.waiting import wait_until

THREADS = {"default": 4, "hooks": 2, "mails": 2}  # of each queue in a worker
ONE, OTHERS = ("--queue", "hooks"), ("--exclude-queue", "hooks")  # what dedicated workers serve
NEIGHBOURS = ("plain", "mailed")  # kinds without a listener in the queue that is full
SHARED = {
    "shared": ("fault.shared store", "fault.shared mail"),
    "spread": ("fault.spread store", "fault.spread mail", "fault.spread hook"),
}
# Many go on to the queue that is full: in memory they would be lost with their worker.
KINDS = (*NEIGHBOURS, *SHARED, "spread", "spread", "hooked")
MISPLACED = 20  # rows, and streams, that are put into other queues at a time


@scenario(*ALL)
def queues(rig: Rig) -> None:
    """A queue is full of slow and hung events; workers crash, rows are put into wrong queues."""
    rig.backlog, rig.listeners = True, SHARED
    rig.outbox["QUEUES"] = {name: {"WORKERS": threads} for name, threads in THREADS.items()}
    for arguments in ((), ONE, OTHERS):
        rig.start_workers(1, *arguments)
    rig.wait_until_they_run()
    lasts, rate = rig.pick(ci=1.5, full=20.0), rig.pick(ci=60, full=100, sqlite=40)
    kills, pauses, moves = rig.pick(ci=(3, 1, 4), full=(30, 6, 30))
    pace = rig.pick(ci=(0.3, 0.7), full=(0.5, 1.5))
    faulty = (kills + pauses + moves) * sum(pace) / 2 + pauses * 1.5 * rig.outbox["LEASE"]
    rig.start_writers(
        2,
        events=int(rate * (2 * lasts + faulty + 2)),
        rate=rate,
        kinds=KINDS,
        keys=40,
        keyed=0.4,
        fail=0.05,
        later=0.02,
        defer=0.02,
        slow=0.05,
        work=(0.005, 0.03),
    )
    wait_until(rig.started, within=60, what="the first events")
    calm = lasting(lasts)
    fill(rig, hang=lasts, slow=rig.pick(ci=150, full=1500, sqlite=800))
    full = lasting(lasts)
    strikes = ["kill"] * kills + ["pause"] * pauses + ["misplace"] * moves
    rig.luck.shuffle(strikes)
    moved, victims = 0, cycle(range(len(rig.workers)))  # so that each kind of worker is killed
    for number in rig.schedule(len(strikes), pace):
        if strikes[number] == "kill":
            rig.wait_until_they_run()
            rig.kill(next(victims))
        elif strikes[number] == "pause":
            rig.pause(rig.one_that_runs(), 1.5 * rig.outbox["LEASE"])
        else:
            moved += rig.misplace(MISPLACED, [*THREADS, "gone"])
    rig.wait_for_writers()
    rig.wait_until_they_run()
    rig.roll(0, *ONE)  # from now on nobody serves all queues
    for number in range(60):  # in ``default``, whatever their listeners are
        rig.write(KINDS[number % len(KINDS)], {}, key=f"last-{number % 7}" if number % 3 else None)
    rig.heal()
    rig.settle_down()
    rig.measure("rows and streams put into other queues", moved, least=1)
    measure_queues(rig, calm, full)


def lasting(seconds: float) -> tuple[float, float]:
    """Let that many seconds pass; return when they began and ended."""
    began = clock.now()
    time.sleep(seconds)  # a steady load
    return began, clock.now()


def fill(rig: Rig, *, hang: float, slow: int) -> None:
    """Keep every thread of ``hooks`` busy for ``hang`` seconds, with a backlog behind that."""
    serving = 2  # workers
    with transaction.atomic():
        # Until a fixed time: one that began anew for each lost worker would die of its rescues.
        hung = {"busy_until": clock.now() + hang}
        for _ in range(serving * THREADS["hooks"]):
            rig.write("hooked", hung, queue="hooks")
        for _ in range(slow):
            rig.write("hooked", {"seconds": 0.3}, queue="hooks")


def measure_queues(rig: Rig, calm: tuple[float, float], full: tuple[float, float]) -> None:
    evidence = rig.evidence()
    runs = oracle.executions(evidence, oracle.Verdict())
    rig.measure(
        "finished listeners that one kill repeated",
        repeated_by_kills(evidence, runs),
        most=sum(THREADS.values()),
    )
    before, beside = (neighbours(evidence, runs, *span) for span in (calm, full))
    rig.measure("95 % of the other queues' waits undisturbed, s", before)
    rig.measure("the same with the full queue, times", beside / before, most=1.5, timed=True)


def neighbours(
    evidence: Evidence, runs: Mapping[str, Sequence[Run]], since: float, until: float
) -> float:
    """Return the wait that 95 % of the other queues' events of that time did not exceed."""
    innocent = {
        each.event_id: runs[each.event_id]
        for each in evidence.intents.values()
        if each.kind in NEIGHBOURS
        and each.key is None
        and since <= each.at < until
        and each.event_id in runs
    }
    return oracle.percentile(oracle.latencies(evidence, innocent), 0.95) or 0.001


def repeated_by_kills(evidence: Evidence, runs: Mapping[str, Sequence[Run]]) -> int:
    """Return the most runs of listeners that had ended, and that one kill made run again."""
    kills = [each for each in evidence.faults if each.kind == "kill"]
    pairs = [
        (before, after)
        for each in runs.values()
        for own in by_listener(each)
        for before, after in pairwise(own)
        if before.outcome == "end"
    ]
    return max(
        sum(before.pid in kill.pids and kill.at < after.start for before, after in pairs)
        for kill in kills
    )


FAILURES = 3  # in a row, that open a breaker


@scenario(*ALL)
def breaker(rig: Rig) -> None:
    """A service is down for several workers, some of them killed."""
    rig.backlog, rig.listeners = True, SHARED
    pause, outage = rig.pick(ci=(0.5, 5.0), full=(30.0, 1800.0))
    settings = {"failures": FAILURES, "within": 60, "pause": pause}
    rig.outbox |= {
        "WORKERS": 2,
        "QUEUES": {"hooks": {"WORKERS": 2, "BREAKER": settings}, "mails": {"WORKERS": 1}},
    }
    rig.patience = rig.pick(ci=rig.patience, full=900.0)  # a pause may have grown to 600
    rig.start_workers(2)
    rig.wait_until_they_run()
    receiver, rate, lasts = Receiver(), rig.pick(ci=40, full=5), rig.pick(ci=1.0, full=20.0)
    receiver.come()
    rig.start_writers(
        1,
        events=int(rate * (outage + 2 * lasts)),
        rate=rate,
        partner=receiver.port,
        kinds=("hooked", "spread", "mailed"),
        keys=20,
        keyed=0.3,
    )
    wait_until(rig.started, within=60, what="the first events")
    time.sleep(lasts)  # all is well
    went = clock.now()
    receiver.go()
    with rig.fault("receiver away"):
        strike(rig, outage)
    pauses = open_breakers()
    receiver.come()
    came = clock.now()
    rig.wait_for_writers()
    rig.settle_down()
    receiver.go()
    measure_breaker(rig, (went, came), longest=pauses.get("hooks", pause))
    rig.measure("events that the receiver never got", len(called(rig) - receiver.received), most=0)


def strike(rig: Rig, outage: float) -> None:
    """Kill a worker, restart another, kill it, in the course of an outage."""
    for what in ("kill", "SIGTERM", "kill"):
        time.sleep(outage / 4)  # how long the outage lasts
        number = rig.one_that_runs()
        if what == "kill":
            rig.kill(number)
        else:
            with rig.fault(what):
                rig.roll(number)
    time.sleep(outage / 4)  # the rest of it


def open_breakers() -> dict[str, float]:
    """Return the lengths of the open breakers' pauses, in seconds, by queue."""
    from django_outbox.models import OutboxPause

    found = OutboxPause.objects.filter(kind="breaker").values_list("name", "pause_seconds")
    return dict(found)


def called(rig: Rig) -> set[str]:
    from tests.faults.models import Intent

    return {*Intent.objects.filter(kind__in=("hooked", "spread")).values_list("pk", flat=True)}


def measure_breaker(rig: Rig, away: tuple[float, float], *, longest: float) -> None:
    evidence = rig.evidence()
    runs = oracle.executions(evidence, oracle.Verdict())
    failed = [
        run
        for each in runs.values()
        for run in each
        if run.outcome == "failed" and away[0] <= run.start
    ]
    probes = len(rig.logged("reason=the probe failed")) + 1
    processes = len({run.pid for each in runs.values() for run in each})
    rig.measure(
        "attempts spent while the partner was away",
        len(failed),
        least=FAILURES,
        most=FAILURES * processes + probes,
    )
    rig.measure("breakers opened", len(rig.logged("consecutive failures in")), least=1)
    rig.measure("breakers closed", len(rig.logged("breaker closed queue=hooks")), least=1)
    waiting = [
        event_id
        for event_id, each in evidence.intents.items()
        if each.kind in ("hooked", "spread") and each.at < away[1]
    ]
    last = max(evidence.ended(each, runs.get(each, ())) or float("inf") for each in waiting)
    rig.measure(
        "delivered after the partner's return, s", last - away[1], most=longest + 3, timed=True
    )
    beside = waits(evidence, runs, ("mailed",))
    rig.measure("95 % of the neighbours' waits, s", beside, most=1, timed=True)


def waits(
    evidence: Evidence, runs: Mapping[str, Sequence[Run]], kinds: Collection[str]
) -> float | None:
    """Return the wait that 95 % of the events of these kinds without a key did not exceed."""
    those = {
        each: found
        for each, found in runs.items()
        if each in evidence.intents
        and evidence.intents[each].key is None
        and evidence.intents[each].kind in kinds
    }
    return oracle.percentile(oracle.latencies(evidence, those), 0.95)
