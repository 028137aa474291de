"""``Lease``: one claimed event and what this process knows of its hold on it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

from .. import hooks
from ..dialects.vocabulary import TAIL, Hold
from ..events import Event, leased, stored_instant

BROUGHT = {  # what a hot event brings along, so that no claim reads it again, by column
    "event_type": "event_type", "aggregate_type": "aggregate_type", "aggregate_id": "aggregate_id",
    "tenant_id": "tenant_id", "unique_key": "unique_key", "headers": "headers", "payload": "_text",
}  # fmt: skip


class Lease(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """A claimed event, from its claim to its settle.

    Thousands wait or run at a time. That the garbage collector need not look at them, and that each
    event and its decoded payload lives for its delivery only, saved a quarter of a drain.
    """

    row: Sequence[Any]  # as it was claimed
    places: Mapping[str, int]  # of the columns in it
    event_id: str
    event_type: str
    aggregate_type: str
    owner: str  # who leased it: this worker
    rescued: bool  # taken over from a lost worker
    renewal: bool = False  # claimed again while this worker's own lease stood in the row
    rescues: int  # that one included
    progress: str | None  # fan-out: JSON per listener
    key: str | None = None  # whose stream is leased instead of the row
    deadline: float  # monotonic; nothing is started later without a renewal. Owner: Held
    taken_at: float = msgspec.field(
        default_factory=time.monotonic
    )  # monotonic; when it was claimed
    started_at: float = 0.0  # monotonic; 0: not started. Owner: the thread that took it
    waited: float = 0.0  # seconds from its claim to its start
    duration: float = 0.0  # seconds in listeners
    overdue_at: float = 0.0  # monotonic; when a plain listener has outrun its timeout
    cancelled: bool = False  # its task was cancelled by the worker, not by the listener
    _event: Event | None = None

    @property
    def event(self) -> Event:
        """What its listeners get; made at the first look, and anew after ``forget``."""
        if self._event is None:
            self._event = leased(self.row, self.places, hooks.serializer().loads)
        return self._event

    @property
    def hold(self) -> Hold:
        """What of it is leased."""
        return Hold.ROW if self.key is None else Hold.STREAM

    def forget(self) -> None:
        """Let go of the event and of what was decoded for it."""
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
        """Seconds from its due time to the claim; asked for after every delivery."""
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
        assert found is not None  # a claimed row is due, and the clock tells a time
        return found


def take(
    row: Sequence[Any],
    columns: tuple[str, ...],
    *,
    deadline: float,
    me: str,
    hot: Event | None = None,
) -> Lease:
    """Make a lease of a claimed row; a hot event brings its payload along."""
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
    )


@lru_cache(maxsize=16)
def _places(columns: tuple[str, ...], hot: bool) -> Mapping[str, int]:
    """Where a claimed row has its columns, and what it was due at."""
    names = (*columns, *TAIL, *([*BROUGHT, "source"] if hot else []))
    places = {name: place for place, name in enumerate(names)}
    return {**places, "available_at": places["due_at"]}
