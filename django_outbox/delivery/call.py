"""One call of one listener, plain, awaited, or in one transaction with its decision."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import Any

from asgiref.sync import async_to_sync
from django.db import connections

from .. import dialects, hooks
from ..conf import Settings
from ..exceptions import ListenerTimeout
from ..outcomes import LOST, Decision
from ..registry import Listener
from ..signals import announce, event_started
from .decide import decide
from .lease import Lease

Escaping = tuple[type[BaseException], ...]


async def _finish(answer: Awaitable[Any]) -> Any:
    return await answer


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a listener raised that no task may raise."""

    error: BaseException


class _Undo(Exception):
    """Leaves an atomic listener's transaction with a decision."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision


@dataclass(frozen=True, slots=True)
class Call:
    """A listener, the event for it, and how many executions came before."""

    lease: Lease
    listener: Listener
    attempts: int
    settings: Settings
    alias: str
    escaping: Escaping = ()

    def run(self, *, write: Callable[[Decision], bool]) -> Decision:
        """Call and decide; ``write`` commits an atomic listener's decision with its effects."""
        self._announce()
        if self.listener.timeout is not None:
            self.lease.overdue_at = time.monotonic() + self.listener.timeout
        return self._run_atomic(write) if self.listener.atomic else self._decide(self._answer())

    async def arun(self) -> Decision:
        """Await the listener on the event loop and decide."""
        self._announce()
        return self._decide(await self._awaited())

    async def _awaited(self) -> Any:
        """Return what the listener answered or raised; past its timeout it is cancelled."""
        timeout, started = self.listener.timeout, time.monotonic()
        try:
            answer = await asyncio.wait_for(self._guarded(), timeout)
        except asyncio.TimeoutError as error:  # ours, or one of the listener's own
            if timeout is None or time.monotonic() - started < timeout:
                return error
            text = f"{self.listener.where} ran longer than {timeout} s and was cancelled"
            return ListenerTimeout(text)
        except asyncio.CancelledError as error:
            if self.lease.cancelled:  # by the worker, which stops
                raise
            return error
        except Exception as error:  # noqa: BLE001 - what it may raise is its own
            return error
        if isinstance(answer, _Raised):
            if isinstance(answer.error, self.escaping):
                raise answer.error
            return answer.error
        return answer

    async def _guarded(self) -> Any:
        """Hold back what would end the loop: before 3.12 a timeout makes a task of its own."""
        try:
            answer = await self.listener.call(self.lease.event)
        except (KeyboardInterrupt, SystemExit) as error:
            return _Raised(error)
        return None if isinstance(answer, BaseException) else answer  # returned, not raised

    def write_decision(self, decision: Decision) -> bool:
        """Settle on the listener's own connection; say whether the row was still ours."""
        connection, event_id = connections[self.alias], self.lease.event_id
        dialect = dialects.of(connection)
        return (
            dialect.settle_all(
                connection,
                me=self.lease.owner,
                decisions=[(event_id, decision)],
                delete_done=self.settings.RETENTION_DONE == 0,
            )
            == 1
        )

    def write_progress(self, text: str) -> bool:
        """Keep a fan-out's progress on the listener's own connection, fenced alike."""
        connection = connections[self.alias]
        return dialects.of(connection).keep_progress(
            connection, me=self.lease.owner, event_id=self.lease.event_id, progress=text
        )

    def _answer(self) -> Any:
        try:
            if self.listener.is_async:
                return async_to_sync(self._awaited)()
            answer = self.listener.call(self.lease.event)
            if isawaitable(answer):  # of a plain function that calls an async one
                answer = async_to_sync(_finish)(answer)
        except self.escaping:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit too: no listener ends the worker
            return error
        return None if isinstance(answer, BaseException) else answer  # returned, not raised

    def _run_atomic(self, write: Callable[[Decision], bool]) -> Decision:
        connection = connections[self.alias]
        try:
            with dialects.of(connection).read_committed(connection):
                answer = self._answer()
                decision = self._decide(answer)
                if isinstance(answer, BaseException):
                    raise _Undo(decision)
                if not write(decision):
                    raise _Undo(LOST)
        except _Undo as undo:
            return undo.decision
        except Exception as error:  # noqa: BLE001 - the commit was refused: a failure like any other
            return self._decide(error)
        return replace(decision, written=True)

    def _decide(self, answer: Any) -> Decision:
        limit = self.settings.DEFER_LIMIT
        return decide(
            answer,
            attempts=self.attempts,
            policy=self.listener.retry or hooks.retry_policy(),
            max_attempts=self.settings.MAX_ATTEMPTS,
            age=0.0 if limit is None else self.lease.age,
            defer_limit=limit,
        )

    def _announce(self) -> None:
        announce(event_started, sender=self.alias, event=self.lease.event, listener=self.listener)
