"""What a seed decides about a history before it begins: its kind, its settings, its faults."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEASE = 3.0  # seconds
UNDISTURBED = ("done",)
PAUSED = (
    ("event_type", "plain"),
    ("event_type", "order.placed"),
    ("listener", "fan mail"),
    ("stream", "key0"),
)
ODD = ("done", "done", "failed", "failed twice", "deferred", "final", "always failed")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of history: what is likely in it. Probabilities are per statement."""

    types: tuple[str, ...] = ("plain", "placed", "paid", "fan", "many", "awaited", "mailed")
    acts: tuple[str, ...] = ODD
    durations: tuple[float, ...] = (0.0, 0.001, 0.05, 0.05, 0.4)  # seconds of a call
    keyed: float = 0.5  # of the events
    keys: int = 3
    slotted: float = 0.0  # of the events without a key
    threads: tuple[int, ...] = (1, 2, 3)  # of which a history has one
    slow_before: float = 0.0  # a statement stalls before it takes effect
    slow_after: float = 0.0  # or before its answer arrives
    lost_answers: float = 0.0
    failures: float = 0.0  # a statement fails, and has done nothing
    faulty_places: bool = False  # some statements, log lines, signals, doorbells raise
    slow_heartbeat: bool = False  # else its statements are never slow
    stalls: tuple[float, ...] = (0.01, 0.3, 0.3, 1.5, 2.8, 3.6)  # seconds
    kills: float = 0.0  # of a worker, each second
    suspensions: float = 0.0
    deploys: float = 0.0
    pauses: float = 0.0
    paused: tuple[tuple[str, str], ...] = (*PAUSED, ("queue", "mail"), ("queue", "default"))
    paused_for: tuple[float, float] = (0.2, 3.0)  # seconds
    interrupted: float = 0.0  # after a step of a resume: it goes no further
    replays: float = 0.0
    outages: float = 0.0  # of what the queue "mail" sends to
    poison: int = 0  # events that kill their worker
    skew: float = 0.0  # part by which monotonic clocks run fast or slow
    hot: float = 0.3  # of the writes, made in a worker's process
    workers: tuple[int, ...] = (1, 2, 2, 3, 5)
    events: tuple[int, int] = (8, 30)
    seconds: tuple[float, float] = (4.0, 9.0)  # of virtual time, in which things happen
    outbox: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_calm(self) -> bool:
        """Return whether no process and no statement is disturbed."""
        statements = self.slow_before or self.slow_after or self.lost_answers or self.failures
        return not (
            statements
            or self.faulty_places
            or self.kills
            or self.suspensions
            or self.deploys
            or self.poison
        )


