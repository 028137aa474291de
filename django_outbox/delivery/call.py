"""Call one listener: plain, awaited, or in one transaction with the decision on it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any

from django.db import InterfaceError, OperationalError, connections

from .. import hooks
from ..clocks import monotonic
from ..conf import Settings
from ..events import Event
from ..listeners.outcomes import DONE, LOST, Decision, Failure, Status
from ..listeners.registry import Listener
from ..signals import announce, event_decided, event_started
from ..sql import dialect_of
from ..sql.halving import settle_within
from ..sql.values import Ending
from .async_timeouts import as_async
from .decide import decide, deferred_after_error, describe, name, recovered
from .interceptors import Escaping, intercept
from .invocation import Invocation, Rollback
from .lease import Lease
from .timeouts import CallAbandoned, TimedCall, report_timeout

logger = logging.getLogger("django_outbox")


@dataclass(slots=True)  # not frozen, which is faster: every delivery creates one
class Call(Invocation):
    """One call of a listener with an event, after ``attempts`` earlier executions.

    When the listener has failed for good, its fallback is called in the same way: within
    interceptors, with the listener's timeout, and, for an atomic listener, in its own transaction.
    """

    lease: Lease
    listener: Listener
    event: Event
    attempts: int
    settings: Settings
    alias: str
    between: Callable[[Lease], Any]  # cleans up before the next listener or fallback
    escaping: Escaping = ()
    report: Callable[[Listener, Decision], None] | None = None  # called with each decision
    duration_before: float = 0.0  # seconds that earlier listeners of the event took
    failure: Failure | None = None  # what the fallback is called with, once it is called
    failed: Decision = LOST  # the decision that led to the fallback
    context: Context | None = None  # runs the call; set if the call may be abandoned

    @property
    def called(self) -> Any:
        """The callable that runs: the listener, or its fallback."""
        return self.listener.call if self.failure is None else self.listener.fallback

    def intercept(self) -> ExitStack | None:
        """Enter the interceptors; None if there are none."""
        found = hooks.interceptors()
        return intercept(self.event, found, self.escaping) if found else None

    def report_if_late(self, seconds: float) -> None:
        """Report a call that took ``seconds`` if that is more than its timeout."""
        if self.timeout is not None and seconds >= self.timeout:
            report_timeout(self.event, self.listener, self.alias, seconds)

    def run(self) -> Decision:
        """Call the listener and decide."""
        if failed := self.convert_payload():
            return failed
        self.begin()
        answer, decision = self._execute(self.listener.call, self.event)
        if decision is DONE:
            return self.announce_decided(decision)
        return self._fall_back_if_failed(answer, decision)

    def finish(self, seconds: float) -> Decision:
        """Decide in place of the thread that hangs in this call, abandoned after ``seconds``."""
        report_timeout(self.event, self.listener, self.alias, seconds)
        self.lease.duration += seconds
        self.lease.called_at, self.lease.timed = 0.0, None
        error = self.timeout_error("its thread was written off")
        decision = self.decide(error)
        if self.failure is not None:  # it was the fallback
            return self.announce_decided(self._log_recovery(decision))
        return self._fall_back_if_failed(error, decision)

    def copy_for_thread(self, between: Callable[[Lease], Any]) -> Call:
        """Return a copy of the call for another thread; the thread that hangs keeps its event."""
        event = self.event.copy_for_listener(self.attempts)
        event.set_listener(self.listener.title, self.alias)
        assert self.context is not None  # policy and fallback may read what the listener set
        call = replace(self, event=event, between=between, context=self.context.copy())
        call.convert_payload()  # cannot fail: the payload fitted before
        return call

    def _fall_back_if_failed(self, answer: Any, decision: Decision) -> Decision:
        """Call the fallback if the listener has failed for good."""
        failure = self.final_failure(answer, decision)
        if failure is None:
            return self.announce_decided(decision)
        self.between(self.lease)
        return self.fall_back(failure, decision)

    def fall_back(self, failure: Failure, failed: Decision) -> Decision:
        """Call the fallback after the decision ``failed``; return the decision."""
        self.failure, self.failed = failure, failed
        _, decision = self._execute(self.listener.fallback, self.event, failure)
        return self.announce_decided(self._log_recovery(decision))

    async def arun(self) -> Decision:
        """Await the listener on the event loop and decide."""
        if failed := self.convert_payload():
            return failed
        self.begin()
        answer = await self.acall(self.listener.call, self.event)
        decision = self.decide(answer)
        failure = self.final_failure(answer, decision)
        if failure is None:
            return self.announce_decided(decision)
        await self.between(self.lease)
        return await self.afall_back(failure, decision)

    async def afall_back(self, failure: Failure, failed: Decision) -> Decision:
        """Await the fallback after the decision ``failed``; return the decision."""
        self.failure, self.failed = failure, failed
        answer = await self.acall(as_async(self.listener.fallback), self.event, failure)
        return self.announce_decided(self._log_recovery(self.decide(answer)))

    def begin(self) -> None:
        """Announce that the listener is called."""
        if event_started.receivers:
            announce(event_started, sender=self.alias, event=self.event, listener=self.listener)
        self.duration_before = self.lease.duration

    def announce_decided(self, decision: Decision) -> Decision:
        """Report a decision and send its signal; return it."""
        if self.report is not None:
            self.report(self.listener, decision)
        seconds = self.lease.duration - self.duration_before
        if decision is not DONE:
            self._note(decision, seconds)
        if event_decided.receivers:  # checked here too, because the arguments cost time
            announce(
                event_decided,
                sender=self.alias,
                event=self.event,
                listener=self.listener,
                outcome=decision.outcome,
                duration=seconds,
            )
        return decision

    def convert_payload(self) -> Decision | None:
        """Convert the payload to the listener's type; return a decision if that fails."""
        if self.listener.payload_type is None:
            return None
        try:
            self.event.convert_payload(self.listener.payload_type)
        except self.escaping:
            raise
        except BaseException as error:  # noqa: BLE001 - the class runs its own code
            decision = self.decide(error)
            self._note(decision, 0.0)
            return decision
        return None

    def _note(self, decision: Decision, seconds: float) -> None:
        """Note a failure for the history of the event; the listener took ``seconds``."""
        self.lease.note_failure(
            decision, listener=self.listener.title, number=self.attempts + 1, seconds=seconds
        )

    def _ending(self, decision: Decision) -> Ending:
        """Return a decision that is committed before it is announced, with its history."""
        listener, number = self.listener.title, self.attempts + 1
        seconds = monotonic() - self.lease.called_at
        failure = self.lease.failure(decision, listener=listener, number=number, seconds=seconds)
        return self.lease.ending(decision, failure)

    # -- how to call -------------------------------------------------------------------------------

    def _execute(self, call: Any, *args: Any) -> tuple[Any, Decision]:
        """Return what the listener returned or raised, and the decision.

        Raises ``CallAbandoned`` if the call was abandoned before: this thread must not change
        anything then.
        """
        lease, timeout = self.lease, self.timeout
        timed: TimedCall | None = None
        started = lease.called_at = monotonic()
        decision: Decision | None = None
        if timeout is not None:
            timed = lease.timed = TimedCall(self, started, timeout)
        if self.listener.atomic:
            answer, decision = self._in_transaction(timed, call, args)
        else:
            answer = self.call_intercepted(timed, call, args)
        lease.duration += monotonic() - started
        lease.called_at = 0.0
        if timed is not None:
            lease.timed = None
            if timed.timed_out:
                report_timeout(self.event, self.listener, self.alias, timed.seconds)
        return answer, self.decide(answer) if decision is None else decision

    def _in_transaction(
        self, timed: TimedCall | None, call: Any, args: tuple[Any, ...]
    ) -> tuple[Any, Decision]:
        """Commit the decision with the listener's changes, without a timeout; errors undo both."""
        connection, answer, decision, has_begun = connections[self.alias], None, LOST, False
        try:
            with dialect_of(connection).read_committed(connection):
                has_begun = True
                answer = self.call_intercepted(timed, call, args)
                decision = self.decide(answer)
                if isinstance(answer, BaseException):
                    raise Rollback
                if not self._settle(decision):
                    decision = LOST
                    raise Rollback
        except Rollback:
            return answer, decision
        except Exception as error:
            if timed is not None and not (timed.has_returned or timed.mark_returned()):
                raise CallAbandoned from error  # the rollback failed
            if not has_begun and isinstance(error, (OperationalError, InterfaceError)):
                logger.warning(
                    "transaction could not begin event_id=%s listener=%r error=%s",
                    self.event.event_id,
                    self.listener.title,
                    error,
                )
                return error, deferred_after_error()
            return error, self.decide(error)
        return answer, replace(decision, written=True)

    # -- what to decide ----------------------------------------------------------------------------

    def decide(self, answer: Any) -> Decision:
        """Return the decision on what the listener, or its fallback, returned or raised."""
        if self.failure is not None:
            return recovered(answer, failure=self.failure, after=self.failed)
        if answer is None:
            return DONE
        limit = self.settings.DEFER_LIMIT
        return decide(
            answer,
            attempts=self.attempts,
            policy=self.listener.retry or hooks.retry_policy(),
            max_attempts=self.settings.MAX_ATTEMPTS,
            age=0.0 if limit is None else self.lease.age,
            defer_limit=limit,
        )

    def _settle(self, decision: Decision) -> bool:
        """Settle on the listener's connection; return whether the lease was still ours."""
        settled = settle_within(
            connections[self.alias],
            [self._ending(decision)],
            me=self.lease.owner,
            kind=self.lease.kind,
            delete_done=self.settings.RETENTION_DONE == 0,
        )
        return settled == 1

    def final_failure(self, answer: Any, decision: Decision) -> Failure | None:
        """Return the failure for the fallback; None without one, or if no exception was final."""
        is_final = decision.status is Status.DEAD and isinstance(answer, BaseException)
        if self.listener.fallback is None or not is_final:
            return None
        return Failure(
            listener=self.listener.title,
            attempts=self.attempts + 1,
            exception=answer,
            text=describe(answer),
        )

    def _log_recovery(self, decision: Decision) -> Decision:
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
        return decision
