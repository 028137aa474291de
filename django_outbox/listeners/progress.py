"""The progress of an event with several listeners: executions, next run and result of each."""

from __future__ import annotations

from copy import copy
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec

from ..clocks import monotonic
from .outcomes import Decision, Status

PAUSED_DELAY = 1.0  # seconds until a paused row is due again; the next poll postpones it further
MAX_ERROR_LENGTH = 200  # characters of an error that an entry keeps, at most

Instant = Annotated[datetime, msgspec.Meta(tz=True)]


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress of one listener, as stored in the column."""

    state: Literal["due", "done", "dead"]
    attempts: int = 0
    failed: bool = False  # its last run was a failure
    at: Instant | None = None  # its next run; None: at once
    error: str = ""


NEW_ENTRY = Entry(state="due")
_decoder = msgspec.json.Decoder(dict[str, Entry])


def entries(text: str | None) -> dict[str, Entry] | None:
    """Return the column's entries by listener title; None if the column is damaged."""
    try:
        return _decoder.decode(text or "{}")
    except (msgspec.MsgspecError, UnicodeError):
        return None


def progress_after_replay(text: str | None) -> str | None:
    """Return the progress that a replayed row keeps: listeners that are done do not run again."""
    done = {
        title: msgspec.structs.replace(entry, attempts=0)  # the row's count restarts, too
        for title, entry in (entries(text) or {}).items()
        if entry.state == "done"
    }
    return msgspec.json.encode(done).decode() if done else None


class Progress:
    """The progress of each listener of an event; read from the row and written back with it.

    Entries are stored by listener title. A listener without an entry was added or renamed after
    the row was written. Entries of removed listeners stay, and are ignored.
    """

    def __init__(self, text: str | None, *, titles: list[str], now: datetime) -> None:
        self._titles = titles
        self._claimed, self._since = now, monotonic()  # by the database's clock, and ours
        self._errors: dict[str, str] = {}  # of this delivery, in full; by title
        self._kind = ""  # of the last error
        self.entries = entries(text) or {}  # damaged: every listener runs, as after a lost settle
        # The row is due, so its first listener is due too, even if the row's due time was changed.
        due = [entry.at or now for entry in self._entries_in("due")]
        self._claimed = max(now, min(due, default=now))

    @property
    def text(self) -> str:
        return msgspec.json.encode(self.entries).decode()

    def copy(self) -> Progress:
        """Return a copy, in which something can be recorded that is not certain yet."""
        found = copy(self)
        found.entries, found._errors = {**self.entries}, {**self._errors}
        return found

    def is_due(self, title: str) -> bool:
        """Return whether this listener is still to run, and due."""
        entry = self.entries.get(title, NEW_ENTRY)
        return entry.state == "due" and self._seconds_to(entry) <= 0

    def attempts(self, title: str) -> int:
        return self.entries.get(title, NEW_ENTRY).attempts

    def record(self, title: str, decision: Decision) -> None:
        """Record the decision on a listener's run."""
        state: Any = "due" if decision.delay is not None else decision.status.name.lower()
        if decision.error:
            self._errors[title] = decision.error
            self._kind = decision.kind
        self.entries[title] = Entry(
            state=state,
            attempts=self.attempts(title) + decision.spent,
            failed=decision.status is Status.RETRY,
            at=None if decision.delay is None else self.now + timedelta(seconds=decision.delay),
            error=(decision.error or "").partition("\n")[0][:MAX_ERROR_LENGTH],
        )

    def decision(self, attempts: int, *, delay: float, queue: str | None) -> Decision:
        """Return the row's decision: done if all are done, dead if none is left and one is dead.

        ``attempts`` is the row's count: the most executions of any one listener. If listeners are
        left, the row is due after ``delay`` seconds, in ``queue``.
        """
        waiting, dead = self._entries_in("due"), self._entries_in("dead")
        most = max(self.attempts(title) for title in self._titles)
        common: dict[str, Any] = {
            "spent": max(most - attempts, 0),
            "kind": self._kind,
            "progress": self.text if self.entries else None,
        }
        if waiting:
            failed = bool(dead) or any(entry.failed for entry in waiting)
            failed |= attempts > 0 and not self.entries  # it was the only listener then
            return Decision(
                status=Status.RETRY if failed else Status.NEW,
                delay=delay,
                queue=queue,
                outcome="retry" if failed else "deferred",
                error=self._last_error(),
                **common,
            )
        if dead:
            return Decision(
                status=Status.DEAD, outcome="dead", error=self._last_error("dead"), **common
            )
        return Decision(status=Status.DONE, error=self._last_error(), **common)

    def _entries_in(self, state: str) -> list[Entry]:
        found = [self.entries.get(title, NEW_ENTRY) for title in self._titles]
        return [entry for entry in found if entry.state == state]

    def _last_error(self, state: str | None = None) -> str | None:
        """Return an error of a listener in that state (None: any), if possible of this delivery."""
        among = [
            title
            for title in self._titles
            if state in (None, self.entries.get(title, NEW_ENTRY).state)
        ]
        if whole := [self._errors[title] for title in among if title in self._errors]:
            return whole[-1]
        if state is None:
            return None
        return next(filter(None, (self.entries[title].error for title in among)), None)

    @property
    def now(self) -> datetime:
        """The database's clock, as far as this process knows."""
        return self._claimed + timedelta(seconds=monotonic() - self._since)

    def _seconds_to(self, entry: Entry) -> float:
        return (entry.at - self.now).total_seconds() if entry.at else 0.0
