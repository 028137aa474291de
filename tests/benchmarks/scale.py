"""How much is measured: minutes for a look, half an hour for the figures that are published."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scale:
    repeats: int = 5
    events: int = 100_000  # of a backlog
    latencies: int = 300  # events a repeat
    transactions: int = 500  # a repeat
    seconds: float = 2.0  # that a measurement by time takes
    keyed_events: int = 20_000
    reference: str = ""  # what a drain is compared with; empty: both
    due_rows: int = 200_000
    in_flight: int = 50_000
    future_rows: int = 1_000_000
    done_rows: int = 5_000_000
    blocked_rows: int = 50_000  # behind one key


QUICK = Scale(
    repeats=3,
    seconds=1.0,
    events=20_000,
    latencies=100,
    transactions=100,
    due_rows=100_000,
    in_flight=20_000,
    future_rows=100_000,
    done_rows=200_000,
    blocked_rows=20_000,
    keyed_events=5_000,
)
FULL = Scale()
