"""Drain of a backlog by one, two and four worker processes."""

from __future__ import annotations

from . import backlog
from .drain import drain
from .figures import Figure, in_turn
from .scale import Scale
from .witness import Witness


def run(scale: Scale, witness: Witness) -> list[Figure]:
    def by(processes: int) -> float:
        backlog.fill(scale.events)
        return drain(scale.events, witness, "--processes", str(processes), processes=processes)

    found = in_turn({"1": lambda: by(1), "2": lambda: by(2), "4": lambda: by(4)}, scale.repeats)
    return [
        Figure(
            name=f"drain of {scale.events:,} events, {number} processes",
            unit="events/s",
            values=found[number],
            references=found["1"],
            reference="one process",
            bar="≥ 1.6" if number == "2" else "",
        )
        for number in ("2", "4")
    ]
