"""Batch listeners: the drain through one that does nothing, and what it costs an idle system."""

from __future__ import annotations

from . import backlog, raw
from .drain import drain
from .figures import Figure, in_turn, percentile
from .latency import APART, Measured, measure
from .scale import Scale
from .witness import Witness
from .workers import WorkerProcess

BARS = {"best": "≥ 0.95", "same": ""}
NO_SLOWER = "≤ 1.10"  # the same, as far as it can be measured


def run(scale: Scale, witness: Witness) -> list[Figure]:
    return [*drains(scale, witness), *latencies(scale, witness)]


def drains(scale: Scale, witness: Witness) -> list[Figure]:
    """Compare the drain with the bare driver's, and with one that calls for each event."""

    def by_batches() -> float:
        backlog.fill(scale.events, event_type="benchmark.bulk")
        return drain(scale.events, witness)

    def one_by_one() -> float:
        backlog.fill(scale.events)
        return drain(scale.events, witness)

    def by_driver(reference: str) -> float:
        backlog.fill(scale.events)
        return raw.drain(scale.events, reference)

    references = [scale.reference] if scale.reference else ["best", "same"]
    drivers = {each: lambda each=each: by_driver(each) for each in references}
    found = in_turn({"batches": by_batches, **drivers, "single": one_by_one}, scale.repeats)

    def beside(name: str, reference: str, bar: str = "") -> Figure:
        return Figure(
            name=f"drain of {scale.events:,} events in batches of 500, one worker",
            unit="events/s",
            values=found["batches"],
            references=found[name],
            reference=reference,
            bar=bar,
        )

    return [
        *(beside(each, raw.REFERENCES[each], BARS[each]) for each in references),
        beside("single", "one event in a call"),
    ]


def latencies(scale: Scale, witness: Witness) -> list[Figure]:
    """Compare the time from a commit to a batch listener with that to an ordinary one.

    The events of both take turns in one worker, so that a busy machine delays both alike.
    """
    ordinary: list[Measured] = []
    batches: list[Measured] = []
    for _ in range(scale.repeats):
        backlog.empty()
        with WorkerProcess():
            found = measure(
                2 * scale.latencies,
                witness,
                lambda: APART,
                event_type=["benchmark.tell", "benchmark.tell_all"],
            )
        # An odd number of events goes before those that are counted.
        batches.append(found[::2])
        ordinary.append(found[1::2])

    def one(percent: int) -> Figure:
        return Figure(
            name=f"commit to batch listener at idle, p{percent}",
            unit="ms",
            bar=NO_SLOWER,
            values=[percentile(each, percent) for each in batches],
            reference="to an ordinary listener",
            references=[percentile(each, percent) for each in ordinary],
        )

    return [one(50), one(99)]
