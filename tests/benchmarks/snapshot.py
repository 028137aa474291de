"""A drain beside a transaction that was left open: its old snapshot keeps all dead rows alive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext

from django.db import connection

from . import backlog, raw
from .drain import drain
from .figures import Figure, in_turn
from .scale import Scale
from .witness import STEP, Witness

BEGIN = {
    "postgresql": "BEGIN ISOLATION LEVEL REPEATABLE READ",
    "mysql": "START TRANSACTION WITH CONSISTENT SNAPSHOT",
    "sqlite": "BEGIN",
}


def run(scale: Scale, witness: Witness) -> list[Figure]:
    fifths: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}

    def measure(name: str) -> float:
        backlog.fill(scale.events)
        with old_snapshot() if name == "with" else nullcontext():
            rate = drain(scale.events, witness)
        fifths[name].append(first_and_last(witness.calls(), scale.events))
        return rate

    in_turn({name: lambda name=name: measure(name) for name in fifths}, scale.repeats)  # type: ignore[misc]
    return [
        Figure(
            name=f"last fifth of a drain of {scale.events:,} events, {name} an old snapshot open",
            unit="events/s",
            reference="first fifth",
            bar=bar,
            values=[last for _, last in fifths[name]],
            references=[first for first, _ in fifths[name]],
        )
        for name, bar in (("with", "≥ 0.7"), ("without", ""))
    ]


@contextmanager
def old_snapshot() -> Iterator[None]:
    with closing(raw.connect()) as session:
        cursor = session.cursor()
        cursor.execute(BEGIN[connection.vendor])
        cursor.execute(f"SELECT count(*) FROM {backlog.TABLE}")
        cursor.fetchall()
        yield


def first_and_last(calls: list[float], events: int) -> tuple[float, float]:
    """Return events a second in the first and in the last fifth."""
    fifth = events // STEP // 5
    calls = calls[: 5 * fifth]
    return (
        (fifth - 1) * STEP / (calls[fifth - 1] - calls[0]),
        (fifth - 1) * STEP / (calls[-1] - calls[-fifth]),
    )
