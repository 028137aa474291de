"""Listeners of the same events: while one of them is in trouble, the others do not notice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from tests.faults import oracle
from tests.faults.oracle import WRITE_OFF, Evidence, Run, by_listener, lane_of
from tests.faults.rig import Rig, asked
from tests.faults.scenarios.queues import lasting
from tests.faults.scenarios.registry import ALL, scenario
from tests.waiting import wait_until

TROUBLED = "mail"  # the name of the listeners that are in trouble
KINDS = {  # two event types of the same keys, and their listeners
    "kin": ("fault.kin", "fault.kin ledger", f"fault.kin {TROUBLED}"),
    "kith": ("fault.kith", f"fault.kith {TROUBLED}"),
}
KEYS = 4  # fewer than threads: one listener that hangs for each key leaves some to the others
TROUBLES = ("fails", "hangs", "dies")  # what the listener is told to do
ROUNDS = 2  # through all troubles
COMPLETE = 30.0  # seconds until the others have everything, though one still is in trouble


@scenario(*ALL)
def siblings(rig: Rig) -> None:
    """One listener of keyed events fails, hangs, dies or is paused; workers are killed."""
    from django_outbox.models import OutboxEvent

    rig.backlog, rig.listeners = True, KINDS
    rig.outbox["WORKERS"] = 6
    rig.start_workers(2)
    rig.wait_until_they_run()
    lasts, rate, kills = rig.pick(ci=(1.0, 40, 3), full=(10.0, 50, 30))
    pace = rig.pick(ci=(0.3, 0.7), full=(1.0, 3.0))
    rig.start_writers(
        2,
        events=int(rate * ((len(TROUBLES) + 2) * ROUNDS * lasts + kills * (sum(pace) / 2 + 1.0))),
        rate=rate,
        kinds=(*KINDS,),
        keys=KEYS,
        keyed=1.0,
        batch=1,  # each key is busy: MySQL renews no lease of a stream that a writer holds
    )
    wait_until(rig.started, within=60, what="the first events")
    spans: dict[str, list[tuple[float, float]]] = {}
    for how in ("is well", *TROUBLES, "is paused") * ROUNDS:
        with trouble(rig, how):
            spans.setdefault(how, []).append(lasting(lasts))
    with trouble(rig, TROUBLES[0]):
        for number in rig.schedule(kills, pace):
            rig.trouble(TROUBLES[number % len(TROUBLES)])
            rig.wait_until_they_run()
            rig.kill(number % 2)
        rig.wait_for_writers()
        with suppress(AssertionError):
            wait_until(lambda: asked(lambda: not waiting()), within=COMPLETE)
        rig.measure("deliveries to the others that still waited", waiting(), most=0)
    rig.settle_down()
    rig.measure("deaths of one in trouble", OutboxEvent.objects.dead().count(), least=1)
    rig.replay_the_dead()
    rig.nothing_disturbed()
    measure_siblings(rig, spans)


@contextmanager
def trouble(rig: Rig, how: str) -> Iterator[None]:
    """Have the listener be in trouble during a block."""
    from django_outbox.models import OutboxPause

    if how in TROUBLES:
        rig.trouble(how)
    elif how == "is paused":
        for titles in KINDS.values():
            OutboxPause.objects.pause("listener", titles[-1])
    yield
    rig.trouble("")
    wait_until(lambda: asked(resumed), within=60, what="the database takes the resume")


def resumed() -> bool:
    """Resume what is paused; the database may refuse it, with a deadlock say."""
    from django_outbox.models import OutboxPause

    OutboxPause.objects.all().resume()
    return True


def waiting() -> int:
    """How many deliveries wait that are not those of the listener in trouble."""
    from django_outbox.models import OutboxEvent

    return OutboxEvent.objects.pending().exclude(listener__endswith=f" {TROUBLED}").count()


def measure_siblings(rig: Rig, spans: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Compare how long the others waited; if trouble held them up, they would wait until its end.

    The better of the rounds counts: a busy machine may stand still for seconds in one of them. It
    may lose a notification, too; the poll that this costs is no part of the comparison.
    """
    evidence = rig.evidence()
    runs = oracle.executions(evidence, oracle.Verdict())
    found = {how: min(others(evidence, runs, *each) for each in own) for how, own in spans.items()}
    calm = found.pop("is well")
    rig.measure("95 % of the others' waits while all is well, s", calm)
    most = 1.5 * calm + rig.outbox["POLL_INTERVAL"]
    for how, wait in found.items():
        rig.measure(f"the same while one {how}, s", wait, most=most)
    offs = sum(each.kind == WRITE_OFF for each in evidence.faults)
    rig.measure("calls of one in trouble that were written off", offs, least=1)


def others(
    evidence: Evidence, runs: Mapping[str, Sequence[Run]], since: float, until: float
) -> float:
    """Return the wait that 95 % of the others' deliveries of that time did not exceed."""
    innocent = sorted(
        own[0].start - evidence.intents[event_id].at
        for event_id, each in runs.items()
        if since <= evidence.intents[event_id].at < until
        for own in by_listener(each)
        if lane_of(own[0].listener) != TROUBLED
    )
    return oracle.percentile(innocent, 0.95) or 0.001
