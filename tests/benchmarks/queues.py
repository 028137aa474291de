"""Queues: what a queue of hung or slow listeners costs the events of another one; rates."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from django.db import connection

from . import backlog
from .figures import Figure, percentile
from .latency import APART, Measured, measure
from .scale import Scale
from .witness import Witness
from .workers import WorkerProcess

SLOW: dict[str, Any] = {"QUEUES": {"slow": {"WORKERS": 4}}}
LIMITED: dict[str, Any] = {"QUEUES": {"slow": {"WORKERS": 4, "RATE": "50/s"}}}
RATE_WORKERS = 5
WINDOW = 10.0  # seconds in which calls are counted
SETTLING = 5.0  # seconds that workers get to know each other


def run(scale: Scale, witness: Witness) -> list[Figure]:
    undisturbed: list[Measured] = []
    hung: list[Measured] = []
    alone: list[Measured] = []
    shared: list[Measured] = []
    for _ in range(scale.repeats):
        backlog.empty()
        with WorkerProcess(**SLOW):
            undisturbed.append(one_by_one(scale, witness))
        backlog.empty()
        backlog.insert(
            scale.due_rows,
            due=backlog.DUE,
            event_type="benchmark.hang",
            text=backlog.TEXT,
            queue="slow",
        )
        backlog.analyze()
        with WorkerProcess("--drain-timeout", "0", **SLOW):
            hung.append(one_by_one(scale, witness))
        backlog.empty()
        with WorkerProcess(**SLOW):
            alone.append(one_by_one(scale, witness))
            shared.append(one_by_one(scale, witness, event_type="benchmark.shared"))
    return [
        compared("while another queue has hung listeners and a backlog", hung, undisturbed),
        compared("of an event shared with a slow listener of another queue", shared, alone),
        *rates(scale, witness),
    ]


def one_by_one(scale: Scale, witness: Witness, **options: Any) -> Measured:
    return measure(scale.latencies, witness, lambda: APART, beside=True, **options)


def compared(name: str, found: list[Measured], references: list[Measured]) -> Figure:
    return Figure(
        name=f"commit to listener {name}, p95",
        unit="ms",
        bar="≤ 1.5",
        values=[percentile(each, 95) for each in found],
        reference="undisturbed",
        references=[percentile(each, 95) for each in references],
    )


def rates(scale: Scale, witness: Witness) -> list[Figure]:
    """Count the calls a second of a queue with a rate of 50 a second and five workers."""
    if connection.vendor == "sqlite" and scale.repeats < RATE_WORKERS:
        return []
    backlog.empty()
    backlog.insert(
        10_000, due=backlog.DUE, event_type="benchmark.limited", text=backlog.TEXT, queue="slow"
    )
    backlog.analyze()
    witness.clear()
    with ExitStack() as stack:
        for _ in range(RATE_WORKERS):
            stack.enter_context(WorkerProcess("--drain-timeout", "0", **LIMITED))
        time.sleep(SETTLING + 2.5 * WINDOW)  # the measurement
    times = [at for name, at in witness.lines() if name == "limited"]
    begins = times[0] + SETTLING
    starts = [begins + n / 10 for n in range(int(10 * (times[-1] - WINDOW - begins)))]
    counts = [sum(start <= at < start + WINDOW for at in times) / WINDOW for start in starts]
    name = "calls in 10 s, RATE of 50/s, five workers"
    return [
        Figure(name=f"fewest {name}", unit="calls/s", values=[min(counts)], bar="≥ 45"),
        Figure(name=f"most {name}", unit="calls/s", values=[max(counts)], bar="≤ 55"),
    ]
