"""What the dialects' statements have in common: a claim, its columns, the fence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..outcomes import Decision

Row = tuple[Any, ...]

INSTANTS = ("occurred_at", "created_at", "deliver_at", "first_due_at")
LIGHT = ("event_id", "attempts", "rescues", "progress", *INSTANTS)
FULL = (
    "event_id", "attempts", "rescues", "progress", *INSTANTS,
    "event_type", "aggregate_type", "aggregate_id", "tenant_id", "payload", "headers", "unique_key",
)  # fmt: skip
TAIL = ("due_at", "was", "now")  # what a claim adds: the due time and owner it found, its clock

# A row that two lost workers held is a suspect: it is claimed alone, so that its neighbours are
# innocent. The lease that is found counts, for finding it is the rescue.
INNOCENT = "(rescues = 0 OR (rescues = 1 AND (locked_by IS NULL OR locked_by = %s)))"


# Only the owner settles, and only what is not settled yet: a stale worker changes nothing.
FENCE = "locked_by = %s AND status IN (0, 2)"
FENCE_OF_E = "e.locked_by = %s AND e.status IN (0, 2)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What to claim: due rows, or those of ``ids`` (the hot ones) that are due."""

    me: str
    lease: float  # seconds
    limit: int
    ids: Sequence[str] | None = None
    low: datetime | None = None  # skip what was due earlier: dead index entries lie there
    at: datetime | None = None  # instead of the database's now, for drain() and tests
    skip_recent: float = 0.0  # seconds
    exclude: Sequence[str] = ()
    suspects: bool = False  # only suspects instead of only innocents

    @property
    def columns(self) -> tuple[str, ...]:
        return FULL if self.ids is None else LIGHT


def marks(values: Collection[Any]) -> str:
    return ", ".join(["%s"] * len(values))


def plain(value: Any) -> Any:
    """Drivers adapt ints, not their subclasses."""
    return int(value) if isinstance(value, int) else value


def settle_values(event_id: str, decision: Decision) -> tuple[object, ...]:
    """One row of a settle's VALUES list: event_id, status, spent, delay, error, progress."""
    return (
        event_id, plain(decision.status), decision.spent, decision.delay, decision.error,
        decision.progress,
    )  # fmt: skip
