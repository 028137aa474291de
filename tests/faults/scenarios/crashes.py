"""What befalls worker processes: killed, stopped, asked to end, taken along by an event."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from django_outbox.sql.values import SUSPECT_FROM
from tests.faults import clock, oracle
from tests.faults.oracle import Run
from tests.faults.rig import END, Rig
from tests.faults.scenarios.registry import ALL, MIX, scenario
from tests.waiting import wait_until


# Rows 13, 500; W18.
@scenario(*ALL)
def kill(rig: Rig) -> None:
    """Workers are killed at random, and replaced."""
    kills = rig.pick(ci=5, full=200, sqlite=40)
    events = rig.pick(ci=1200, full=100_000, sqlite=10_000)
    pause = rig.pick(ci=(0.5, 1.0), full=(0.5, 2.0))
    rig.start_workers(rig.pick(ci=2, full=4))
    span = kills * sum(pause) / 2
    rig.start_writers(2, events=events, rate=events / span, keys=50, **MIX)
    rig.wait_until_they_run()
    for _ in rig.schedule(kills, pause):
        rig.kill(rig.one_that_runs())
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed()


# Row G5.
@scenario(*ALL)
def slow(rig: Rig) -> None:
    """Some listeners take longer than a lease, which their worker renews."""
    lease = rig.outbox["LEASE"] = rig.pick(ci=1.0, full=2.0)
    rig.outbox["DRAIN_TIMEOUT"] = 0.9
    rig.start_workers(rig.pick(ci=2, full=4))
    rig.start_writers(
        2,
        events=rig.pick(ci=200, full=20_000, sqlite=5000),
        keys=20,
        keyed=0.3,
        long=rig.pick(ci=0.05, full=0.01),
        long_work=(1.5 * lease, 3 * lease),
    )
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed()


# Row X3.
@scenario(*ALL)
def pause(rig: Rig) -> None:
    """Workers are frozen for two leases and continued: what they settle is refused."""
    lease = rig.outbox["LEASE"] = rig.pick(ci=1.0, full=1.5)
    rig.outbox["DRAIN_TIMEOUT"] = 0.9
    pauses = rig.pick(ci=3, full=20)
    rig.start_workers(3)
    events = rig.pick(ci=180, full=5000, sqlite=2500)
    rate = events / (pauses * (2 * lease + 0.5))
    rig.start_writers(
        2,
        events=events,
        rate=rate,
        keys=20,
        keyed=0.3,
        fail=0.4,
        booked=0.1,
        work=(0.02, 0.08),
        long=rig.pick(ci=0.15, full=0.02),
        long_work=(1.2 * lease, 1.8 * lease),
    )
    rig.wait_until_they_run()
    for _ in rig.schedule(pauses, (0.3, 0.8)):
        rig.pause(rig.luck.randrange(3), 2 * lease)
    rig.wait_for_writers()
    rig.settle_down()
    rig.measure("log lines about lost leases", len(rig.logged("lost leases")), least=1)


# Rows W15, W18.
@scenario(*ALL)
def term(rig: Rig) -> None:
    """Workers are stopped (SIGTERM) under load: they drain, and nothing runs twice."""
    timeout = rig.outbox["DRAIN_TIMEOUT"] = rig.pick(ci=10.0, full=5.0)
    rig.outbox["LEASE"] = 30.0
    terms = rig.pick(ci=3, full=100)
    rig.start_workers(2)
    pause = rig.pick(ci=(0.5, 1.0), full=(0.5, 1.5))
    events = rig.pick(ci=600, full=30_000, sqlite=8000)
    rig.start_writers(2, events=events, rate=events / terms / 1.5, keys=50, **MIX)
    rig.wait_until_they_run()
    longest = 0.0
    for _ in rig.schedule(terms, pause):
        number = rig.one_that_runs()
        with rig.fault("SIGTERM"):  # explains nothing: a drained worker leaves nothing to repeat
            longest = max(longest, rig.roll(number))
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed()
    rig.measure("longest end after SIGTERM, s", longest, most=timeout + 1, timed=True)


# Row W15.
@scenario(*ALL)
def stuck(rig: Rig) -> None:
    """Listeners never return: they are logged, never run in parallel, and delay no stop."""
    lease = rig.outbox["LEASE"] = rig.pick(ci=1.0, full=2.0)
    timeout = rig.outbox["DRAIN_TIMEOUT"] = 0.9
    rounds = rig.pick(ci=1, full=3)
    rig.start_workers(2)
    rate, each = rig.pick(ci=60, full=100), 4 * lease + 2
    rig.start_writers(1, events=int(rounds * each * rate), rate=rate, keys=20, **MIX)
    rig.wait_until_they_run()
    past, second = 0.0, 0.0
    for _ in range(rounds):
        endless = [rig.write("endless", {"until": time.monotonic() + 3 * lease}) for _ in range(3)]
        rig.wait_until_started(endless)
        time.sleep(1.5 * lease)  # without a heartbeat somebody else would run them by now
        past = max(past, *(stopped(rig, number) for number in (0, 1)))
        rig.write("endless", {"until": time.monotonic() + lease})
        rig.wait_until_they_run()
        second = max(second, *(stopped(rig, number, twice=True) for number in (0, 1)))
    time.sleep(3 * lease)  # until none of them is endless any more
    rig.wait_until_they_run()
    past = max(past, *(stopped(rig, number) for number in (0, 1)))
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed()
    handed_back = len(rig.logged("listener still runs, event handed back"))
    rig.measure("listeners reported at a stop", handed_back, least=3 * rounds)
    rig.measure("longest end with a stuck listener, s", past, most=timeout + 1, timed=True)
    rig.measure("longest end after a second SIGTERM, s", second, most=timeout, timed=True)


def stopped(rig: Rig, number: int, *, twice: bool = False) -> float:
    """Ask a worker to end, or to hurry; start another; return the seconds that the end took."""
    worker, started = rig.workers[number], time.monotonic()
    with rig.fault("second SIGTERM" if twice else "SIGTERM"):  # what it hands back says so itself
        worker.send_signal(signal.SIGTERM)
        if twice:
            time.sleep(0.1)  # two at once would arrive as one
            worker.send_signal(signal.SIGTERM)
        worker.wait(END)  # 1 if something was left behind
    rig.ended[worker.pid] = clock.now()
    took = time.monotonic() - started
    rig.workers[number] = rig.start_worker()
    return took


ENDS = ("exit", "segv", "group")  # how an event ends its process; the last, all of its group


# Rows 402; W12.
@scenario(*ALL)
def poison(rig: Rig) -> None:
    """Events that raise, exit, crash the process, have no listener or cannot be read."""
    rig.mortal = ("raises", "ends", "unrouted", "damaged")
    rig.outbox |= rig.pick(
        ci={"LEASE": 1.0, "DRAIN_TIMEOUT": 0.9, "MAX_RESCUES": 3}, full={"LEASE": 2.0}
    )
    rig.outbox["UNROUTABLE_GRACE"] = 1.0
    each, alone = rig.pick(ci=1, full=10), rig.pick(ci=1.5, full=20.0)
    rig.start_workers(rig.pick(ci=2, full=4))
    events = rig.pick(ci=300, full=20_000, sqlite=5000)
    rate = rig.pick(ci=60, full=75, sqlite=40)
    rig.start_writers(1, events=events, rate=rate, keys=10, **MIX)
    poisons: list[tuple[str, dict[str, Any]]] = [
        *[("raises", {"how": how}) for how in ("value", "memory", "exit", "nul")],
        *[("ends", {"how": how}) for how in ENDS],
        ("unrouted", {}),
        ("damaged", {}),
    ]
    rig.wait_until_they_run()
    began = time.monotonic()
    time.sleep(alone)  # the neighbours' time without it
    left, crashes, first = poisons * each, 0, time.monotonic()
    pace = 0.8 * (events / rate - alone) / len(left)  # seconds between two
    until = first + rig.pick(ci=1, full=10) * rig.patience
    while time.monotonic() < until and (left or not (rig.is_quiet() and rig.writers_ended())):
        crashes += rig.replace_the_dead()
        if left and time.monotonic() > first + pace * (len(poisons) * each - len(left)):
            rig.write(*left.pop())
        time.sleep(0.05)  # between two looks
    rig.wait_for_writers()
    rig.settle_down()
    tries = rig.outbox.get("MAX_RESCUES", 5)
    most = len(ENDS) * each * tries
    rig.measure("workers lost to poison", crashes, least=len(ENDS) * each, most=most)
    measure_tries(rig, tries)
    rig.measure("poison events that are not dead", rig.alive(rig.mortal), most=0)
    before, beside = (waits(rig, *span, 0.95) for span in ((began, first), (first, until)))
    rig.measure("95 % of the neighbours' waits without it, s", before)
    rig.measure("the same meanwhile, times", beside / before, most=2, timed=True)


def measure_tries(rig: Rig, most: int) -> None:
    """Measure how often each event that ends its process was tried, and how often alone in it."""
    evidence = rig.evidence()
    runs = oracle.executions(evidence, oracle.Verdict())
    ending = [runs[each] for each, intent in evidence.intents.items() if intent.kind == "ends"]
    beside = company(runs)
    rig.measure("tries of an event that ends its process", max(map(len, ending)), most=most)
    alone = min(sum(not beside(run) for run in each) for each in ending)
    rig.measure("of them alone, at least", alone, least=most - SUSPECT_FROM)


def company(runs: Mapping[str, Sequence[Run]]) -> Callable[[Run], list[Run]]:
    """Return a function that tells which other runs its process had at the same time as a run."""
    by_pid: defaultdict[int, list[Run]] = defaultdict(list)
    for each in runs.values():
        for run in each:
            by_pid[run.pid].append(run)

    def beside(run: Run) -> list[Run]:
        until = run.end or inf
        return [
            each
            for each in by_pid[run.pid]
            if each.id != run.id and each.start < until and run.start < (each.end or inf)
        ]

    return beside


@scenario(*ALL)
def quarantine(rig: Rig) -> None:
    """A suspect runs while quick events do; then all workers die together, again and again."""
    rig.backlog = True  # what is lost waits until one of those that all died has started again
    # A suspect is alone for as long as a lease, or for five seconds.
    lease = rig.outbox["LEASE"] = rig.pick(ci=2.0, full=6.0)
    takes, calm = rig.pick(ci=1.5, full=4.0), rig.pick(ci=1.5, full=15.0)
    rate, parts = rig.pick(ci=40, full=80, sqlite=40), rig.pick(ci=(3,), full=(1, 3))
    lasts = len(parts) * (calm + takes + 5 * lease)
    for workers in parts:
        rig.start_workers(workers - len(rig.workers))
        rig.wait_until_they_run()
        if not rig.writers:
            rig.start_writers(1, events=int(rate * lasts), rate=rate, batch=1)
            rig.wait_for_delivery()
        began = time.monotonic()
        time.sleep(calm)  # the neighbours' time without it
        quick = waits(rig, began, time.monotonic(), 0.95)
        measure_suspect(rig, suspected(rig, takes), quick)
    rig.wait_for_writers()
    rig.settle_down()
    rounds = rig.pick(ci=2, full=15)
    rig.start_writers(1, events=rate * rounds, rate=rate, batch=1)
    for _ in range(rounds):
        rig.wait_until_they_run()
        time.sleep(1.0)  # what every process lives
        for number in range(len(rig.workers)):
            rig.kill(number)
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed()


def suspected(rig: Rig, takes: float) -> str:
    """Have two workers die of an event that ``takes`` seconds, and it run to its end; its id."""
    event_id = rig.write("plain", {"seconds": takes})
    for _ in range(SUSPECT_FROM):
        rig.wait_until_running([event_id])
        place = rig.place_of(event_id)
        assert place is not None
        rig.kill(place)
    wait_until(lambda: event_id in rig.ended_well(), within=60, what="the suspect has run")
    return event_id


def measure_suspect(rig: Rig, event_id: str, quick: float) -> None:
    """Measure what its last run, alone in its worker, cost the other events.

    ``quick``: seconds that 95 % of them waited at most before.
    """
    runs = oracle.executions(rig.evidence(), oracle.Verdict())
    last = runs[event_id][-1]
    assert last.end is not None
    rig.measure("events that ran beside a suspect", len(company(runs)(last)), most=0)
    if len(rig.workers) > 1:
        slow = waits(rig, last.start, last.end, 0.95) / quick
        rig.measure("95 % of the waits beside a suspect, times", slow, most=2, timed=True)
        return
    others = [run.start for each in runs.values() for run in each if run.id != event_id]
    before = max(start for start in others if start < last.start)
    after = min((start for start in others if start > last.end), default=last.end)
    longer = after - before - (last.end - last.start)
    rig.measure("claims of one worker rest longer than it runs, s", longer, most=1, timed=True)


def waits(rig: Rig, since: float, until: float, part: float) -> float:
    """The wait that such a part of the innocent events written in that time did not exceed."""
    evidence = rig.evidence()
    written = {
        event_id: each
        for event_id, each in evidence.intents.items()
        if since <= each.at < until and each.kind not in rig.mortal
    }
    found = oracle.executions(evidence, oracle.Verdict())
    runs = {event_id: each for event_id, each in found.items() if event_id in written}
    return oracle.percentile(oracle.latencies(evidence, runs), part) or 0.001
