"""From the commit to the listener's start: an idle system, events about 10 ms apart."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import cycle

from django.db import transaction

import django_outbox as outbox
from tests.waiting import wait_until

from .backlog import empty
from .figures import Figure, percentile
from .payload import PAYLOAD
from .scale import Scale
from .witness import Witness
from .workers import WorkerProcess

APART = 0.01  # seconds
WARM_UP = 20  # events that are not counted
PATIENCE = 30.0  # seconds

Measured = list[float]  # milliseconds


def run(scale: Scale, witness: Witness) -> list[Figure]:
    separate: list[Measured] = []
    keyed: list[Measured] = []
    at_random: list[Measured] = []
    embedded: list[Measured] = []
    for _ in range(scale.repeats):
        with WorkerProcess():
            separate.append(measure(scale.latencies, witness, lambda: APART))
            keyed.append(measure(scale.latencies, witness, lambda: APART, key="one for all"))
            at_random.append(
                measure(scale.latencies, witness, lambda: random.expovariate(1 / APART))
            )
        with outbox.Worker(purge=False):
            embedded.append(measure(scale.latencies, witness, lambda: APART))
    return [
        *percentiles("separate worker", separate, p50="≤ 1.2", p99="≤ 4"),
        *percentiles("separate worker, events of one key", keyed),
        *percentiles("separate worker, events at random", at_random, p99="≤ 5"),
        *percentiles("embedded worker", embedded, p50="≤ 0.8"),
    ]


def percentiles(name: str, found: list[Measured], *, p50: str = "", p99: str = "") -> list[Figure]:
    def one(percent: int, bar: str) -> Figure:
        values = [percentile(each, percent) for each in found]
        return Figure(
            name=f"commit to listener, {name}, p{percent}", unit="ms", values=values, bar=bar
        )

    return [one(50, p50), one(99, p99)]


def measure(
    events: int,
    witness: Witness,
    pause: Callable[[], float],
    *,
    key: str | None = None,
    event_type: str | Sequence[str] = "benchmark.tell",
    beside: bool = False,
) -> Measured:
    """Write events one by one; return milliseconds from each commit to its listener's start.

    ``beside`` what the table has already. Several types take turns, the first one first.
    """
    types = cycle([event_type] if isinstance(event_type, str) else event_type)
    if not beside:
        empty()
    witness.clear()
    write(0, key, next(types))
    wait_until(lambda: len(witness) > 0, within=PATIENCE, what="the worker's first call")
    committed = {}
    for number in range(1, WARM_UP + events + 1):
        time.sleep(pause())  # the system is idle between two events
        committed[str(number)] = write(number, key, next(types))
    wait_until(lambda: len(witness) > WARM_UP + events, within=PATIENCE, what="the last call")
    started = dict(witness.lines())
    return [
        1000 * (started[str(number)] - committed[str(number)])
        for number in range(WARM_UP + 1, WARM_UP + events + 1)
    ]


def write(number: int, key: str | None = None, event_type: str = "benchmark.tell") -> float:
    """Write one event; return when its commit had returned, before anybody was rung."""
    at = []
    with transaction.atomic():
        transaction.on_commit(lambda: at.append(time.monotonic()))
        outbox.write(event_type, PAYLOAD, aggregate_id=str(number), key=key)
    return at[0]
