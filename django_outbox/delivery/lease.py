"""``Run``: what is leased at once; ``Lease``: an event of it, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import lru_cache
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from .. import hooks
from ..clocks import monotonic
from ..events import Event, event_from_row, is_slot, stored_instant
from ..listeners.history import Entry, first_line, normalised, with_entries
from ..listeners.outcomes import DONE, LOST, Decision, Status
from ..queue_settings import DEFAULT_QUEUE
from ..sql.values import EVENTS, QUEUE, TAIL, Ending, LeaseKind, Table

# Columns that a lease has as attributes, in its order, and two that it is made of; finding each by
# its name takes as long as the rest.
LEASED = (
    *("id", "event_id", "event_type", "aggregate_type", "rescues", "listener", "routes", "history"),
    *("key", "stream", "payload"),
)
# Columns that a hot event supplies, so that its claim need not read them; with its payload.
HOT = ("event_id", "event_type", "aggregate_type", "aggregate_id", "tenant_id", "unique_key")
HOT_COLUMNS = (*HOT, "headers", "payload")


class Run(msgspec.Struct, eq=False, gc=False):
    """What a worker leases at once: a row, or a stream with its next events in order.

    Each field is assigned in one module, under ``Held``'s lock. The garbage collector skips it:
    what drops a run empties its lists.
    """

    # Not assigned after the claim:
    table: Table
    id: str  # of the row, or of the stream: lane and key
    queue: str  # in which it was claimed
    # By worker/held.py:
    locked_at: Any  # when it was leased, as the claim returned it
    deadline: float  # monotonic; nothing of it is started later without a renewal
    renewal: bool = False  # claimed again by the worker that had leased it before; never assigned
    out: list[Lease] = []  # handed out, and not settled
    waiting: list[Lease] = []  # of a stream: behind those that are out
    # By worker/claims.py, only of a stream:
    lost_worker: str | None = None  # the last that was lost with it, until that has been reported
    # By worker/runs.py, only of a stream:
    rescues: int = 0  # workers that were lost with it
    alone: int = 0  # events to run one by one, each settled before the next: it is a suspect
    is_innocent: bool = False  # what was started of it has come to its end here
    seq: int = 0  # its version when it was read
    due: float = inf  # monotonic; when it is due after its release; inf: idle
    read_at: float = inf  # monotonic; when it is to be read
    pause: float = 0.0  # seconds until the next read if it cannot be released
    interrupted: bool = False  # it is to be released before it has come to its end
    is_left: bool = False  # its release lets other workers claim it first
    next_queue: str | None = None  # in which it waits after its release; None: in the same one

    @property
    def unstarted(self) -> list[Lease]:
        """Those of its events that are neither started nor decided."""
        return [*(each for each in self.out if each.is_waiting), *self.waiting]


class Lease(msgspec.Struct, eq=False, gc=False):
    """An event that is leased, from its claim to its settle.

    Thousands wait or run at a time. The garbage collector skips them, and an event and its decoded
    payload exist only during its delivery: that saved a quarter of a drain. They are made by
    position: by keyword it took five times as long.
    """

    row: Sequence[Any]  # as it was claimed
    positions: Mapping[str, int]  # positions of the columns in the row
    run: Run  # with which it is leased
    owner: str  # the worker that leased it: this one
    rescued: bool  # claimed from a lost worker
    claimed_at: float  # monotonic
    payload_bytes: int  # of the payload's text; really characters, nearly all of them ASCII
    stream: str | None  # lane and key; leased instead of the row
    slot: str | None  # in which the newest row runs
    id: str  # of the row
    event_id: str
    event_type: str
    aggregate_type: str
    rescues: int  # this one included
    listener: str | None  # the title of its listener; None: it is not routed
    routes: str | None  # digests of all listeners that the event was given to
    history: str | None  # as it is stored
    key: str | None
    queue: str = DEFAULT_QUEUE  # whose threads deliver it
    handed_out_at: float = 0.0  # monotonic; only of a stream's head; 0: not yet
    started_at: float = 0.0  # monotonic; 0: not started. Owner: the thread that took it
    turned_away: bool = False  # by the thread that took it, because its queue was closed
    refused: bool = False  # the database has refused its decision; no thread waits for it
    decided: bool = False  # without a start: too many workers were lost with it
    waited: float = 0.0  # seconds from its claim to its start
    duration: float = 0.0  # seconds in listeners
    cancelled: bool = False  # its task was cancelled by the worker, not by the listener
    connection_wait: float = 0.0  # seconds that its listeners waited for a database connection
    connection_wait_since: float = 0.0  # monotonic; 0: no listener waits for one
    failed_call: Entry | None = None  # until it is in its history
    _event: Event | None = None

    @property
    def event(self) -> Event:
        """The event that listeners get; created at first access, and again after ``drop_event``."""
        if self._event is None:
            loads = hooks.serializer().loads
            # The row may have been routed since its claim.
            self._event = event_from_row(self.row, self.positions, loads, self.listener or "")
        return self._event

    @property
    def named(self) -> tuple[str, str, str | None]:
        """Event id, event type and listener, as log lines name a delivery."""
        return self.event_id, self.event_type, self.listener

    @property
    def locked_at(self) -> Any:
        """When it or its stream was leased, as the claim returned it."""
        return self.run.locked_at

    @property
    def attempts(self) -> int:
        """The event's attempts at the claim."""
        found: int = self.row[self.positions["attempts"]]
        return found

    @property
    def is_waiting(self) -> bool:
        """Return whether it may be released: it is neither started nor decided."""
        return not (self.started_at or self.decided)

    @property
    def kind(self) -> LeaseKind:
        """What is leased: the row, or the stream of its key."""
        return LeaseKind.ROW if self.stream is None else LeaseKind.STREAM

    @property
    def previous_owner(self) -> str:
        """The worker that it was claimed from; empty if none had leased it."""
        return self.row[self.positions["previous_owner"]] or ""

    def note_failure(self, decision: Decision, *, listener: str, seconds: float) -> None:
        """Note a call that failed, for the history of the event; the listener took ``seconds``."""
        self.failed_call = None
        if decision.error is not None and decision is not LOST and decision.outcome != "deferred":
            self.failed_call = Entry(
                at=self.database_now,
                kind="dead" if decision.status is Status.DEAD else "failed",
                number=self.attempts + 1,
                by=self.owner,
                listener=listener,
                milliseconds=round(1000 * seconds),
                error=first_line(decision.error),
            )

    def recorded(self, decision: Decision) -> Decision:
        """Return a decision with what the row tells of it: the error's cause, and the history.

        If the event is due again, it waits in the queue of its listener.
        """
        if decision is LOST or decision.cause or decision.history:
            return decision
        if decision.delay is not None and self.queue != self.run.queue:
            decision = replace(decision, queue=self.queue)
        found = self.failed_call
        if found is None and decision.status is Status.DEAD:  # no call was the reason
            number, error = self.attempts + decision.spent, first_line(decision.error)
            found = Entry(
                at=self.database_now, kind="dead", number=number, by=self.owner, error=error
            )
        if found is None and decision.error is None:
            return decision
        cause = None if decision.error is None else normalised(decision.error)
        history = None if found is None else with_entries(self.history, [found])
        return replace(decision, cause=cause, history=history)

    def ending(self, decision: Decision) -> Ending:
        """Return the decision as it is to be written."""
        if decision is not DONE:
            decision = self.recorded(decision)
        return Ending(self.id, self.run.locked_at, self.attempts, decision)

    @property
    def clock(self) -> float:
        """Monotonic seconds, stopped while a listener waits for a database connection."""
        return (self.connection_wait_since or monotonic()) - self.connection_wait

    def drop_event(self) -> None:
        """Drop the event and its decoded payload."""
        self._event = None

    @property
    def due_at(self) -> datetime:
        """When it was due."""
        return self._instant("due_at")

    @property
    def now(self) -> datetime:
        """The database's clock at the claim."""
        return self._instant("now")

    @property
    def first_due_at(self) -> datetime | None:
        """When the event was due for the first time."""
        return stored_instant(self.row[self.positions["first_due_at"]])

    @property
    def database_now(self) -> datetime:
        """The database's clock now, as far as this process knows."""
        return self.now + timedelta(seconds=monotonic() - self.claimed_at)

    @property
    def lag(self) -> float:
        """Seconds from its due time to the claim.

        Every delivery needs it, so it converts the row's values only if they cannot be subtracted.
        """
        due, now = self.row[self.positions["due_at"]], self.row[self.positions["now"]]
        if isinstance(now, str):  # SQLite's times are text
            now = datetime.fromisoformat(now)
        if isinstance(due, str):
            due = datetime.fromisoformat(due)
        try:
            return (now - due).total_seconds()  # type: ignore[no-any-return]
        except TypeError:  # the claim of a stream has made one of them aware
            return (self.now - self.due_at).total_seconds()

    @property
    def age(self) -> float:
        """Seconds from the event's first due time to the claim, by the database's clock."""
        first = self.event.first_due_at
        return (self.now - first).total_seconds() if first else 0.0

    def _instant(self, name: str) -> datetime:
        found = stored_instant(self.row[self.positions[name]])
        assert found is not None  # a claimed row has a due time and the clock's
        return found


