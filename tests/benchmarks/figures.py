"""A figure: what was measured several times in turn with its reference, and the ratios of pairs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Values, those of the reference from the same rounds, and the target.

    A target ("≥ 0.8") is one for the ratio where there is a reference, else for the value.
    """

    name: str
    unit: str
    values: list[float]
    reference: str = ""  # what it is compared with
    references: list[float] = field(default_factory=list)
    bar: str = ""
    failure: str = ""  # why there are no values

    @property
    def ratios(self) -> list[float]:
        """Value by reference, round by round."""
        if not self.references:
            return []
        return [ours / theirs for ours, theirs in zip(self.values, self.references, strict=True)]

    @property
    def judged(self) -> list[float]:
        """What the target is for."""
        return self.ratios or self.values

    @property
    def reached(self) -> bool | None:
        """Whether the median meets the target; None without one."""
        if not self.bar or not self.values:
            return None
        sign, limit = self.bar.split()
        middle = statistics.median(self.judged)
        return middle >= float(limit) if sign == "≥" else middle <= float(limit)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Spread:
    """The median of some values, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.low)} to {short(self.high)})"


def short(value: float) -> str:
    """Three significant digits, thousands whole and with commas."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 2 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 4 if abs(value) < 0.01 else 2)}f}"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that is not below ``percent`` of them all (nearest rank)."""
    rank = math.ceil(percent / 100 * len(values))
    return sorted(values)[max(rank, 1) - 1]


def in_turn(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure each once a round; every second round backwards, so that no place is the better."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds):
        order = list(measures) if number % 2 == 0 else list(reversed(measures))
        for name in order:
            found[name].append(measures[name]())
    return found
