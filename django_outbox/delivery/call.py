"""Call one listener: plain, awaited, or in one transaction with the decision on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync
from django.db import InterfaceError, OperationalError, connections

from .. import hooks
from ..clocks import monotonic
from ..conf import Settings
from ..events import Event
from ..exceptions import ListenerTimeout
from ..listeners.outcomes import DONE, LOST, Decision, Failure, Status
from ..listeners.registry import Listener, location
from ..signals import announce, event_decided, event_started
from ..sql import dialect_of
from .async_timeouts import as_async, with_timeout
from .decide import decide, deferred_after_error, describe, name, recovered
from .interceptors import Escaping, intercept
from .lease import Lease
from .timeouts import CallAbandoned, TimedCall, report_timeout

if TYPE_CHECKING:
    from .fanout import FanOut

logger = logging.getLogger("django_outbox")


@dataclass(frozen=True, slots=True)
class _Raised:
    """A returned exception: raised in a task, some end the event loop, and asgiref adds frames."""

    error: BaseException


class _Rollback(Exception):
    """Rolls back the transaction of an atomic listener."""


@dataclass(slots=True)  # not frozen, which is faster: every delivery creates one
class Call:
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
    fan_out: FanOut | None = None  # set if the event has several listeners
    report: Callable[[Listener, Decision], None] | None = None  # is told what is decided
    duration_before: float = 0.0  # seconds that earlier listeners of the event took
    failure: Failure | None = None  # what the fallback is called with, once it is called
    failed: Decision = LOST  # the decision that led to the fallback
    context: Context | None = None  # runs the call; set if the call may be abandoned

    @property
    def timeout(self) -> float | None:
        """Seconds that the listener and its fallback may each run; None: no limit."""
        given = self.listener.timeout
        return self.settings.LISTENER_TIMEOUT if given is None else given

    def run(self) -> Decision:
        """Call the listener and decide."""
        if failed := self._convert_payload():
            return failed
        self._begin()
        answer, decision = self._execute(self.listener.call, self.event)
        if decision is DONE:
            return self._announce_decided(decision)
        return self._fall_back_if_failed(answer, decision)

    def finish(self, seconds: float) -> Decision:
        """Decide in place of the thread that hangs in this call, abandoned after ``seconds``."""
        report_timeout(self.event, self.listener, self.alias, seconds)
        self.lease.duration += seconds
        self.lease.called_at, self.lease.timed = 0.0, None
        timeout_error = self._timeout_error("its thread was written off")
        decision = self._decide(timeout_error)
        if self.failure is not None:  # it was the fallback
            return self._announce_decided(self._log_recovery(decision))
        return self._fall_back_if_failed(timeout_error, decision)

    def copy_for_thread(self, between: Callable[[Lease], Any]) -> Call:
        """Return a copy of the call for another thread; the thread that hangs keeps its event."""
        event = self.event.copy_for_listener(self.attempts)
        event.set_listener(self.listener.title, self.alias)
        assert self.context is not None  # policy and fallback may read what the listener set
        call = replace(self, event=event, between=between, context=self.context.copy())
        call._convert_payload()  # cannot fail: the payload fitted before
        return call

    def _fall_back_if_failed(self, answer: Any, decision: Decision) -> Decision:
        """Call the fallback if the listener has failed for good."""
        failure = self._final_failure(answer, decision)
        if failure is None:
            return self._announce_decided(decision)
        self.between(self.lease)
        self.failure, self.failed = failure, decision
        _, decision = self._execute(self.listener.fallback, self.event, failure)
        return self._announce_decided(self._log_recovery(decision))

    async def arun(self) -> Decision:
        """Await the listener on the event loop and decide."""
        if failed := self._convert_payload():
            return failed
        self._begin()
        answer = await self._acall(self.listener.call, self.event)
        decision = self._decide(answer)
        failure = self._final_failure(answer, decision)
        if failure is None:
            return self._announce_decided(decision)
        await self.between(self.lease)
        self.failure, self.failed = failure, decision
        answer = await self._acall(as_async(self.listener.fallback), self.event, failure)
        return self._announce_decided(self._log_recovery(self._decide(answer)))

    def _begin(self) -> None:
        announce(event_started, sender=self.alias, event=self.event, listener=self.listener)
        self.duration_before = self.lease.duration

    def _announce_decided(self, decision: Decision) -> Decision:
        if self.report is not None:
            self.report(self.listener, decision)
        if event_decided.receivers:  # checked here too, because the arguments cost time
            announce(
                event_decided, sender=self.alias, event=self.event, listener=self.listener,
                outcome=decision.outcome, duration=self.lease.duration - self.duration_before,
            )  # fmt: skip
        return decision

    def _convert_payload(self) -> Decision | None:
        """Convert the payload to the listener's type; return a decision if that fails."""
        if self.listener.payload_type is None:
            return None
        try:
            self.event.convert_payload(self.listener.payload_type)
        except self.escaping:
            raise
        except BaseException as error:  # noqa: BLE001 - the class runs its own code
            return self._decide(error)
        return None

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
            answer = self._call_intercepted(timed, call, args)
        lease.duration += monotonic() - started
        lease.called_at = 0.0
        if timed is not None:
            lease.timed = None
            if timed.timed_out:
                report_timeout(self.event, self.listener, self.alias, timed.seconds)
        return answer, self._decide(answer) if decision is None else decision

    def _in_transaction(
        self, timed: TimedCall | None, call: Any, args: tuple[Any, ...]
    ) -> tuple[Any, Decision]:
        """Commit the decision with the listener's changes, without a timeout; errors undo both."""
        connection, answer, decision, has_begun = connections[self.alias], None, LOST, False
        try:
            with dialect_of(connection).read_committed(connection):
                has_begun = True
                answer = self._call_intercepted(timed, call, args)
                decision = self._decide(answer)
                if isinstance(answer, BaseException):
                    raise _Rollback
                if not self._settle(decision):
                    decision = LOST
                    raise _Rollback
        except _Rollback:
            return answer, decision
        except Exception as error:
            if timed is not None and not (timed.has_returned or timed.mark_returned()):
                raise CallAbandoned from error  # the rollback failed
            if not has_begun and isinstance(error, (OperationalError, InterfaceError)):
                event_id = self.event.event_id
                logger.warning("transaction could not begin event_id=%s error=%s", event_id, error)
                return error, deferred_after_error()
            return error, self._decide(error)
        if self.fan_out is not None:
            self.fan_out.mark_committed()
        return answer, replace(decision, written=True)

    def _call_intercepted(self, timed: TimedCall | None, call: Any, args: tuple[Any, ...]) -> Any:
        answer: Any
        try:
            if not hooks.interceptors():
                answer = self._call(timed, call, args)
            else:
                with intercept(self.event, self.escaping):
                    answer = self._call(timed, call, args)
        except self.escaping:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit too: no listener ends the worker
            answer = error
        if timed is not None and not timed.mark_returned():
            raise CallAbandoned
        return answer

    def _call(self, timed: TimedCall | None, call: Any, args: tuple[Any, ...]) -> Any:
        answer = call(*args)
        if answer is None:
            return None
        if isawaitable(answer):
            if timed is not None:
                timed.mark_awaited()
            answer = async_to_sync(self._await_with_timeout)(answer)
        return _unwrap(answer)

    async def _acall(self, call: Any, *args: Any) -> Any:
        started, began = monotonic(), self.lease.clock
        try:
            with intercept(self.event, self.escaping):
                return _unwrap(await self._await_with_timeout(call(*args)))
        except BaseException as error:
            if self.lease.cancelled and isinstance(error, asyncio.CancelledError):
                raise
            return error
        finally:
            self.lease.duration += monotonic() - started
            seconds = self.lease.clock - began
            if self.timeout is not None and seconds >= self.timeout:
                report_timeout(self.event, self.listener, self.alias, seconds)

    async def _await_with_timeout(self, awaitable: Awaitable[Any]) -> Any:
        """Return what the listener returned or raised; cancel it after the timeout."""
        timeout, started = self.timeout, self.lease.clock
        try:
            return await with_timeout(timeout, _await_guarded(awaitable), self.lease)
        except asyncio.TimeoutError as error:  # ours, or one of the listener's own
            if timeout is None or self.lease.clock - started < timeout:
                return _Raised(error)
            timeout_error = self._timeout_error("cancelled")
            timeout_error.__cause__ = error
            return _Raised(timeout_error)
        except asyncio.CancelledError as error:
            if self.lease.cancelled:  # by the worker, which is stopping
                raise
            return _Raised(error)
        except Exception as error:  # noqa: BLE001 - a listener may raise anything
            return _Raised(error)

    def _timeout_error(self, consequence: str) -> ListenerTimeout:
        fallback = self.listener.fallback if self.failure is not None else None
        where = location(fallback or self.listener.call)
        return ListenerTimeout(f"{where} ran longer than {self.timeout} s; {consequence}")

    # -- what to decide ----------------------------------------------------------------------------

    def _decide(self, answer: Any) -> Decision:
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
        """Settle on the listener's connection; return whether the row is ours and as we read it.

        Ours alone is not enough. This worker may have leased the row again: to retry its own call
        that was abandoned, or after another worker has tried.
        """
        connection, event_id = connections[self.alias], self.event.event_id
        dialect, attempts = dialect_of(connection), self.lease.event.attempts
        if self.fan_out is not None:
            return dialect.keep_progress(
                connection, me=self.lease.owner, event_id=event_id,
                progress=self.fan_out.record_atomic(self.listener.title, decision),
                as_read=(attempts, self.fan_out.progress_in_row), kind=self.lease.kind,
            )  # fmt: skip
        settled = dialect.settle_all(
            connection,
            me=self.lease.owner,
            decisions=[(event_id, decision)],
            kind=self.lease.kind,
            delete_done=self.settings.RETENTION_DONE == 0,
            as_read=(attempts, None),
        )
        return settled == 1

    def _final_failure(self, answer: Any, decision: Decision) -> Failure | None:
        """Return the failure for the fallback; None without one, or if no exception was final."""
        is_final = decision.status is Status.DEAD and isinstance(answer, BaseException)
        if self.listener.fallback is None or not is_final:
            return None
        return Failure(
            listener=self.listener.title, attempts=self.attempts + 1, exception=answer,
            text=describe(answer),
        )  # fmt: skip

    def _log_recovery(self, decision: Decision) -> Decision:
        failure = self.failure
        if decision.status is Status.DONE and failure is not None:
            logger.warning(
                "fallback succeeded event_id=%s event_type=%s listener=%r attempt=%d error=%s",
                self.event.event_id, self.event.event_type, failure.listener, failure.attempts,
                name(failure.exception),
            )  # fmt: skip
        return decision


def _unwrap(answer: Any) -> Any:
    if isinstance(answer, _Raised):
        raise answer.error
    return None if isinstance(answer, BaseException) else answer  # returned, not raised


async def _await_guarded(awaitable: Awaitable[Any]) -> Any:
    """Await; return exceptions that would end the event loop instead of raising them."""
    try:
        return await awaitable
    except (KeyboardInterrupt, SystemExit) as error:
        return _Raised(error)
