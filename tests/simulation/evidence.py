"""What the oracle judges by: settings, the tables as they are committed, calls of listeners."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

EVENTS = """SELECT id, event_id, listener, routes, event_type, status, attempts, rescues,
    available_at, locked_by, locked_at, stream, seq, result, done_at FROM outbox_event"""
STREAMS = "SELECT stream, due_at, locked_by, locked_at FROM outbox_stream"
PARKED = """SELECT id, queue FROM outbox_event
    WHERE queue LIKE 'paused:%' AND status IN (0, 2) AND available_at IS NOT NULL
    UNION ALL SELECT stream, queue FROM outbox_stream
    WHERE queue LIKE 'paused:%' AND due_at IS NOT NULL"""
REPLAYS = "SELECT COALESCE(SUM(done), 0), COALESCE(SUM(state = 'open'), 0) FROM outbox_operation"
PAUSES = "SELECT kind, name, 'paused:' || id FROM outbox_pause"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the settings of a history promise."""

    listeners: Mapping[str, frozenset[str]]  # titles by event type
    queues: Mapping[str, str]  # by title
    max_attempts: int
    max_rescues: int
    dead_blocks: bool  # a dead event blocks those behind it
    failure_blocks: bool  # so does one that failed and is tried again
    is_calm: bool = False  # no process and no statement is disturbed


@dataclass(slots=True)
class Event:
    """A row of the table of events: the delivery of one to a listener."""

    id: str
    event_id: str
    listener: str | None  # its title; None: it is not routed yet
    routes: frozenset[str]  # digests of the listeners that its event was given to
    type: str
    status: int
    attempts: int
    rescues: int
    due: str | None  # or the end of its lease
    stream: str | None
    seq: int
    slot: str | None = None  # of those that wait there, the newest runs
    is_coalesced: bool = False  # it has ended because a newer one of its slot runs
    state: str = ""  # of the model; "": its columns are those of none
    replays: int = field(default=0, compare=False)  # by which it became pending again


@dataclass(frozen=True, slots=True)
class Lease:
    """That a worker has an event or a stream."""

    worker: str
    until: str
    since: str


@dataclass(slots=True, kw_only=True)
class Call:
    """A call of a listener with one event; a call with a batch is one for each of its events."""

    event_id: str
    listener: str  # its title
    worker: str  # the name that its leases have
    timeout: float | None = None  # seconds
    number: int = 0  # the same for all events of a batch
    start: float = 0.0
    end: float | None = None
    # "done", "failed", "final" (the event is to die), "deferred", "cancelled", "killed",
    # "ignored" (in a batch, behind an event of its key that is not done)
    outcome: str | None = None
    queue: str = ""
    replays: int = 0  # of the event when it began
    is_excused: bool = False  # its lease was lost, so that it may be repeated

    @property
    def is_running(self) -> bool:
        return self.outcome is None

    def is_overdue(self, now: float) -> bool:
        """Return whether it has taken longer than its timeout, so that it counts as failed."""
        if self.timeout is None:
            return False
        return (now if self.end is None else self.end) - self.start >= self.timeout * 0.9


@dataclass(slots=True)
class Table:
    """All tables at one moment."""

    events: dict[str, Event]
    streams: dict[str, str]  # due times by name; a stream without one is left out
    leases: dict[str, Lease]  # by the id of a row or the name of a stream
    breakers: set[str]  # queues
    parked: dict[str, str]  # by the id of a row or the name of a stream: the queue of a pause
    pauses: set[str]  # their queues
    replayed: int  # deliveries, as the log of operations counts them
    open_replays: int  # bulk changes that are not worked off

    def lease_of(self, event: Event) -> Lease | None:
        return self.leases.get(event.id if event.stream is None else event.stream)

    def row_of(self, call: Call) -> Event | None:
        """Return the row that a call delivers."""
        rows = (each for each in self.events.values() if each.event_id == call.event_id)
        return next((each for each in rows if each.listener == call.listener), None)


class Tables:
    """Reads what is committed, on a connection of its own."""

    def __init__(self, path: str, clock: Callable[[], datetime]) -> None:
        self._connection, self._clock = sqlite3.connect(path), clock
        self._version = -1

    def now(self) -> str:
        """Return the database's time as it stores it."""
        return self._clock().strftime("%Y-%m-%d %H:%M:%S.%f")[:23] + "000"

    def have_changed(self) -> bool:
        """Return whether another connection has committed since the last call."""
        before = self._version
        (self._version,) = self._connection.execute("PRAGMA data_version").fetchone()
        return before != self._version

    def read(self) -> Table:
        run = self._connection.execute
        events, leases, streams = {}, {}, {}
        for row in run(EVENTS):
            row_id, event_id, listener, routes, kind, *rest = row
            (status, attempts, rescues, due, worker, since, place, seq, result, done_at) = rest
            slot = place if place and place.startswith("?") else None
            stream = None if slot else place
            given = frozenset((routes or "").split())
            events[row_id] = Event(
                row_id,
                event_id,
                listener,
                given,
                kind,
                status,
                attempts,
                rescues,
                due,
                stream,
                seq or 0,
                slot,
                result == "coalesced",
                _state(status, stream, (due, worker, since), done_at),
            )
            if worker is not None and stream is None:
                leases[row_id] = Lease(worker, due or "", since)
        for stream, due, worker, since in run(STREAMS):
            if due is not None:
                streams[stream] = due
            if worker is not None:
                leases[stream] = Lease(worker, due or "", since)
        pauses = run(PAUSES).fetchall()
        breakers = {name for kind, name, _ in pauses if kind == "breaker"}
        replayed, open_replays = run(f"{REPLAYS} WHERE kind = 'replay'").fetchone()
        return Table(
            events,
            streams,
            leases,
            breakers,
            dict(run(PARKED)),
            {queue for *_, queue in pauses},
            replayed,
            open_replays,
        )


def _state(status: int, stream: str | None, lease: tuple[str | None, ...], done: str | None) -> str:
    """Return the state of a delivery, by the columns that the page on the model gives it."""
    is_set = tuple(each is not None for each in lease)  # due time, owner, since when
    if status in (1, 3):
        return "ended" if not any(is_set) and done is not None else ""
    if stream is not None:  # which is due and leased in its place
        return "waiting" if not any(is_set) and done is None else ""
    states = {(True, False, False): "waiting", (True, True, True): "leased"}
    return states.get(is_set, "") if done is None else ""
