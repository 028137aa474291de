"""Batch listeners: the drain of a backlog through one that does nothing, beside the bare driver."""

from __future__ import annotations

from . import backlog, raw
from .drain import drain
from .figures import Figure, in_turn
from .scale import Scale
from .witness import Witness


def run(scale: Scale, witness: Witness) -> list[Figure]:
    def by_batches() -> float:
        backlog.fill(scale.events, event_type="benchmark.bulk")
        return drain(scale.events, witness)

    def by_driver() -> float:
        backlog.fill(scale.events)
        return raw.drain(scale.events)

    def one_by_one() -> float:
        backlog.fill(scale.events)
        return drain(scale.events, witness)

    contestants = {"batches": by_batches, "driver": by_driver, "single": one_by_one}
    found = in_turn(contestants, scale.repeats)
    name = f"drain of {scale.events:,} events in batches of 500, one worker"
    return [
        Figure(name=name, unit="events/s", values=found["batches"], references=found["driver"],
               reference="the same statements on the bare driver", bar="≥ 0.95"),
        Figure(name=name, unit="events/s", values=found["batches"], references=found["single"],
               reference="one event in a call"),
    ]  # fmt: skip
