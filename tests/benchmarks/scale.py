"""How much is measured: minutes for a look, half an hour for the figures that are published."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scale:
    repeats: int = 5
    events: int = 30_000  # of a backlog
    latencies: int = 300  # events a repeat
    transactions: int = 200  # a repeat


QUICK = Scale()
FULL = Scale(events=100_000, transactions=500)
