"""Listeners that take 10 ms, as a call over a network does: threads, and the event loop."""

from __future__ import annotations

from django_outbox.conf import Settings

from . import backlog
from .drain import drain
from .figures import Figure, in_turn
from .listeners import WAIT
from .scale import Scale
from .witness import Witness


def run(scale: Scale, witness: Witness) -> list[Figure]:
    slots = Settings().ASYNC_CONCURRENCY

    def by(number: int, event_type: str, *arguments: str) -> float:
        events = max(1000, int(scale.seconds * number / WAIT) // 100 * 100)
        backlog.fill(events, event_type=event_type)
        return drain(events, witness, *arguments)

    cases = {
        f"{number} threads": (number, "benchmark.wait", "--workers", str(number))
        for number in (4, 16, 64)
    }
    cases["async def"] = (slots, "benchmark.await")  # type: ignore[assignment]
    found = in_turn(
        {name: lambda case=case: by(*case) for name, case in cases.items()},  # type: ignore[misc]
        scale.repeats,
    )
    return [
        Figure(
            name=f"10 ms listeners, {name}",
            unit="events/s",
            values=values,
            references=[cases[name][0] / WAIT] * len(values),
            reference=f"{cases[name][0]} at a time, without any overhead",
        )
        for name, values in found.items()
    ]
