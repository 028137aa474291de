"""How much is measured: minutes for a look, half an hour for the figures that are published."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scale:
    repeats: int = 5
    events: int = 30_000  # of a backlog
    latencies: int = 300  # events a repeat
    transactions: int = 200  # a repeat
    seconds: float = 1.0  # that a measurement by time takes
    due_rows: int = 100_000
    in_flight: int = 20_000
    future_rows: int = 100_000
    done_rows: int = 300_000
    memory_events: int = 200_000


QUICK = Scale()
FULL = Scale(
    events=100_000,
    transactions=500,
    seconds=3.0,
    due_rows=200_000,
    in_flight=50_000,
    future_rows=1_000_000,
    done_rows=5_000_000,
    memory_events=1_000_000,
)
