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
from django.db import connections

from .. import hooks
from ..clocks import monotonic
from ..conf import Settings
from ..events import Event
from ..exceptions import ListenerTimeout
from ..listeners.outcomes import DONE, LOST, Decision, Failure, Status
from ..listeners.registry import Listener, place
from ..signals import announce, event_decided, event_started
from ..sql import dialect_of
from .async_timeouts import awaited, within
from .decide import decide, describe, name, recovered
from .interceptors import Escaping, intercept
from .lease import Lease
from .timeouts import TimedCall, WrittenOff, report

if TYPE_CHECKING:
    from .fanout import FanOut

logger = logging.getLogger("django_outbox")


@dataclass(frozen=True, slots=True)
class _Raised:
    """A returned exception: raised in a task, some end the event loop, and asgiref adds frames."""

    error: BaseException


class _Undo(Exception):
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
    between: Callable[[Lease], Any]  # tidies up before the next listener or fallback
    escaping: Escaping = ()
    fan_out: FanOut | None = None  # set if the event has several listeners
    before: float = 0.0  # seconds that other listeners of the event took before
    failure: Failure | None = None  # what the fallback is called with, once it is called
    failed: Decision = LOST  # the decision that led to the fallback
    context: Context | None = None  # it runs in this; set if it may be written off

    @property
    def timeout(self) -> float | None:
        """Seconds that the listener and its fallback may each run; None: no limit."""
        given = self.listener.timeout
        return self.settings.LISTENER_TIMEOUT if given is None else given

    def run(self) -> Decision:
        """Call the listener and decide."""
        if unfit := self._unfit():
            return unfit
        self._begin()
        answer, decision = self._execute(self.listener.call, self.event)
        return self._ended(decision) if decision is DONE else self._conclude(answer, decision)

    def finish(self, seconds: float) -> Decision:
        """Decide in place of the thread that hangs in this call, written off after ``seconds``."""
        report(self.event, self.listener, self.alias, seconds)
        self.lease.duration += seconds
        self.lease.called_at, self.lease.timed = 0.0, None
        late = self._late("its thread was written off")
        decision = self._decide(late)
        if self.failure is not None:  # it was the fallback
            return self._ended(self._told(decision))
        return self._conclude(late, decision)

    def apart(self, between: Callable[[Lease], Any]) -> Call:
        """Return a copy of the call for another thread; the thread that hangs keeps its event."""
        event = self.event.apart(self.attempts)
        event.called(self.listener.title, self.alias)
        assert self.context is not None  # policy and fallback may read what the listener set
        call = replace(self, event=event, between=between, context=self.context.copy())
        call._unfit()  # cannot fail: the payload fitted before
        return call

    def _conclude(self, answer: Any, decision: Decision) -> Decision:
        """Call the fallback if the listener has failed for good."""
        failure = self._failure(answer, decision)
        if failure is None:
            return self._ended(decision)
        self.between(self.lease)
        self.failure, self.failed = failure, decision
        _, decision = self._execute(self.listener.fallback, self.event, failure)
        return self._ended(self._told(decision))

    async def arun(self) -> Decision:
        """Await the listener on the event loop and decide."""
        if unfit := self._unfit():
            return unfit
        self._begin()
        answer = await self._awaited(self.listener.call, self.event)
        decision = self._decide(answer)
        failure = self._failure(answer, decision)
        if failure is None:
            return self._ended(decision)
        await self.between(self.lease)
        self.failure, self.failed = failure, decision
        answer = await self._awaited(awaited(self.listener.fallback), self.event, failure)
        return self._ended(self._told(self._decide(answer)))

    def _begin(self) -> None:
        announce(event_started, sender=self.alias, event=self.event, listener=self.listener)
        self.before = self.lease.duration

    def _ended(self, decision: Decision) -> Decision:
        if event_decided.receivers:  # checked here too, because the arguments cost time
            announce(
                event_decided, sender=self.alias, event=self.event, listener=self.listener,
                outcome=decision.outcome, duration=self.lease.duration - self.before,
            )  # fmt: skip
        return decision

    def _unfit(self) -> Decision | None:
        """Convert the payload to the listener's type; return a decision if that fails."""
        if self.listener.payload_type is None:
            return None
        try:
            self.event.take_as(self.listener.payload_type)
        except self.escaping:
            raise
        except BaseException as error:  # noqa: BLE001 - the class runs its own code
            return self._decide(error)
        return None

    # -- how to call -------------------------------------------------------------------------------

    def _execute(self, call: Any, *args: Any) -> tuple[Any, Decision]:
        """Return what the listener returned or raised, and the decision.

        Raises ``WrittenOff`` if the call was written off before: this thread must not change
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
            answer = self._answer(timed, call, args)
        lease.duration += monotonic() - started
        lease.called_at = 0.0
        if timed is not None:
            lease.timed = None
            if timed.is_overdue:
                report(self.event, self.listener, self.alias, timed.seconds)
        return answer, self._decide(answer) if decision is None else decision

    def _in_transaction(
        self, timed: TimedCall | None, call: Any, args: tuple[Any, ...]
    ) -> tuple[Any, Decision]:
        """Commit the decision with the listener's changes, without a timeout; errors undo both."""
        connection, answer, decision = connections[self.alias], None, LOST
        try:
            with dialect_of(connection).read_committed(connection):
                answer = self._answer(timed, call, args)
                decision = self._decide(answer)
                if isinstance(answer, BaseException):
                    raise _Undo
                if not self._write(decision):
                    decision = LOST
                    raise _Undo
        except _Undo:
            return answer, decision
        except Exception as error:
            if timed is not None and not (timed.has_returned or timed.returns()):
                raise WrittenOff from error  # the rollback failed
            return error, self._decide(error)
        if self.fan_out is not None:
            self.fan_out.committed()
        return answer, replace(decision, written=True)

    def _answer(self, timed: TimedCall | None, call: Any, args: tuple[Any, ...]) -> Any:
        answer: Any
        try:
            if not hooks.interceptors():
                answer = self._called(timed, call, args)
            else:
                with intercept(self.event, self.escaping):
                    answer = self._called(timed, call, args)
        except self.escaping:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit too: no listener ends the worker
            answer = error
        if timed is not None and not timed.returns():
            raise WrittenOff
        return answer

    def _called(self, timed: TimedCall | None, call: Any, args: tuple[Any, ...]) -> Any:
        answer = call(*args)
        if answer is None:
            return None
        if isawaitable(answer):
            if timed is not None:
                timed.is_awaited()
            answer = async_to_sync(self._timed)(answer)
        return _plain(answer)

    async def _awaited(self, call: Any, *args: Any) -> Any:
        started, began = monotonic(), self.lease.clock
        try:
            with intercept(self.event, self.escaping):
                return _plain(await self._timed(call(*args)))
        except BaseException as error:
            if self.lease.cancelled and isinstance(error, asyncio.CancelledError):
                raise
            return error
        finally:
            self.lease.duration += monotonic() - started
            seconds = self.lease.clock - began
            if self.timeout is not None and seconds >= self.timeout:
                report(self.event, self.listener, self.alias, seconds)

    async def _timed(self, awaitable: Awaitable[Any]) -> Any:
        """Return what the listener returned or raised; cancel it after the timeout."""
        timeout, started = self.timeout, self.lease.clock
        try:
            return await within(timeout, _guarded(awaitable), self.lease)
        except asyncio.TimeoutError as error:  # ours, or one of the listener's own
            if timeout is None or self.lease.clock - started < timeout:
                return _Raised(error)
            late = self._late("cancelled")
            late.__cause__ = error
            return _Raised(late)
        except asyncio.CancelledError as error:
            if self.lease.cancelled:  # by the worker, which is stopping
                raise
            return _Raised(error)
        except Exception as error:  # noqa: BLE001 - a listener may raise anything
            return _Raised(error)

    def _late(self, end: str) -> ListenerTimeout:
        fallback = self.listener.fallback if self.failure is not None else None
        where = place(fallback or self.listener.call)
        return ListenerTimeout(f"{where} ran longer than {self.timeout} s; {end}")

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

    def _write(self, decision: Decision) -> bool:
        """Settle on the listener's connection; return whether the row is ours and as we read it.

        Ours alone is not enough. This worker may have leased the row again: to retry its own call
        that was written off, or after another worker has tried.
        """
        connection, event_id = connections[self.alias], self.event.event_id
        dialect, attempts = dialect_of(connection), self.lease.event.attempts
        if self.fan_out is not None:
            return dialect.keep_progress(
                connection, me=self.lease.owner, event_id=event_id,
                progress=self.fan_out.note_atomic(self.listener.title, decision),
                as_read=(attempts, self.fan_out.in_row), hold=self.lease.hold,
            )  # fmt: skip
        settled = dialect.settle_all(
            connection,
            me=self.lease.owner,
            decisions=[(event_id, decision)],
            hold=self.lease.hold,
            delete_done=self.settings.RETENTION_DONE == 0,
            as_read=(attempts, None),
        )
        return settled == 1

    def _failure(self, answer: Any, decision: Decision) -> Failure | None:
        """Return the failure for the fallback; None without one, or if no exception was final."""
        if self.listener.fallback is None or decision.status is not Status.DEAD:
            return None
        if not isinstance(answer, BaseException):
            return None
        return Failure(
            listener=self.listener.title,
            attempts=self.attempts + 1,
            exception=answer,
            text=describe(answer),
        )

    def _told(self, decision: Decision) -> Decision:
        failure = self.failure
        if decision.status is Status.DONE and failure is not None:
            logger.warning(
                "fallback succeeded event_id=%s event_type=%s listener=%r attempt=%d error=%s",
                self.event.event_id, self.event.event_type, failure.listener, failure.attempts,
                name(failure.exception),
            )  # fmt: skip
        return decision


def _plain(answer: Any) -> Any:
    if isinstance(answer, _Raised):
        raise answer.error
    return None if isinstance(answer, BaseException) else answer  # returned, not raised


async def _guarded(awaitable: Awaitable[Any]) -> Any:
    """Await; return exceptions that would end the event loop instead of raising them."""
    try:
        return await awaitable
    except (KeyboardInterrupt, SystemExit) as error:
        return _Raised(error)
