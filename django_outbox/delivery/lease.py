"""``Lease``: a claimed event, and what this process knows of its lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

from .. import hooks
from ..clocks import monotonic
from ..events import Event, leased, stored_instant
from ..sql.values import TAIL, Hold
from .timeouts import TimedCall

BROUGHT = {  # column: attribute of a hot event, so that its claim need not read the column
    "event_type": "event_type", "aggregate_type": "aggregate_type", "aggregate_id": "aggregate_id",
    "tenant_id": "tenant_id", "unique_key": "unique_key", "headers": "headers", "payload": "_text",
}  # fmt: skip


class Lease(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """A claimed event, from its claim to its settle.

    Thousands wait or run at a time. The garbage collector skips them, and an event and its decoded
    payload exist only during its delivery: that saved a quarter of a drain.
    """

    row: Sequence[Any]  # as it was claimed
    places: Mapping[str, int]  # positions of the columns in the row
    event_id: str
    event_type: str
    aggregate_type: str
    owner: str  # the worker that leased it: this one
    rescued: bool  # claimed from a lost worker
    renewal: bool = False  # claimed again while this worker already held the lease
    rescues: int  # this one included
    progress: str | None  # fan-out: JSON per listener
    key: str | None = None  # its stream is leased instead of the row
    deadline: float  # monotonic; not to be started later without a renewal. Owner: Held
    taken_at: float = msgspec.field(default_factory=monotonic)  # monotonic; when it was claimed
    handed_out_at: float = 0.0  # monotonic; when the head of a stream was handed out; 0: no stream
    payload_bytes: int = 0  # of the payload's text; really characters, nearly all of them ASCII
    started_at: float = 0.0  # monotonic; 0: not started. Owner: the thread that took it
    decided: bool = False  # without a start: too many workers were lost with it
    waited: float = 0.0  # seconds from its claim to its start
    duration: float = 0.0  # seconds in listeners
    counted: bool = False  # a rescue was counted before its start. Owner: what leased its stream
    called_at: float = 0.0  # monotonic; when the call that runs in a thread began; 0: none runs
    timed: TimedCall | None = None  # that call, if it has a timeout
    cancelled: bool = False  # its task was cancelled by the worker, not by the listener
    queued: float = 0.0  # seconds that its listeners waited for a database connection
    queued_at: float = 0.0  # monotonic; when a listener began to wait for one; 0: none waits
    _event: Event | None = None

    @property
    def event(self) -> Event:
        """The event that listeners get; created at first access, and again after ``forget``."""
        if self._event is None:
            self._event = leased(self.row, self.places, hooks.serializer().loads)
        return self._event

    @property
    def is_waiting(self) -> bool:
        """Return whether it may be released: it is neither started nor decided."""
        return not (self.started_at or self.decided)

    @property
    def hold(self) -> Hold:
        """What is leased: the row, or the stream of its key."""
        return Hold.ROW if self.key is None else Hold.STREAM

    @property
    def listener(self) -> str:
        """The title of the listener called last; empty before and after the delivery."""
        event = self._event  # another thread may call forget meanwhile
        return event.listener if event is not None else ""

    @property
    def clock(self) -> float:
        """Monotonic seconds, stopped while a listener waits for a database connection."""
        return (self.queued_at or monotonic()) - self.queued

    def forget(self) -> None:
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
    def lag(self) -> float:
        """Seconds from its due time to the claim; computed after every delivery."""
        due, now = self.row[self.places["due_at"]], self.row[self.places["now"]]
        if isinstance(now, str):  # SQLite's clock
            now = datetime.fromisoformat(now)
        try:
            return (now - due).total_seconds()  # type: ignore[no-any-return]
        except TypeError:  # one of them was read already
            return (self.now - self.due_at).total_seconds()

    @property
    def age(self) -> float:
        """Seconds from the event's first due time to the claim, by the database's clock."""
        first = self.event.first_due_at
        return (self.now - first).total_seconds() if first else 0.0

    def _instant(self, name: str) -> datetime:
        found = stored_instant(self.row[self.places[name]])
        assert found is not None  # a claimed row has a due time and the clock's
        return found


def take(
    row: Sequence[Any],
    columns: tuple[str, ...],
    *,
    deadline: float,
    me: str,
    hot: Event | None = None,
) -> Lease:
    """Create the lease of a claimed row; a hot event supplies its payload itself."""
    was = row[-2]
    if hot is not None:
        row = (*row, *[getattr(hot, name) for name in BROUGHT.values()], "hot")
    places = _places(columns, hot is not None)
    return Lease(
        row=row,
        places=places,
        event_id=row[0],
        event_type=row[places["event_type"]],
        aggregate_type=row[places["aggregate_type"]],
        owner=me,
        rescued=was is not None and was != me,
        renewal=was == me,
        rescues=row[places["rescues"]],
        progress=row[places["progress"]],
        key=row[places["key"]] if "key" in places else None,
        deadline=deadline,
        payload_bytes=len(row[places["payload"]]),
    )


@lru_cache(maxsize=16)
def _places(columns: tuple[str, ...], hot: bool) -> Mapping[str, int]:
    """Return the positions of a claimed row's columns; ``available_at`` is its due time."""
    names = (*columns, *TAIL, *([*BROUGHT, "source"] if hot else []))
    places = {name: place for place, name in enumerate(names)}
    return {**places, "available_at": places["due_at"]}
