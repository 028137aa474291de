"""Call several listeners of one event: each when it is due, independently of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import replace
from typing import Any

from ..conf import Settings
from ..listeners.outcomes import LOST, Decision, Status
from ..listeners.progress import PAUSED_DELAY, Progress
from ..listeners.queues import next_due, queue_of
from ..listeners.registry import Listener
from .call import Call
from .interceptors import Escaping
from .lease import Lease
from .scope import EVERYTHING, Scope, closed_queues, paused_listeners


class FanOut:
    """The calls of one event's listeners, each when it is due.

    A failed one does not hold up the others. Each gets its own copy of the event and its payload.
    Listeners outside ``scope`` are left to other threads; the decision names their queue.
    """

    def __init__(
        self,
        lease: Lease,
        listeners: tuple[Listener, ...],
        settings: Settings,
        alias: str,
        between: Callable[[Lease], Any],
        escaping: Escaping = (),
        scope: Scope = EVERYTHING,
    ) -> None:
        self.has_started = False
        self.between = between
        self.progress_in_row = lease.progress_in_row  # the progress that is in the row
        self._listeners, self._remaining = listeners, iter(listeners)  # all; not yet considered
        self._lease, self._settings, self._alias = lease, settings, alias
        self._escaping, self._scope = escaping, scope
        self._progress = Progress(
            lease.progress, titles=[each.title for each in listeners], now=lease.database_now
        )
        self._committing = self._progress  # what an atomic listener is about to commit
        self._lost = self._has_failed = False
        self._unavailable = ""  # why what a listener sends to cannot be reached

    def run(self) -> Decision:
        """Call the listeners that are due, or those of them that are left; return the decision."""
        for call in self.calls():
            if self.has_started and not self.between(self._lease):
                break
            call.context = context = copy_context()
            self.record(call.listener.title, context.run(call.run))
        return self.decision

    def calls(self) -> Iterator[Call]:
        for listener in self._remaining:
            if not self._lost and self.is_due(listener):
                yield self._call(listener)

    def is_due(self, listener: Listener) -> bool:
        """Return whether this listener may be called now."""
        return self._scope.includes(listener) and self._progress.is_due(listener.title)

    def attempts(self, listener: Listener) -> int:
        """Return the executions of a listener so far."""
        return self._progress.attempts(listener.title)

    def record(self, title: str, decision: Decision) -> None:
        """Record the decision on a listener's call."""
        self.has_started, self._lost = True, decision is LOST
        self._has_failed |= decision.status in (Status.RETRY, Status.DEAD)
        self._unavailable = decision.unavailable
        if not decision.written:  # if it is, mark_committed has recorded it
            self._progress.record(title, decision)

    def record_atomic(self, title: str, decision: Decision) -> str:
        """Return the progress that an atomic listener commits; it counts once it is committed."""
        self._committing = self._progress.copy()
        self._committing.record(title, decision)
        return self._committing.text

    def mark_committed(self) -> None:
        """Note that the progress returned by ``record_atomic`` is in the row."""
        self._progress = self._committing
        self.progress_in_row = self._lease.progress_in_row = self._progress.text

    @property
    def decision(self) -> Decision:
        """The decision on the row; if listeners are left, it waits in the queue of the next one."""
        if self._lost:
            return LOST
        progress, pauses = self._progress, self._scope.pauses
        paused = paused_listeners(pauses)
        listeners = [each for each in self._listeners if each.title not in paused]
        following = next_due(listeners, progress.entries, progress.now, closed_queues(pauses))
        delay, queue = PAUSED_DELAY, None
        if following is not None:
            listener, at = following
            queue = queue_of(listener)
            delay = 0.0 if at is None else max((at - progress.now).total_seconds(), 0.0)
        decision = progress.decision(self._lease.event.attempts, delay=delay, queue=queue)
        if self._unavailable and decision.outcome == "deferred":
            decision = replace(decision, unavailable=self._unavailable)
        if decision.delay != 0 or following is None or self._scope.includes(following[0]):
            return decision
        outcome = decision.outcome if self._has_failed else "moved"
        return replace(decision, outcome=outcome, elsewhere=True)

    def _call(self, listener: Listener) -> Call:
        attempts = self._progress.attempts(listener.title)
        event = self._lease.event.copy_for_listener(attempts)
        event.set_listener(listener.title, self._alias)
        self._lease.event.set_listener(listener.title, self._alias)  # read by Lease.listener
        return Call(
            self._lease,
            listener,
            event,
            attempts,
            self._settings,
            self._alias,
            self.between,
            self._escaping,
            self,
            report=self._scope.report,
        )
