"""Several listeners on one row: each has its own executions, next time and end."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TypedDict

import msgspec

from ..events import Event
from ..outcomes import DONE, Decision, Status


class Entry(TypedDict, total=False):
    """One listener's progress, as the column keeps it."""

    state: str  # "due", "done" or "dead"
    attempts: int
    failed: bool  # its last run was a failure
    at: str  # ISO instant of its next run
    error: str


class Progress:
    """What each listener of an event has reached; read from the row, written back with it."""

    def __init__(self, text: str | None) -> None:
        try:
            self._entries = msgspec.json.decode(text or "{}", type=dict[str, Entry])
        except (msgspec.MsgspecError, UnicodeError):
            self._entries = {}  # damaged: every listener runs, as after a lost settle

    def waits(self, title: str, now: datetime) -> bool:
        """Say whether this listener is through, or not due yet."""
        entry = self._entries.get(title, {})
        return entry.get("state", "due") != "due" or self._seconds(entry, now) > 0

    @property
    def text(self) -> str:
        return msgspec.json.encode(self._entries).decode()

    def attempts(self, title: str) -> int:
        return self._entries.get(title, {}).get("attempts", 0)

    def note(self, title: str, decision: Decision, now: datetime) -> None:
        """Take in what a run came to; ``now`` is the database's clock."""
        entry = Entry(state="due", attempts=self.attempts(title) + decision.spent)
        if decision.error:
            entry["error"] = decision.error.partition("\n")[0][:200]
        if decision.delay is None:
            entry["state"] = "done" if decision.status is Status.DONE else "dead"
        else:
            entry["at"] = (now + timedelta(seconds=decision.delay)).isoformat()
            entry["failed"] = decision.status is Status.RETRY
        self._entries[title] = entry

    def decision(
        self, titles: list[str], event: Event, now: datetime, error: str | None
    ) -> Decision:
        """Sum up: done when all are done, dead when none can go on and one is dead."""
        entries = [self._entries.get(title, Entry(state="due")) for title in titles]
        spent = max([entry.get("attempts", 0) for entry in entries] + [event.attempts])
        waiting = [entry for entry in entries if entry.get("state", "due") == "due"]
        common = {
            "spent": spent - event.attempts,
            "error": error,
            "progress": self.text,
        }
        if waiting:
            status = Status.RETRY if any(entry.get("failed") for entry in waiting) else Status.NEW
            delay = max(min(self._seconds(entry, now) for entry in waiting), 0.0)
            outcome = "retry" if status is Status.RETRY else "deferred"
            return Decision(status=status, delay=delay, outcome=outcome, **common)  # type: ignore[arg-type]
        if any(entry.get("state") == "dead" for entry in entries):
            return Decision(status=Status.DEAD, outcome="dead", **common)  # type: ignore[arg-type]
        return Decision(status=DONE.status, **common)  # type: ignore[arg-type]

    def _seconds(self, entry: Entry, now: datetime) -> float:
        at = entry.get("at")
        return (datetime.fromisoformat(at) - now).total_seconds() if at else 0.0
