"""Call several listeners of one event: each when it is due, independently of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

from ..conf import Settings
from ..listeners.outcomes import LOST, Decision
from ..listeners.progress import Progress
from ..listeners.registry import Listener
from .call import Call
from .interceptors import Escaping
from .lease import Lease


class FanOut:
    """The calls of one event's listeners, each when it is due.

    A failed one does not hold up the others. Each gets its own copy of the event and its payload.
    """

    def __init__(
        self, lease: Lease, listeners: tuple[Listener, ...], settings: Settings, alias: str,
        between: Callable[[Lease], Any], escaping: Escaping = (),
        paused: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.has_started = False
        self.between = between
        self.progress_in_row = lease.progress  # the progress that is in the row
        self._remaining = iter(listeners)  # not yet considered
        self._lease, self._settings, self._alias = lease, settings, alias
        self._escaping = escaping
        self._paused = paused  # titles of listeners
        self._progress = Progress(
            lease.progress, titles=[each.title for each in listeners], now=lease.now
        )
        self._lost = False

    def run(self) -> Decision:
        """Call the listeners that are due, or those of them that are left; return the decision."""
        for call in self.calls():
            if self.has_started and not self.between(self._lease):
                break
            call.context = context = copy_context()
            self.record(call, context.run(call.run))
        return self.decision

    def calls(self) -> Iterator[Call]:
        for listener in self._remaining:
            if self._lost or listener.title in self._paused:
                continue
            if self._progress.is_due(listener.title):
                yield self._call(listener)

    def record(self, call: Call, decision: Decision) -> None:
        self.has_started, self._lost = True, decision is LOST
        if not decision.written:  # if it is, record_atomic has recorded it
            self._progress.record(call.listener.title, decision)

    def record_atomic(self, title: str, decision: Decision) -> str:
        """Record what an atomic listener commits with its changes; return the progress to write."""
        self._progress.record(title, decision)
        return self._progress.text

    def mark_committed(self) -> None:
        """Note that the progress returned by ``record_atomic`` is in the row."""
        self.progress_in_row = self._progress.text

    @property
    def decision(self) -> Decision:
        if self._lost:
            return LOST
        return self._progress.decision(self._lease.event.attempts, paused=self._paused)

    def _call(self, listener: Listener) -> Call:
        attempts = self._progress.attempts(listener.title)
        event = self._lease.event.copy_for_listener(attempts)
        event.set_listener(listener.title, self._alias)
        self._lease.event.set_listener(listener.title, self._alias)  # read by Lease.listener
        return Call(
            self._lease, listener, event, attempts, self._settings, self._alias, self.between,
            self._escaping, self,
        )  # fmt: skip
