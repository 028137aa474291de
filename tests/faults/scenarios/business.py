"""What business transactions do: keys, delays, wrong clocks, all ways to undo a write."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.faults import oracle
from tests.faults.rig import REPOSITORY, Rig
from tests.faults.scenarios.registry import ALL, MIX, scenario


# Rows 500; N13.
@scenario(*ALL)
def calm(rig: Rig) -> None:
    """Nothing is broken: every event is delivered once, without an error or a deadlock."""
    rig.outbox["LEASE"] = 30.0  # nothing crashes, and a busy machine is no fault
    rig.start_workers(2)
    rig.wait_until_they_run()
    rig.start_writers(
        rig.pick(ci=3, full=6),
        events=rig.pick(ci=1000, full=20_000, sqlite=5000),
        keys=rig.pick(ci=300, full=2000),
        **{**MIX, "keyed": 0.6, "slow": 0.2, "rollback": 0.1},
    )
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed()


# Rows 500; G5.
@scenario(*ALL)
def ordered(rig: Rig) -> None:
    """Keyed events under kills, freezes, a restart, slow commits, wrong clocks, dead events."""
    rig.outbox["ON_DEAD"] = "block"
    rig.shift, rig.backlog = (-600.0, 600.0, 0.0), rig.size == "full"
    kills, pauses = rig.pick(ci=3, full=40), rig.pick(ci=1, full=6)
    rig.outbox["RETRY"] = {"policy": "fixed", "delay": 0.05, "max_attempts": 100}
    rig.start_workers(rig.pick(ci=2, full=4))
    events = rig.pick(ci=1000, full=100_000, sqlite=10_000)
    rig.start_writers(  # at a pace at which they still write when the last fault strikes
        rig.pick(ci=2, full=4),
        events=events,
        rate=rig.pick(ci=120, full=1000, sqlite=120),
        keys=rig.pick(ci=40, full=200),
        keyed=1.0,
        fail=0.05,
        later=0.01,
        defer=0.01,
        slow=0.1,
        rollback=0.1,
        batch=rig.pick(ci=3, full=6),
    )
    rig.wait_until_they_run()
    started = time.monotonic()
    behind = block(rig, keys=rig.pick(ci=3, full=20))
    strikes = ["kill"] * kills + ["pause"] * pauses + ["restart"] * (rig.server is not None)
    rig.luck.shuffle(strikes)
    for number in rig.schedule(len(strikes), (0.3, 1.2)):
        worker = rig.one_that_runs()
        if strikes[number] == "kill":
            rig.kill(worker)
        elif strikes[number] == "pause":
            rig.pause(worker, 1.5 * rig.outbox["LEASE"])
        else:
            rig.restart("immediate" if rig.database == "postgres" else "kill", 0.5)
    rig.wait_for_writers()
    rig.settle_down(but=len(behind))
    pace = events / (time.monotonic() - started)
    rig.measure("events a second", pace, least=rig.pick(ci=1, full=500, sqlite=100), timed=True)
    rig.measure("events run behind a dead one", len(behind & rig.started()), most=0)
    rig.replay_the_dead()


def block(rig: Rig, keys: int) -> set[str]:
    """Write an event into each of some keys that dies at once; return what is behind them."""
    behind = set()
    for number in range(keys):
        rig.write("plain", {"ill": True}, key=f"blocked-{number}")
        behind |= {rig.write("plain", {}, key=f"blocked-{number}") for _ in range(3)}
    return behind


# Row X2.
@scenario(*ALL)
def skew(rig: Rig) -> None:
    """Clocks are minutes apart, sessions and settings in other time zones."""
    rig.shift = (-600.0, -0.05, 0.0, 0.05, 600.0)
    zones = [
        {"FAULTS_ZONE": "America/New_York", "FAULTS_USE_TZ": "0"},
        {"FAULTS_ZONE": "Pacific/Auckland"},
        {"FAULTS_SESSION_ZONE": "+08:00"} if rig.database in ("mariadb", "mysql") else {},
        {"OUTBOX_TEST_JUMP": "3:3600"},
    ]
    for each in zones:
        rig.start_workers(1, **each)
    rig.start_writers(
        3,
        events=rig.pick(ci=450, full=20_000, sqlite=5000),
        rate=rig.pick(ci=150, full=500),
        keys=20,
        keyed=0.3,
        fail=0.05,
        delayed=0.3,
        delays=(0.3, rig.pick(ci=2.0, full=20.0)),
    )
    rig.wait_for_writers()
    rig.settle_down()
    evidence = rig.evidence()
    runs = oracle.executions(evidence, oracle.Verdict())
    off = [
        each[0].start - evidence.intents[event_id].due
        for event_id, each in runs.items()
        if evidence.intents[event_id].due
    ]
    poll = rig.outbox["POLL_INTERVAL"]
    rig.measure("most that a delayed event was early, s", -min(off), most=0.05)
    rig.measure("most that a delayed event was late, s", max(off), most=poll + 1, timed=True)


# Row 500.
@scenario(*ALL)
def rollback(rig: Rig) -> None:
    """Transactions are rolled back in every way, in processes that deliver what they write."""
    rig.start_workers(1)
    rig.start_writers(
        2,
        events=rig.pick(ci=1600, full=50_000, sqlite=10_000),
        storm=True,
        embedded=True,
        work=(0.0, 0.01),
        rate=rig.pick(ci=300.0, full=0.0, sqlite=150.0),
    )
    for _ in range(rig.pick(ci=2, full=20)):
        rig.start_writers(1, events=30, dies=True, keys=20, keyed=0.3)  # killed before its COMMIT
    rig.wait_for_writers()
    rig.settle_down()
    rig.measure("events that took the hot route", len(rig.hot()), least=1)


# Row G5.
@scenario(*ALL)
def fork(rig: Rig) -> None:
    """Processes that deliver what they write fork half-way, and all of them continue."""
    servers, forks = rig.pick(ci=(1, 2), full=(2, 4))
    events, rate = rig.pick(ci=(600, 150), full=(5000, 200), sqlite=(2000, 100))
    rig.start_writers(servers, events=events, rate=rate, embedded=True, forks=forks, keys=20, **MIX)
    rig.wait_for_writers()
    rig.start_workers(1)  # for what their end left
    rig.settle_down()
    rig.nothing_disturbed()
    delivering = len({*rig.hot()} & rig.wrote())
    rig.measure("processes that delivered their own", delivering, least=servers * (forks + 1))


# Rows 516, X10.
@scenario(*ALL)
def admin(rig: Rig) -> None:
    """People replay, discard, skip, pause and edit while events are written and delivered."""
    rig.outbox["RETRY"] = {"policy": "fixed", "delay": 0.05, "max_attempts": 3}
    lasts, rate = rig.pick(ci=4.0, full=30.0), rig.pick(ci=60, full=100, sqlite=60)
    rig.start_workers(2)
    rig.wait_until_they_run()
    rig.start_people(seconds=lasts)
    rig.start_writers(
        2, events=int(lasts * rate), rate=rate, keys=10, keyed=0.3, booked=0.2, fail=0.05, early=0.1
    )
    met = rig.wait_for_people()
    rig.wait_for_writers()
    rig.settle_down()
    rig.replay_the_dead()
    rig.nothing_disturbed()
    for what in ("replay", "discard", "skip", "pause"):
        rig.measure(f"times a person did {what}", met.get(what, 0), least=1)
    rig.measure("pauses made in the admin", met.get("paused", 0), least=1)
    rig.measure("actions in the admin's log", met.get("logged", 0), least=1)
    rig.measure("pages that were errors", met.get("errors", 0), most=0)
    rig.measure("forbidden things that were done", met.get("let in", 0), most=0)


# Rows X10, J21.
@scenario(*ALL)
def replays(rig: Rig) -> None:
    """All dead events are replayed from the admin, without delaying other writers."""
    rate = rig.pick(ci=60, full=100, sqlite=30)
    dead = rig.put_dead(rig.pick(ci=2000, full=100_000, sqlite=20_000))
    rig.start_workers(2)
    rig.wait_until_they_run()
    rig.start_people()
    rig.start_writers(
        2, events=int(rate * rig.pick(ci=3.0, full=60.0)), rate=rate, keys=10, keyed=0.3
    )
    met = rig.wait_for_people()
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed()
    rig.measure("dead events that were not replayed", len({*dead} - rig.started()), most=0)
    rig.measure("pages that were errors", met.get("errors", 0), most=0)
    # On SQLite, with its one writer at a time, everybody waits for everybody.
    bars = {"most": 1} if rig.server else {}
    rig.measure("longest business transaction, s", rig.longest, timed=True, **bars)


# Row 402.
@scenario(*ALL, sizes=("full",))
def hostile(rig: Rig) -> None:
    """Arbitrary input is passed to write, and histories are compared with models.

    The suite does the same every day with a few examples.
    """
    for file, examples in (
        ("test_hostile.py", 17_000),  # three tests: some 50,000 in all
        ("test_row_model.py", 2000),
        ("test_ordered_model.py", 1000),
    ):
        tried(rig, file, examples)


def tried(rig: Rig, file: str, examples: int) -> None:
    """Run a file of the suite with that many examples; it must pass."""
    with rig.log.open("ab") as log:
        code = subprocess.call(
            [sys.executable, "-m", "pytest", "-q", "--timeout", "0", f"tests/conformance/{file}"],
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "tests.settings",
                "OUTBOX_EXAMPLES": str(examples),
            },
            cwd=REPOSITORY,
            stdout=log,
            stderr=log,
        )
    rig.measure(f"examples of tests/conformance/{file}", examples)
    rig.measure(f"exit code of tests/conformance/{file}", code, most=0)
