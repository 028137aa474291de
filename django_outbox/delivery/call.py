"""Call a listener with one event: plain, awaited, or in one transaction with the decision."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any

from .. import hooks
from ..clocks import monotonic
from ..conf import Settings
from ..events import Event, delivering
from ..listeners.outcomes import DONE, LOST, Decision, Failure, Status
from ..listeners.registry import Listener
from ..signals import announce, event_decided, event_started
from . import verdicts
from .async_timeouts import as_async
from .decide import describe, name, recovered
from .interceptors import ends_drain, intercept
from .invocation import Invocation, NotBegun, NotOurs, settle_together
from .lease import Lease

logger = logging.getLogger("django_outbox")

Report = Callable[[Listener, Decision], None]


def report_nothing(listener: Listener, decision: Decision) -> None:
    pass


@dataclass(slots=True)  # not frozen, which is faster: every delivery creates one
class Call(Invocation):
    """One call of a listener with an event.

    When the listener has failed for good, its fallback is called in the same way: within
    interceptors, with the listener's timeout, and, for an atomic listener, in its own transaction.
    """

    lease: Lease
    listener: Listener
    event: Event
    settings: Settings
    alias: str
    between: Callable[[Lease], Any]  # cleans up before the fallback
    report: Report = report_nothing  # called with each decision
    failure: Failure | None = None  # what the fallback is called with, once it is called
    failed: Decision = LOST  # the decision that led to the fallback
    context: Context | None = None  # runs the call; set if the call may be abandoned
    committed: Decision | None = None

    @property
    def called(self) -> Any:
        """The callable that runs: the listener, or its fallback."""
        return self.listener.call if self.failure is None else self.listener.fallback

    def intercept(self) -> ExitStack | None:
        """Enter the interceptors; None if there are none."""
        found = hooks.interceptors()
        return intercept(self.event, found) if found else None

    def run(self) -> Decision:
        """Call the listener, or its fallback if it has failed for good, and decide."""
        answer, seconds = self.call_timed(self.called, *self._begin())
        self.lease.duration += seconds
        if answer is None and self.failure is None:  # as nearly all end; the rest takes longer
            return self._announce_decided(self.committed or DONE)
        return self._conclude(answer, self.committed or self.decide(answer))

    def finish(self, seconds: float) -> Decision:
        """Decide in place of the thread that hangs in this call, abandoned after ``seconds``."""
        error = self.end_abandoned(seconds, [self.lease])
        return self._conclude(error, self.decide(error))

    def copy_for_thread(self, between: Callable[[Lease], Any]) -> Call:
        """Return a copy of the call for another thread; the thread that hangs keeps its event."""
        self.lease.drop_event()
        prepare(self.lease, self.listener, self.alias)  # cannot fail: the payload fitted before
        assert self.context is not None  # policy and fallback may read what the listener set
        context = self.context.copy()
        return replace(self, event=self.lease.event, between=between, context=context)

    def _conclude(self, answer: Any, decision: Decision) -> Decision:
        """Call the fallback if the listener has failed for good; announce what was decided."""
        if self.failure is not None or not verdicts.needs_fallback(self.listener, answer, decision):
            return self._announce_decided(decision)
        self.between(self.lease)
        self.fail(answer, decision)
        return self.run()

    async def arun(self) -> Decision:
        """Await the listener, or its fallback if it has failed for good, and decide."""
        called = self.called if self.failure is None else as_async(self.called)
        answer = await self.acall(called, *self._begin())
        decision = self.decide(answer)
        if self.failure is not None or not verdicts.needs_fallback(self.listener, answer, decision):
            return self._announce_decided(decision)
        await self.between(self.lease)
        self.fail(answer, decision)
        return await self.arun()

    def fail(self, error: BaseException, failed: Decision) -> None:
        """Note that the listener has failed for good, as decided; its fallback is next."""
        self.failed = failed
        self.failure = Failure(
            listener=self.listener.title,
            attempts=self.lease.attempts + 1,
            exception=error,
            text=describe(error),
        )

    def _begin(self) -> tuple[Any, ...]:
        """Announce the call, unless it is the fallback's; return its arguments."""
        delivering.set(self.event)
        if self.failure is not None:
            return self.event, self.failure
        if event_started.receivers:
            announce_start(self.event, self.listener, self.alias)
        return (self.event,)

    def _announce_decided(self, decision: Decision) -> Decision:
        """Report a decision and send its signal; return it."""
        self.report(self.listener, decision)
        if decision is not DONE:
            self._log_recovery(decision)
        if decision is not DONE or event_decided.receivers:
            announce_decided(self.lease, self.event, self.listener, self.alias, decision)
        return decision

    def _log_recovery(self, decision: Decision) -> None:
        failure = self.failure
        if decision.status is Status.DONE and failure is not None:
            logger.warning(
                "fallback succeeded event_id=%s event_type=%s listener=%r attempt=%d error=%s",
                self.event.event_id,
                self.event.event_type,
                failure.listener,
                failure.attempts,
                name(failure.exception),
            )

    def commit(self, answer: Any) -> bool:
        decision = self.decide(answer)
        seconds = monotonic() - self.lease.called_at
        self.lease.note_failure(decision, listener=self.listener.title, seconds=seconds)
        self.committed = replace(decision, written=True)
        return settle_together([(self.lease, decision)], alias=self.alias, settings=self.settings)

    def decide(self, answer: Any) -> Decision:
        """Return the decision on what the listener, or its fallback, returned or raised."""
        if self.failure is not None and not isinstance(answer, (NotBegun, NotOurs)):
            return recovered(answer, failure=self.failure, after=self.failed)
        return verdicts.own(answer, self.lease, self.listener, self.settings)


def announce_start(event: Event, listener: Listener, alias: str) -> None:
    if event_started.receivers:  # checked here too, because the arguments cost time
        announce(event_started, sender=alias, event=event, listener=listener)


def announce_decided(
    lease: Lease, event: Event, listener: Listener, alias: str, decision: Decision
) -> None:
    """Note what was decided for the history of the event, and send the signal."""
    if decision is not DONE:
        lease.note_failure(decision, listener=listener.title, seconds=lease.duration)
    if event_decided.receivers:
        announce(
            event_decided,
            sender=alias,
            event=event,
            listener=listener,
            outcome=decision.outcome,
            duration=lease.duration,
        )


def prepare(lease: Lease, listener: Listener, alias: str) -> BaseException | None:
    """Have an event as its listener gets it; return an error if its payload does not fit."""
    event = lease.event
    event.set_listener(listener.title, alias)
    if listener.payload_type is None:
        return None
    try:
        event.convert_payload(listener.payload_type)
    except BaseException as error:  # the class runs its own code
        if ends_drain(error):
            raise
        return error
    return None


def call_fallback(call: Call) -> Decision:
    """Call the fallback of an event of a batch; return the decision.

    Raises ``CallAbandoned`` if it returns after it was abandoned; see ``deliver.finish``.
    """
    assert call.context is not None
    decision = call.context.run(call.run)
    call.lease.drop_event()
    return decision
