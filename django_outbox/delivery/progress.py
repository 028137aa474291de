"""What the listeners of one row have reached: each has its own executions, next time and end."""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec

from ..outcomes import Decision, Status

PAUSE = 1.0  # seconds; the next look at the table makes it longer
SHOWN = 200  # characters of an error that an entry keeps

Instant = Annotated[datetime, msgspec.Meta(tz=True)]


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one listener has reached, as the column keeps it."""

    state: Literal["due", "done", "dead"]
    attempts: int = 0
    failed: bool = False  # its last run was a failure
    at: Instant | None = None  # its next run; None: at once
    error: str = ""


NEW = Entry(state="due")
_decoder = msgspec.json.Decoder(dict[str, Entry])


def entries(text: str | None) -> dict[str, Entry] | None:
    """Return what the column says, by the listeners' titles; None if it is damaged."""
    try:
        return _decoder.decode(text or "{}")
    except (msgspec.MsgspecError, UnicodeError):
        return None


class Progress:
    """What each listener of an event has reached; read from the row, written back with it.

    A listener is known by its title. One that has no entry is new: since the row was written, or
    since it was renamed. Entries of listeners that are gone stay, and count for nothing.
    """

    def __init__(self, text: str | None, *, titles: list[str], now: datetime) -> None:
        self._titles = titles
        self._claimed, self._since = now, time.monotonic()  # by the database's clock, and ours
        self._errors: dict[str, str] = {}  # of this delivery, whole
        self._kind = ""  # of the last of them
        self._entries = entries(text) or {}  # damaged: every listener runs, as after a lost settle
        # The row is due, so its first listener is, too: somebody may have moved its due time.
        due = [entry.at or now for entry in self._of("due")]
        self._claimed = max(now, min(due, default=now))

    @property
    def text(self) -> str:
        return msgspec.json.encode(self._entries).decode()

    def is_due(self, title: str) -> bool:
        """Say whether it is this listener's turn: not through, and its time has come."""
        entry = self._entries.get(title, NEW)
        return entry.state == "due" and self._seconds_to(entry) <= 0

    def attempts(self, title: str) -> int:
        return self._entries.get(title, NEW).attempts

    def note(self, title: str, decision: Decision) -> None:
        """Take in what a run came to."""
        state: Any = "due" if decision.delay is not None else decision.status.name.lower()
        if decision.error:
            self._errors[title] = decision.error
            self._kind = decision.kind
        self._entries[title] = Entry(
            state=state,
            attempts=self.attempts(title) + decision.spent,
            failed=decision.status is Status.RETRY,
            at=None if decision.delay is None else self._now() + timedelta(seconds=decision.delay),
            error=(decision.error or "").partition("\n")[0][:SHOWN],
        )

    def decision(self, attempts: int, *, paused: Collection[str] = ()) -> Decision:
        """Sum up: done when all are done, dead when none can go on and one is dead.

        ``attempts`` is the row's; it counts the executions of the listener that had the most.
        Listeners that are ``paused`` wait for others that are still to run, or for a short time.
        """
        waiting, dead = self._of("due"), self._of("dead")
        most = max(self.attempts(title) for title in self._titles)
        common: dict[str, Any] = {
            "spent": max(most - attempts, 0), "progress": self.text, "kind": self._kind,
        }  # fmt: skip
        if waiting:
            next_ones = self._of("due", but=paused)
            failed = bool(dead) or any(entry.failed for entry in waiting)
            return Decision(
                status=Status.RETRY if failed else Status.NEW,
                delay=max(min(map(self._seconds_to, next_ones), default=PAUSE), 0.0),
                outcome="retry" if failed else "deferred",
                error=self._last_error(),
                **common,
            )
        if dead:
            return Decision(
                status=Status.DEAD, outcome="dead", error=self._last_error("dead"), **common
            )
        return Decision(status=Status.DONE, error=self._last_error(), **common)

    def _of(self, state: str, *, but: Collection[str] = ()) -> list[Entry]:
        titles = [title for title in self._titles if title not in but]
        entries = [self._entries.get(title, NEW) for title in titles]
        return [entry for entry in entries if entry.state == state]

    def _last_error(self, state: str | None = None) -> str | None:
        """Return an error for the row: of a listener in that state, of this delivery if it can."""
        among = [
            title for title in self._titles if state in (None, self._entries.get(title, NEW).state)
        ]
        if whole := [self._errors[title] for title in among if title in self._errors]:
            return whole[-1]
        if state is None:
            return None
        return next(filter(None, (self._entries[title].error for title in among)), None)

    def _now(self) -> datetime:
        return self._claimed + timedelta(seconds=time.monotonic() - self._since)

    def _seconds_to(self, entry: Entry) -> float:
        return (entry.at - self._now()).total_seconds() if entry.at else 0.0
