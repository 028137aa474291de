"""Drain of a backlog: one worker process with default settings beside the bare driver."""

from __future__ import annotations

from django.db import connection

from . import backlog, raw
from .figures import Figure, in_turn
from .scale import Scale
from .witness import STEP, Witness
from .workers import WorkerProcess

WARM_UP = 200  # events that no contestant is timed for


BARS = {"postgresql": "≥ 0.9", "mysql": "≥ 0.85", "sqlite": "≥ 0.6"}  # beside the best known


def run(scale: Scale, witness: Witness) -> list[Figure]:
    """Compare the worker with the best known statements and its own, or with one of them."""

    def by_worker() -> float:
        backlog.fill(scale.events)
        return drain(scale.events, witness)

    def by_driver(reference: str) -> float:
        backlog.fill(scale.events)
        return raw.drain(scale.events, reference)

    references = [scale.reference] if scale.reference else ["best", "same"]
    drivers = {each: lambda each=each: by_driver(each) for each in references}
    found = in_turn({"worker": by_worker, **drivers}, scale.repeats)
    return [
        Figure(
            name=f"drain of {scale.events:,} events, one worker",
            unit="events/s",
            values=found["worker"],
            references=found[each],
            reference=raw.REFERENCES[each],
            bar=BARS[connection.vendor] if each == "best" else "",
        )
        for each in references
    ]


def drain(
    events: int, witness: Witness, *arguments: str, processes: int = 1, keys: str = ""
) -> float:
    """Have workers drain; return events a second from the first 200 calls to the last settle."""
    witness.clear()
    lines = events // STEP - processes  # what is left over in each process makes no line
    with WorkerProcess(*arguments) as worker:
        worker.wait_for(lambda: len(witness) >= lines, "end of the calls")
        end = worker.wait_until_settled(keys)
    return (events - WARM_UP) / (end - witness.calls()[WARM_UP // STEP - 1])
