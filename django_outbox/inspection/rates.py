"""Rates of the last minutes: what the workers of a database settled, by their statistics."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.db.models import Sum

from ..models import OutboxStatistics

PERIOD: Final = 300  # seconds
SPAN: Final = 60  # seconds that a row of statistics covers
MAX_DEAD_SHARE: Final = 0.1  # of the events that ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Counts of the last ``PERIOD`` seconds, of all event types and workers."""

    done: int = 0
    retry: int = 0  # executions that failed and will be repeated
    dead: int = 0
    rescued: int = 0  # events that lost workers had leased

    @property
    def dead_share(self) -> float:
        """Return which share of the events that ended are dead, from 0 to 1."""
        return self.dead / (self.done + self.dead) if self.dead else 0.0

    @property
    def is_stalled(self) -> bool:
        """Return whether executions fail, and no event is done."""
        return bool(self.retry) and not self.done


def rates(alias: str, now: datetime) -> Rates:
    """Return the rates of a database; ``now`` is its clock."""
    rows = OutboxStatistics.objects.using(alias)
    recent = rows.since(now - timedelta(seconds=PERIOD), span=SPAN)
    sums = recent.aggregate(**{name: Sum(name, default=0) for name in Rates.__dataclass_fields__})
    return Rates(**sums)