KINDS = {
    "calm": Kind(),
    "kills": Kind(kills=0.4),
    "suspensions": Kind(suspensions=0.4),
    "slow": Kind(slow_before=0.02, slow_after=0.02),
    "stalled releases": Kind(
        slow_before=0.06,
        types=("placed", "paid"),
        keyed=1.0,
        acts=UNDISTURBED,
        durations=(0.05, 0.4, 1.5),
        stalls=(2.5, 3.1, 3.4, 3.7),
    ),
    "late answers": Kind(
        slow_after=0.08, threads=(1,), durations=(0.4, 1.0), stalls=(1.5, 2.2, 2.8, 3.6)
    ),
    "lost answers": Kind(lost_answers=0.03, failures=0.01),
    "slow heartbeat": Kind(
        slow_heartbeat=True,
        slow_before=0.04,
        slow_after=0.04,
        threads=(1,),
        durations=(0.4, 1.0, 2.0, 4.0),
        events=(6, 14),
        stalls=(0.3, 0.8, 1.5, 2.5),
    ),
    "long calls": Kind(durations=(0.4, 1.0, 4.0, 8.0), threads=(1, 2), events=(6, 14)),
    "several at once": Kind(
        types=("plain", "placed"),
        keyed=0.2,
        acts=("done", "done", "done", "failed", "deferred"),
        durations=(*(0.0,) * 7, 0.1, 0.1),
        suspensions=1.0,
        threads=(1,),
        workers=(1, 2),
        events=(30, 60),
    ),
    "skew": Kind(skew=0.1, kills=0.1, suspensions=0.1, threads=(1,), durations=(0.4, 1.0, 2.0)),
    "hung": Kind(
        types=("hanging", "hanging", "placed", "awaited", "hanging many"),
        slow_after=0.01,
        acts=("done", "failed", "hung", "hung"),
    ),
    "batches": Kind(
        types=("many", "many", "many awaited"),
        slow_after=0.01,
        kills=0.1,
        suspensions=0.1,
        acts=("done", "done", "done", "failed", "final", "deferred"),
        events=(20, 40),
    ),
    "keyed": Kind(
        types=("placed", "paid", "many"),
        keyed=1.0,
        keys=2,
        kills=0.1,
        suspensions=0.1,
        slow_before=0.01,
        slow_after=0.01,
        lost_answers=0.01,
    ),
    "slots": Kind(
        types=("placed", "fan", "many"),
        keyed=0.0,
        slotted=0.9,
        kills=0.2,
        suspensions=0.2,
        slow_before=0.02,
        slow_after=0.02,
        lost_answers=0.01,
        events=(20, 40),
    ),
    "fan-out": Kind(types=("fan",), kills=0.2, suspensions=0.1, slow_after=0.01),
    "pauses": Kind(pauses=0.6, kills=0.1, slow_after=0.01),
    "resumes": Kind(
        types=("plain", "placed", "fan"),
        pauses=5.0,
        paused=PAUSED,
        paused_for=(0.0, 0.6),
        interrupted=0.1,
        keyed=0.7,
        slow_before=0.2,
        stalls=(0.05, 0.3, 0.7),
        acts=("done", "done", "deferred"),
        durations=(0.0, 0.05),
        threads=(1, 2),
        workers=(2, 3),
        events=(6, 12),
    ),
    "breakers": Kind(
        types=("mailed", "mailed", "fan", "plain"),
        outages=0.4,
        kills=0.1,
        acts=UNDISTURBED,
        slow_after=0.01,
    ),
    "replays": Kind(replays=1.0, acts=("done", "failed", "final", "always failed"), kills=0.1),
    "deploys": Kind(deploys=0.5, durations=(0.05, 0.4, 1.0, 4.0)),
    "poison": Kind(
        poison=1,
        types=("plain", "placed", "paid"),
        events=(6, 16),
        acts=UNDISTURBED,
        threads=(1, 2),
        durations=(0.4, 1.0),
    ),
    "faulty places": Kind(faulty_places=True),
    "idle": Kind(
        types=("plain",),
        acts=UNDISTURBED,
        workers=(1,),
        events=(1, 1),
        seconds=(60.0, 60.0),
        outbox={
            "LEASE": 30.0,
            "POLL_INTERVAL": 5.0,
            "PROBE_INTERVAL": 0.2,
            "DOORBELL": None,
            "QUEUES": {f"queue{number}": {} for number in range(15)},
        },
    ),
    "all": Kind(
        slow_before=0.005,
        slow_after=0.005,
        lost_answers=0.003,
        failures=0.003,
        kills=0.1,
        suspensions=0.1,
        deploys=0.1,
        pauses=0.1,
        replays=0.1,
        outages=0.1,
        skew=0.05,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    name: str
    kind: Kind
    workers: int
    events: int
    outbox: Mapping[str, Any]
    seconds: float  # of virtual time in which events are written and faults strike
    preemption: float  # probability that another thread runs where one takes a lock


def plan_of(seed: int, name: str | None = None) -> Plan:
    """Return what a seed decides; ``name`` is of the kind, else the seeds take turns."""
    chance = random.Random(f"plan {seed}")
    name = name or [*KINDS][seed % len(KINDS)]
    kind = KINDS[name]
    outbox = {
        "LEASE": LEASE,
        "POLL_INTERVAL": chance.choice([0.5, 1.0, 5.0]),
        "PROBE_INTERVAL": chance.choice([0.2, 1.0, 1.0]),
        "WORKERS": chance.choice(kind.threads),
        "LOCK_WAIT": 1.0,
        "MAX_RESCUES": chance.choice([3, 5]),
        "RETRY": {"policy": "fixed", "delay": chance.choice([0.0, 0.2, 1.0]), "max_attempts": 4},
        "DRAIN_TIMEOUT": chance.choice([0.5, 2.0]),
        "ON_DEAD": chance.choice(["continue", "continue", "block"]),
        "STOP_ON_FIRST_FAILURE": chance.random() < 0.7,
        "RETENTION_DONE": chance.choice([604_800.0, 604_800.0, 0]),
        "QUEUES": {"mail": {"WORKERS": 1, "BREAKER": {"failures": 3, "within": 5, "pause": 1}}},
        "DOORBELL": chance.choice(["tests.simulation.doorbell.Bell"] * 3 + [None]),
        **kind.outbox,
    }
    return Plan(
        seed=seed,
        name=name,
        kind=kind,
        workers=chance.choice(kind.workers),
        events=chance.randint(*kind.events),
        outbox=outbox,
        seconds=chance.uniform(*kind.seconds),
        preemption=chance.choice([0.0, 0.01, 0.05, 0.2]),
    )
