"""One call of one listener, plain, awaited, or in one transaction with its decision."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import isawaitable
from typing import Any

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections

from .. import dialects, hooks, registry
from ..conf import Settings
from ..events import Event
from ..exceptions import ListenerTimeout
from ..outcomes import DONE, LOST, Decision, Failure, Status
from ..registry import Listener
from ..signals import announce, event_decided, event_started
from .decide import decide, describe, name, recovered
from .intercept import Escaping, intercept
from .lease import Lease
from .progress import Progress

logger = logging.getLogger("django_outbox")


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a listener raised: no task may raise all of it, and frames of asgiref tell nothing."""

    error: BaseException


class _Undo(Exception):
    """Leaves the transaction of an atomic listener."""


@dataclass(slots=True)  # not frozen: making one is a part of every delivery
class Call:
    """A listener, the event for it, and how many executions came before.

    When it has failed for good, its fallback is called in the same way: within interceptors, with
    the listener's timeout, and, if the listener is atomic, in a transaction of its own.
    """

    lease: Lease
    listener: Listener
    event: Event
    attempts: int
    settings: Settings
    alias: str
    between: Callable[[Lease], Any]  # tidies up before anything else is called
    escaping: Escaping = ()
    progress: Progress | None = None  # where the event has several listeners

    def run(self) -> Decision:
        """Call and decide."""
        if unfit := self._unfit():
            return unfit
        before = self._begin()
        answer, decision = self._execute(self._decide, self.listener.call, self.event)
        if decision is DONE:
            return self._ended(decision, before)
        failure = self._failure(answer, decision)
        if failure is None:
            return self._ended(decision, before)
        self.between(self.lease)
        decide = partial(recovered, failure=failure, after=decision)
        _, decision = self._execute(decide, self.listener.fallback, self.event, failure)
        return self._ended(self._told(decision, failure), before)

    async def arun(self) -> Decision:
        """Await the listener on the event loop and decide."""
        if unfit := self._unfit():
            return unfit
        before = self._begin()
        answer = await self._awaited(self.listener.call, self.event)
        decision = self._decide(answer)
        failure = self._failure(answer, decision)
        if failure is None:
            return self._ended(decision, before)
        await self.between(self.lease)
        answer = await self._awaited(_awaitable(self.listener.fallback), self.event, failure)
        decision = self._told(recovered(answer, failure=failure, after=decision), failure)
        return self._ended(decision, before)

    def _begin(self) -> float:
        """Announce the call; return the seconds that other listeners of the event took before."""
        announce(event_started, sender=self.alias, event=self.event, listener=self.listener)
        return self.lease.duration if event_decided.receivers else 0.0

    def _ended(self, decision: Decision, before: float) -> Decision:
        if event_decided.receivers:  # asked here, too, for its facts are work for every event
            announce(
                event_decided, sender=self.alias, event=self.event, listener=self.listener,
                outcome=decision.outcome, duration=self.lease.duration - before,
            )  # fmt: skip
        return decision

    def _unfit(self) -> Decision | None:
        """Make the payload what the listener asked for; decide if it cannot be that."""
        if self.listener.payload_type is None:
            return None
        try:
            self.event.take_as(self.listener.payload_type)
        except Exception as error:  # noqa: BLE001 - its class runs code of its own
            return self._decide(error)
        return None

    # -- the ways to call --------------------------------------------------------------------------

    def _execute(
        self, decide: Callable[[Any], Decision], call: Any, *args: Any
    ) -> tuple[Any, Decision]:
        """Return what was answered or raised, and the decision."""
        started = time.monotonic()
        if self.listener.timeout is not None:
            self.lease.overdue_at = started + self.listener.timeout
        try:
            if self.listener.atomic:
                return self._in_transaction(decide, call, args)
            answer = self._answer(call, args)
        finally:
            self.lease.duration += time.monotonic() - started
        return answer, decide(answer)

    def _in_transaction(
        self, decide: Callable[[Any], Decision], call: Any, args: tuple[Any, ...]
    ) -> tuple[Any, Decision]:
        """Commit the decision with what was changed; an error undoes both."""
        connection, answer, decision = connections[self.alias], None, LOST
        try:
            with dialects.of(connection).read_committed(connection):
                answer = self._answer(call, args)
                decision = decide(answer)
                if isinstance(answer, BaseException):
                    raise _Undo
                if not self._write(decision):
                    decision = LOST
                    raise _Undo
        except _Undo:
            return answer, decision
        except Exception as error:  # noqa: BLE001 - the commit was refused: a failure like any other
            return error, decide(error)
        return answer, replace(decision, written=True)

    def _answer(self, call: Any, args: tuple[Any, ...]) -> Any:
        try:
            if not hooks.interceptors():
                return self._called(call, args)
            with intercept(self.event, self.escaping):
                return self._called(call, args)
        except self.escaping:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit too: no listener ends the worker
            return error

    def _called(self, call: Any, args: tuple[Any, ...]) -> Any:
        answer = call(*args)
        if answer is None:
            return None
        if isawaitable(answer):
            answer = async_to_sync(self._timed)(answer)
        return _plain(answer)

    async def _awaited(self, call: Any, *args: Any) -> Any:
        started = time.monotonic()
        try:
            with intercept(self.event, self.escaping):
                return _plain(await self._timed(call(*args)))
        except BaseException as error:
            if self.lease.cancelled and isinstance(error, asyncio.CancelledError):
                raise
            return error
        finally:
            self.lease.duration += time.monotonic() - started

    async def _timed(self, awaitable: Awaitable[Any]) -> Any:
        """Return what was answered or raised; past the timeout it is cancelled."""
        timeout, started = self.listener.timeout, time.monotonic()
        try:
            return await asyncio.wait_for(_guarded(awaitable), timeout)
        except asyncio.TimeoutError as error:  # ours, or one of the listener's own
            if timeout is None or time.monotonic() - started < timeout:
                return _Raised(error)
            late = ListenerTimeout(f"{self.listener.where} ran longer than {timeout} s; cancelled")
            late.__cause__ = error
            return _Raised(late)
        except asyncio.CancelledError as error:
            if self.lease.cancelled:  # by the worker, which stops
                raise
            return _Raised(error)
        except Exception as error:  # noqa: BLE001 - what it may raise is its own
            return _Raised(error)

    # -- what becomes of it ------------------------------------------------------------------------

    def _decide(self, answer: Any) -> Decision:
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
        """Settle on the listener's own connection; say whether the row was still ours."""
        connection, event_id = connections[self.alias], self.event.event_id
        dialect = dialects.of(connection)
        if self.progress is not None:
            self.progress.note(self.listener.title, decision)
            return dialect.keep_progress(
                connection, me=self.lease.owner, event_id=event_id, progress=self.progress.text,
                hold=self.lease.hold,
            )  # fmt: skip
        settled = dialect.settle_all(
            connection,
            me=self.lease.owner,
            decisions=[(event_id, decision)],
            hold=self.lease.hold,
            delete_done=self.settings.RETENTION_DONE == 0,
        )
        return settled == 1

    def _failure(self, answer: Any, decision: Decision) -> Failure | None:
        """Say what the fallback is to hear of: an error that was the last, not an answer."""
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

    def _told(self, decision: Decision, failure: Failure) -> Decision:
        if decision.status is Status.DONE:
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
    """Hold back what would end the loop: before 3.12 a timeout makes a task of its own."""
    try:
        return await awaitable
    except (KeyboardInterrupt, SystemExit) as error:
        return _Raised(error)


def _awaitable(call: Any) -> Callable[..., Awaitable[Any]]:
    """Have a plain fallback run in the thread of its delivery, where it may use the database."""
    if registry.is_async(call):
        return call  # type: ignore[no-any-return]

    async def in_thread(*args: Any) -> Any:
        answer = await sync_to_async(call)(*args)
        return await answer if isawaitable(answer) else answer

    return in_thread
