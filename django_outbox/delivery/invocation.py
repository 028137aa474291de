"""``Invocation``: how a listener is called: within interceptors, with its timeout, and awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from asgiref.sync import async_to_sync

from ..clocks import monotonic
from ..conf import Settings
from ..exceptions import ListenerTimeout
from ..listeners.callables import location
from ..listeners.registry import Listener
from .async_timeouts import with_timeout
from .interceptors import Escaping
from .lease import Lease
from .timeouts import CallAbandoned, TimedCall


@dataclass(frozen=True, slots=True)
class _Raised:
    """A returned exception: raised in a task, some end the event loop, and asgiref adds frames."""

    error: BaseException


class Rollback(Exception):
    """Rolls back the transaction of an atomic listener."""


class Invocation:
    """The base of ``Call`` and ``BatchCall``, whose attributes these are."""

    __slots__ = ()

    lease: Lease  # its clock and its timeout; of a batch: its first event's
    listener: Listener
    settings: Settings
    alias: str
    escaping: Escaping

    @property
    def timeout(self) -> float | None:
        """Seconds that the listener and its fallback may each run; None: no limit."""
        given = self.listener.timeout
        if given is None and self.listener.check is None:  # a relay ends its calls by itself
            return self.settings.LISTENER_TIMEOUT
        return given

    @property
    def called(self) -> Any:
        """The callable that runs."""
        return self.listener.call

    def intercept(self) -> ExitStack | None:
        """Enter the interceptors; None if there are none."""
        raise NotImplementedError

    def report_if_late(self, seconds: float) -> None:
        """Report a call that took ``seconds`` if that is more than its timeout."""
        raise NotImplementedError

    def call_intercepted(self, timed: TimedCall | None, call: Any, args: tuple[Any, ...]) -> Any:
        """Return what a call returns or raises; ``CallAbandoned`` if it was abandoned before."""
        answer: Any
        try:
            stack = self.intercept()
            if stack is None:
                answer = self._call(timed, call, args)
            else:
                with stack:
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
        return self._unwrap(answer)

    async def acall(self, call: Any, *args: Any) -> Any:
        """Await a call; return what it returns or raises."""
        started, began = monotonic(), self.lease.clock
        try:
            with self.intercept() or ExitStack():
                return self._unwrap(await self._await_with_timeout(call(*args)))
        except BaseException as error:
            if self.lease.cancelled and isinstance(error, asyncio.CancelledError):
                raise
            return error
        finally:
            self.lease.duration += monotonic() - started
            self.report_if_late(self.lease.clock - began)

    async def _await_with_timeout(self, awaitable: Awaitable[Any]) -> Any:
        """Return what the listener returned or raised; cancel it after the timeout."""
        timeout, started = self.timeout, self.lease.clock
        try:
            return await with_timeout(timeout, _await_guarded(awaitable), self.lease)
        except asyncio.TimeoutError as error:  # ours, or one of the listener's own
            if timeout is None or self.lease.clock - started < timeout:
                return _Raised(error)
            timeout_error = self.timeout_error("cancelled")
            timeout_error.__cause__ = error
            return _Raised(timeout_error)
        except asyncio.CancelledError as error:
            if self.lease.cancelled:  # by the worker, which is stopping
                raise
            return _Raised(error)
        except Exception as error:  # noqa: BLE001 - a listener may raise anything
            return _Raised(error)

    def checked(self, answer: Any) -> Any:
        """Return the answer that a returned value means; raise if it is not one."""
        return None if isinstance(answer, BaseException) else answer  # returned, not raised

    def _unwrap(self, answer: Any) -> Any:
        if isinstance(answer, _Raised):
            raise answer.error
        return self.checked(answer)

    def timeout_error(self, consequence: str) -> ListenerTimeout:
        """Return the error of a call that ran longer than its timeout."""
        where = location(self.called)
        return ListenerTimeout(f"{where} ran longer than {self.timeout} s; {consequence}")


async def _await_guarded(awaitable: Awaitable[Any]) -> Any:
    """Await; return exceptions that would end the event loop instead of raising them."""
    try:
        return await awaitable
    except (KeyboardInterrupt, SystemExit) as error:
        return _Raised(error)
