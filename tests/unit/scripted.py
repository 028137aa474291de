"""A clock that a test moves, and a database whose answers it gives."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from django.db import connections

from django_outbox.delivery.lease import Lease, Run, columns_of, lease_from_row, row_run
from django_outbox.sql.values import FULL, KEYED, STREAMS

SCRIPTED = "scripted"  # the alias of the database, and its vendor
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
VALUES: dict[str, Any] = {
    "attempts": 0,
    "rescues": 0,
    "queue": "default",
    "occurred_at": NOW,
    "created_at": NOW,
    "first_due_at": NOW,
    "event_type": "order.placed",
    "listener": "order.placed",
    "aggregate_type": "",
    "payload": "{}",
    "status": 0,
}


class Clock:
    """A monotonic clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0  # seconds

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def connection() -> Any:
    """Return the connection to the scripted database."""
    return connections[SCRIPTED]


def row(event_id: str, columns: tuple[str, ...] = FULL, **values: Any) -> tuple[Any, ...]:
    """Return a row of these columns; what is not given is NULL, or as in a new event."""
    given = {"id": event_id, "event_id": event_id, **VALUES, **values}
    return tuple(given.get(name) for name in columns)


def claimed_row(
    event_id: str,
    columns: tuple[str, ...] = FULL,
    *,
    was: str | None = None,
    at: datetime = NOW,
    **values: Any,
) -> tuple[Any, ...]:
    """Return a row as a claim does, with due time, previous owner and when it was leased."""
    return (*row(event_id, columns, **values), NOW, was, at)


def run_of(
    found: tuple[Any, ...], columns: tuple[str, ...] = FULL, *, deadline: float = 10_000.0
) -> Run:
    """Return the run of a row as it was claimed."""
    return row_run(found, deadline=deadline, me="me")


def stream(key: str, *, deadline: float = 10_000.0) -> Run:
    """Return a leased stream of which nothing was read yet."""
    return Run(
        table=STREAMS, id=f":{key}", queue="default", locked_at=NOW, deadline=deadline, read_at=0.0
    )


def lease(event_id: str = "a", *, of: Run | None = None, deadline: float = 10_000.0) -> Lease:
    """Return an event that is leased, by itself or with a stream."""
    key, name = (None, None) if of is None else (of.id[1:], of.id)
    columns = FULL if of is None else KEYED
    found = claimed_row(event_id, columns, key=key, stream=name, seq=1)
    run = run_of(found, deadline=deadline) if of is None else of
    return lease_from_row(found, columns_of(columns), run=run, me="me")
