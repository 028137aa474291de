"""``Lease``: one claimed event and what this process knows of its hold on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from .. import hooks
from ..events import NO_HEADERS, Event, decode_headers, leased, stored_instant
from ..exceptions import PayloadError

BROUGHT = (  # what a hot event brings along, so that no claim reads it again
    "event_type", "aggregate_type", "aggregate_id", "tenant_id", "headers", "unique_key", "_text",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Lease:
    """A claimed event, from its claim to its settle."""

    event: Event
    owner: str  # who leased it: this worker
    due_at: datetime  # when it was due, for the lag
    now: datetime  # the database's clock at the claim
    rescued: bool  # taken over from a lost worker
    rescues: int  # that one included
    progress: str | None  # fan-out: JSON per listener
    fault: PayloadError | None  # why the row cannot be decoded
    deadline: float  # monotonic; nothing is started later without a renewal. Owner: Held
    started_at: float = 0.0  # monotonic; 0: not started. Owner: the thread that took it
    duration: float = 0.0  # seconds in listeners
    overdue_at: float = 0.0  # monotonic; when a plain listener has outrun its timeout
    cancelled: bool = False  # its task was cancelled by the worker, not by the listener

    @property
    def age(self) -> float:
        """Seconds from the event's first due time to the claim, by the database's clock."""
        first = self.event.first_due_at
        return (self.now - first).total_seconds() if first else 0.0


def take(
    row: Sequence[Any],
    columns: tuple[str, ...],
    *,
    deadline: float,
    me: str,
    hot: Event | None = None,
) -> Lease:
    """Make a lease of a claimed row; a hot event brings its payload along."""
    found = dict(zip(columns, row, strict=False))
    *_, due_at, was, now = row
    rescues, progress = found.pop("rescues"), found.pop("progress")
    fault = None
    if hot is not None:
        found.update({name: getattr(hot, name) for name in BROUGHT})
    else:
        found["_text"] = found.pop("payload")
        try:
            found["headers"] = decode_headers(found["headers"])
        except PayloadError as error:
            found["headers"], fault = NO_HEADERS, error
    found["available_at"] = due = _instant(due_at)
    found["source"] = "cold" if hot is None else "hot"
    return Lease(
        event=leased(found, hooks.serializer().loads),
        owner=me,
        due_at=due,
        now=_instant(now),
        rescued=was is not None and was != me,
        rescues=rescues,
        progress=progress,
        fault=fault,
        deadline=deadline,
    )


def _instant(value: Any) -> datetime:
    found = stored_instant(value)
    assert found is not None  # a claimed row is due, and the clock tells a time
    return found