NOTHING: list[Lease] = []  # shared and never changed: a list for each row cost garbage collection


def row_run(row: Sequence[Any], *, deadline: float, me: str) -> Run:
    """Create the run of a claimed row, behind which nothing waits."""
    return Run(EVENTS, row[0], row[QUEUE], row[-1], deadline, row[-2] == me, waiting=NOTHING)


def lease_from_row(
    row: Sequence[Any],
    columns: Columns,
    *,
    run: Run,
    me: str,
    claimed_at: float | None = None,
    hot: Event | None = None,
) -> Lease:
    """Create the lease of a row claimed now, or at ``claimed_at`` (monotonic).

    A hot event supplies its payload itself.
    """
    previous_owner = row[-2]
    if hot is not None:
        given = [getattr(hot, name) for name in HOT]
        row = (*row, *given, hot.headers, hot._payload_text, "hot", None, None)
    positions, read, is_keyed = columns
    *known, place, text = read(row)
    return Lease(
        row,
        positions,
        run,
        me,
        previous_owner is not None and previous_owner != me,
        monotonic() if claimed_at is None else claimed_at,
        len(text),
        place if is_keyed else None,
        place if place is not None and is_slot(place) else None,
        *known,
    )


class Columns(NamedTuple):
    """The columns of claimed rows."""

    positions: Mapping[str, int]  # in the row, by name; ``available_at`` is its due time
    read: Callable[[Sequence[Any]], tuple[Any, ...]]  # reads those that a lease has
    is_keyed: bool  # the rows are of a stream


@lru_cache(maxsize=16)
def columns_of(columns: tuple[str, ...], *, hot: bool = False) -> Columns:
    """Return the columns of claimed rows; a hot event supplies some."""
    names = (*columns, *TAIL, *([*HOT_COLUMNS, "source", "key", "stream"] if hot else []))
    positions = {name: place for place, name in enumerate(names)}
    read = itemgetter(*(positions[name] for name in LEASED))
    return Columns({**positions, "available_at": positions["due_at"]}, read, "seq" in positions)
