"""Live and lost workers, as their rows show them, and the events that lost ones had leased."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from django.db import connections
from django.db.models import Value

from ..conf import current
from ..listeners import history
from ..models import OutboxEvent, OutboxStream, OutboxWorker
from ..models.fields import DatabaseNow, age
from ..sql import dialect_of
from .counts import PERIOD

MAX_WORKERS: Final = 1000  # those with the latest heartbeats
MAX_LOSSES: Final = 200  # events that are read
LATEST: Final = 10_000  # events and streams that fell due last, which are searched
COLUMNS: Final = ("id", "hostname", "pid", "started_at", "heartbeat_at")
MIN_LOST: Final = 2  # workers that an event must have lost before it is a suspect


class Running(msgspec.Struct, frozen=True):
    """A delivery that a worker runs, and for how long at its last heartbeat."""

    id: str
    event_type: str
    seconds: float


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A live or lost worker, and what it says of itself; the row of a lost one stays for a day."""

    id: str
    hostname: str
    pid: int
    started_at: datetime
    heartbeat_at: datetime
    heartbeat_age: float  # seconds
    is_silent: bool  # for longer than a lease; other workers rescue its events
    held: int = 0
    running: Sequence[Running] = ()  # the longest first
    queues: Sequence[str] | None = None  # that it serves; None: it does not say
    threads: Mapping[str, tuple[int, int]] = {}  # by queue: busy ones, and all
    stopping: bool = False  # it was told to stop, so that it is not missed
    listeners: Sequence[str] | None = None  # titles of its listeners; None: it does not say
    formerly: Sequence[str] = ()  # titles that these had before
    registry: str = ""  # digest of both

    @property
    def is_newly_lost(self) -> bool:
        """Return whether it was lost in the last ``PERIOD`` seconds."""
        return self.is_silent and self.heartbeat_age <= current().LEASE + PERIOD

    def as_row(self) -> dict[str, Any]:
        """Return plain values, as reports show them."""
        return {
            **{name: getattr(self, name) for name in ("id", "hostname", "pid", "started_at")},
            "heartbeat_age": round(self.heartbeat_age, 3),
            "lost": self.is_silent,
            "queues": self.queues,
        }

    def serves(self, queue: str) -> bool:
        """Return whether it serves a queue."""
        return self.queues is None or queue in self.queues


def clock_and_workers(alias: str) -> tuple[datetime, list[WorkerInfo]]:
    """Return the database's clock and its workers, by one query if there is a worker."""
    rows: Any = OutboxWorker.objects.using(alias).annotate(seen_at=DatabaseNow())
    found = [*rows.order_by("-heartbeat_at", "pk")[:MAX_WORKERS]]
    if not found:
        return dialect_of(connections[alias]).clock(), []
    now: datetime = found[0].seen_at
    workers = (_worker_info(row, age(row.heartbeat_at, now)) for row in found)
    return now, sorted(workers, key=lambda each: (each.started_at, each.id))


def missing(known: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    """Return the lost workers that no later worker replaced, those lost last first.

    A worker replaces one that was lost before it started, whatever its host or name. A worker that
    was told to stop is not missed. So the live workers and the missing ones are together as many
    as ran at the same time.
    """
    lost: list[tuple[datetime, str]] = []  # a heap: last heartbeat, id
    for each in sorted(known, key=lambda each: each.started_at):
        if lost and lost[0][0] < each.started_at:
            heapq.heappop(lost)
        if each.is_silent and not each.stopping:
            heapq.heappush(lost, (each.heartbeat_at, each.id))
    ids = {each for _heartbeat_at, each in lost}
    found = [each for each in known if each.id in ids]
    return sorted(found, key=lambda each: each.heartbeat_at, reverse=True)


def _worker_info(row: OutboxWorker, heartbeat_age: float) -> WorkerInfo:
    try:
        told = msgspec.json.decode(row.info or "{}")
    except ValueError:
        told = {}
    columns = {name: getattr(row, name) for name in COLUMNS}
    is_silent = heartbeat_age > current().LEASE
    found = {**told, **columns, "heartbeat_age": heartbeat_age, "is_silent": is_silent}
    return msgspec.convert(found, WorkerInfo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A pending event and the lost workers that had leased it."""

    id: str
    event_type: str
    workers: Sequence[tuple[str, datetime]]  # each lost worker, and when that was found


def losses(alias: str, now: datetime) -> list[Loss]:
    """Return the pending events that lost workers had leased, newest first.

    ``now``: the database's. Without partial indexes, only those among what fell due last.
    """
    rows: Any = OutboxEvent.objects.using(alias).rescued()
    if not connections[alias].features.supports_partial_indexes:
        rows = rows.filter(pk__in=_rescued_lately(alias, now + timedelta(seconds=current().LEASE)))
    found = []
    newest = rows.order_by("-pk").values_list("pk", "event_type", "history")
    for row_id, event_type, text in newest[:MAX_LOSSES]:
        lost = {each.by: each.at for each in history.entries(text) if each.kind == "lost"}
        found.append(Loss(id=row_id, event_type=event_type, workers=[*lost.items()]))
    return found


def _rescued_lately(alias: str, until: datetime) -> list[str]:
    """Search what fell due last, or will when its lease ends: an index would make claims deadlock.

    What a worker was lost with falls due, and an outcome sets its count to zero.
    """
    queries = []
    for table, due in ((OutboxEvent, "available_at"), (OutboxStream, "due_at")):
        rows: Any = table._default_manager.using(alias).filter(**{f"{due}__lte": until})
        names = rows.annotate(kind=Value(table._meta.model_name)).order_by(f"-{due}")
        queries.append(names.values_list("kind", "pk", "rescues")[:LATEST])
    found = {(kind, name) for kind, name, rescues in queries[0].union(queries[1]) if rescues}
    streams = [name for kind, name in found if kind == OutboxStream._meta.model_name]
    heads = OutboxStream.objects.using(alias).heads(streams[:MAX_LOSSES])
    return [
        *(name for kind, name in found if kind == OutboxEvent._meta.model_name),
        *(each.pk for each in heads.values()),
    ]


def suspects(found: Sequence[Loss]) -> list[Loss]:
    """Return the events that were leased by the most lost workers, at least ``MIN_LOST``.

    Workers lease several events at once, so that neighbours of the cause are suspects, too, until
    each was tried alone. Then only the cause is left.
    """
    most = max((len(each.workers) for each in found), default=0)
    return [each for each in found if len(each.workers) == most >= MIN_LOST]
