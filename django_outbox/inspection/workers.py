"""Live and lost workers, as their rows in the database show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from ..conf import current
from ..models import OutboxWorker
from ..models.fields import age

MAX_WORKERS: Final = 1000  # those with the latest heartbeats


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A live or lost worker; the row of a lost one is removed after ten leases."""

    id: str
    hostname: str
    pid: int
    started_at: datetime
    heartbeat_age: float  # seconds
    is_silent: bool  # for longer than a lease; other workers rescue its events
    mode: str
    held: int
    running: Sequence[tuple[str, str, float]]  # event type, event id, seconds; the longest first
    queues: Sequence[str] | None  # that it serves; None: all, as in releases without queues

    def serves(self, queue: str) -> bool:
        """Return whether it serves a queue."""
        return self.queues is None or queue in self.queues


def workers(alias: str, now: datetime) -> list[WorkerInfo]:
    """Return the workers of a database, the oldest first; ``now`` is the database's clock."""
    rows = OutboxWorker.objects.using(alias).order_by("-heartbeat_at", "pk")[:MAX_WORKERS]
    found = [_worker_info(row, age(row.heartbeat_at, now)) for row in rows]
    return sorted(found, key=lambda each: (each.started_at, each.id))


def _worker_info(row: OutboxWorker, heartbeat_age: float) -> WorkerInfo:
    try:
        info = json.loads(row.info or "{}")
    except ValueError:
        info = {}
    return WorkerInfo(
        id=row.id,
        hostname=row.hostname,
        pid=row.pid,
        started_at=row.started_at,
        heartbeat_age=heartbeat_age,
        is_silent=heartbeat_age > current().LEASE,
        mode=info.get("mode", ""),
        held=info.get("held", 0),
        running=[
            (each["event_type"], each["event_id"], each["seconds"] + heartbeat_age)
            for each in info.get("running", [])
        ],
        queues=info.get("queues"),
    )
