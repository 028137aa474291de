"""Delayed events that are cancelled and rescheduled when they fall due, and slots that coalesce."""

from __future__ import annotations

from django.db import connection

from tests.faults import oracle, slots
from tests.faults.rig import Rig
from tests.faults.scenarios.registry import ALL, scenario

EARLY = 0.02  # seconds that two clocks of a machine may differ, slewed for the length of a run


@scenario(*ALL)
def reminders(rig: Rig) -> None:
    """Events are cancelled and rescheduled as they fall due, slots coalesce; workers are killed."""
    rig.backlog, rig.listeners = True, {"reminder": ("fault.reminder", "fault.reminder mail")}
    lease = rig.outbox["LEASE"] = rig.pick(ci=1.5, full=2.0)
    rig.outbox["DRAIN_TIMEOUT"] = 0.9
    delay, before = 0.3, deadlocks()
    strikes = ["kill", "kill", "pause"] * rig.pick(ci=2, full=40, sqlite=15)
    kills, pace = strikes.count("kill"), rig.pick(ci=(0.5, 1.0), full=(0.5, 1.5))
    span = len(strikes) * sum(pace) / 2 + (len(strikes) - kills) * 2 * lease
    rig.start_workers(rig.pick(ci=2, full=4))
    rate = rig.pick(ci=60, full=80, sqlite=40)
    rig.start_writers(
        6,
        events=int(rate * span),
        rate=rate,
        keys=8,
        keyed=0.5,
        changed=0.5,
        delays=(0.05, 1.0),
        slots=3,
        slotted=0.5,
        slot_delay=delay,
        rollback=0.05,
        slow=0.15,
        slow_for=0.03 if rig.server is None else 0.8,
        work=(0.0, 0.05),
        long=0.5,
        long_work=(0.2, 0.5),
    )
    rig.wait_until_they_run()
    for number in rig.schedule(len(strikes), pace):
        if strikes[number] == "kill":
            rig.kill(rig.one_that_runs())
        else:
            rig.pause(rig.one_that_runs(), 2 * lease)
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed(locked=True)
    if rig.server is not None:
        rig.measure("deadlocks", deadlocks() - before, most=0)
        if not rig.figures[-1].holds and connection.vendor == "mysql":
            rig.figures[-1].examples = [latest_deadlock()]
    measure_changes(rig, delay, len(strikes))


def measure_changes(rig: Rig, delay: float, strikes: int) -> None:
    evidence = rig.evidence()
    runs = oracle.executions(evidence, oracle.Verdict())
    struck = oracle.Struck(evidence.faults, evidence.lease)
    early = [
        run
        for event_id, each in runs.items()
        if (intent := evidence.intents.get(event_id)) and intent.kind != slots.KIND
        for run in each
        if run.start < intent.due - EARLY and not struck.woke(run)
    ]
    rig.measure("deliveries before their time", len(early), most=0)
    rig.figures[-1].examples = [str(run) for run in early[:5]]
    replaced = sum(
        each.kind == slots.KIND and not runs.get(each.event_id)
        for each in evidence.intents.values()
    )
    rig.measure("writes that a newer one replaced", replaced, least=1)
    rig.measure(
        "deliveries of a slot above its share",
        slots.above_share(evidence, runs, delay, strikes),
        most=0,
    )
    for what in ("cancelled", "rescheduled"):
        found = {n: rig.met[f"{what} {n}"] for n in range(3)}
        rig.measure(f"{what} in time", found[1] + found[2], least=1)
        rig.measure(f"{what} too late", found[0], least=1)


def latest_deadlock() -> str:
    """Return what the server says of its latest deadlock: which statements and locks met."""
    with connection.cursor() as cursor:
        cursor.execute("SHOW ENGINE INNODB STATUS")
        found = str(cursor.fetchone()[2]).partition("LATEST DETECTED DEADLOCK")[2]
    return found.partition("\nTRANSACTIONS\n")[0][:6000]


def deadlocks() -> int:
    """Return how many deadlocks the server has met."""
    asked = {
        "postgresql": "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()",
        "mysql": "SELECT count FROM information_schema.innodb_metrics "
        "WHERE name = 'lock_deadlocks'",
    }
    if connection.vendor not in asked:
        return 0
    with connection.cursor() as cursor:
        cursor.execute(asked[connection.vendor])
        return int(cursor.fetchone()[0])
