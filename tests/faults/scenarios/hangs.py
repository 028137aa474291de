"""Listeners that hang, and machines that stand still."""

from __future__ import annotations

import time

from tests.faults import oracle
from tests.faults.oracle import WRITE_OFF
from tests.faults.rig import Rig
from tests.faults.scenarios.registry import ALL, scenario
from tests.faults.scenarios.stops import neighbours


@scenario(*ALL)
def hung(rig: Rig) -> None:
    """Listeners hang, with and without a timeout, sync and async; all others continue."""
    # No lease ends: whatever repeats is ours.
    rig.outbox |= {"LEASE": 30.0, "DRAIN_TIMEOUT": 1.0, "WORKERS": 6}
    rig.start_workers(2)
    rig.wait_until_they_run()
    rounds = rig.pick(ci=1, full=10)
    rate, lasts = rig.pick(ci=30, full=50), rig.pick(ci=7, full=9)
    rig.start_writers(
        1, events=rounds * lasts * rate, rate=rate, keys=20, keyed=0.3, booked=0.2, batch=1
    )
    worn_out = 0
    tries: dict[str, int] = {}  # how many each event that hangs should have
    for _ in range(rounds):
        began = time.monotonic()
        forever = write_what_hangs(rig, tries)
        while time.monotonic() < began + lasts:
            worn_out += rig.replace_the_worn_out()
            time.sleep(0.1)  # between two looks
        if (place := rig.place_of(forever)) is not None:
            rig.wait_until_they_run()
            rig.hand_over(place)
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed()
    rig.measure("workers that ended for lack of threads", worn_out, least=rounds)
    rig.measure("settles that were refused", len(rig.logged("settles refused")), most=0)
    rig.measure("blockages of the event loop reported", len(rig.logged("loop blocked")), least=1)
    measure_tries(rig, tries)


def write_what_hangs(rig: Rig, tries: dict[str, int]) -> str:
    """Write events that hang; note how often each is to be run; return the one without timeout."""

    def write(kind: str, number: int, times: int, seconds: float | None = None) -> None:
        for _ in range(number):
            payload = {"times": times, "seconds": seconds}
            tries[rig.write(kind, payload)] = times + 1

    write("hangs", 2, times=1, seconds=1.2)
    write("waits", 2, times=1)
    if rig.server is None:  # a transaction that hangs keeps everybody waiting
        write("charged", 1, times=1, seconds=1.2)
    else:
        write("charged", 3, times=2, seconds=1.6)
    rig.write("blocks", {"seconds": 2.0})
    forever = rig.write("endless", {"until": time.monotonic() + 2.0})
    time.sleep(2.5)  # until those have spoken who speak too late
    write("hangs", 2 * rig.outbox["WORKERS"] - 1, times=1)  # for ever: one worker has none left
    return forever


def measure_tries(rig: Rig, tries: dict[str, int]) -> None:
    evidence = rig.evidence()
    runs = oracle.executions(evidence, oracle.Verdict())
    offs = [each for each in evidence.faults if each.kind == WRITE_OFF]
    late = sum(tries.values()) - len(tries)
    rig.measure("calls written off", len(offs), least=late, most=late)
    wrong = [
        each
        for each, times in tries.items()
        if [run.attempts for run in runs[each]] != [*range(times)]
    ]
    rig.measure("events not tried once more for each timeout", len(wrong), most=0)
    beside = neighbours(evidence, runs, ("plain", "booked"))
    rig.measure("95 % of the neighbours' waits, s", beside, most=1, timed=True)


@scenario(*ALL)
def suspended(rig: Rig) -> None:
    """Workers are suspended for longer than a lease, and so are their monotonic clocks."""
    rig.suspends = rig.backlog = True
    lease, times = rig.outbox["LEASE"], rig.pick(ci=2, full=20)
    rig.start_workers(2)
    rig.wait_until_they_run()
    rate = 2 * rig.outbox["WORKERS"] / 0.3  # as much as both can do: there always is a backlog
    rig.start_writers(
        2,
        events=int(times * 2.5 * lease * rate),
        rate=1.2 * rate,
        keys=40,
        keyed=0.2,
        work=(0.2, 0.4),
    )
    for number in rig.schedule(times, (1.0, 1.5)):
        rig.wait_until_busy(number % 2)
        seen = len(rig.logged(" rescued "))
        rig.suspend(number % 2, 2 * lease, until=lambda: len(rig.logged(" rescued ")) > seen)  # noqa: B023
    rig.wait_for_writers()
    rig.settle_down()
    taken = len(rig.logged(" rescued "))
    rig.measure("events that another worker took over meanwhile", taken, least=times)
