"""Several listeners of one event: each when its own time has come, whatever the others did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..conf import Settings
from ..outcomes import LOST, Decision
from ..registry import Listener
from .call import Call
from .intercept import Escaping
from .lease import Lease
from .progress import Progress


class FanOut:
    """The calls of one event's listeners, each when its own time has come.

    One that failed does not keep the others; each gets an event, and a payload, of its own.
    """

    def __init__(
        self, lease: Lease, listeners: tuple[Listener, ...], settings: Settings, alias: str,
        between: Callable[[Lease], Any], escaping: Escaping = (),
        paused: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.begun = False
        self._lease, self._listeners, self._settings, self._alias = (
            lease,
            listeners,
            settings,
            alias,
        )
        self._between, self._escaping = between, escaping
        self._paused = paused  # titles of listeners that wait, whatever the others do
        self._progress = Progress(
            lease.progress, titles=[each.title for each in listeners], now=lease.now
        )
        self._lost = False

    def calls(self) -> Iterator[Call]:
        for listener in self._listeners:
            if self._lost or listener.title in self._paused:
                continue
            if self._progress.is_due(listener.title):
                yield self._call(listener)

    def note(self, call: Call, decision: Decision) -> None:
        self.begun, self._lost = True, decision is LOST
        self._lease.overdue_at = 0.0
        if not decision.written:  # else it was noted with the effects of an atomic listener
            self._progress.note(call.listener.title, decision)

    @property
    def decision(self) -> Decision:
        if self._lost:
            return LOST
        return self._progress.decision(self._lease.event.attempts, paused=self._paused)

    def _call(self, listener: Listener) -> Call:
        attempts = self._progress.attempts(listener.title)
        event = self._lease.event.apart(attempts)
        event.called(listener.title, self._alias)
        return Call(
            self._lease, listener, event, attempts, self._settings, self._alias, self._between,
            self._escaping, self._progress,
        )  # fmt: skip
