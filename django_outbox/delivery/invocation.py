"""``Invocation``: how a listener is called: within interceptors, with its timeout, and awaited."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from asgiref.sync import async_to_sync
from django.db import InterfaceError, OperationalError, connections

from ..clocks import monotonic
from ..conf import Settings
from ..events import Event
from ..exceptions import ListenerTimeout
from ..listeners.callables import location
from ..listeners.outcomes import Decision
from ..listeners.registry import Listener
from ..signals import announce, listener_overdue
from ..sql import dialect_of
from ..sql.halving import settle_within
from ..sql.values import Ending, LeaseKind
from .async_timeouts import with_timeout
from .interceptors import ends_drain
from .lease import Lease
from .timeouts import CallAbandoned, TimedCall

logger = logging.getLogger("django_outbox")


@dataclass(frozen=True, slots=True)
class _Raised:
    """A returned exception: raised in a task, some end the event loop, and asgiref adds frames."""

    error: BaseException


class NotBegun(Exception):
    """The transaction of a call could not begin, so that the listener was not called."""


class NotOurs(Exception):
    """The lease of a call had ended when it was to be settled; its transaction is undone."""


class _Rollback(Exception):
    """Rolls back the transaction of an atomic listener."""


class Invocation:
    """The base of ``Call`` and ``BatchCall``, whose attributes these are."""

    __slots__ = ()

    lease: Lease  # its clock and its timeout; of a batch: its first event's
    event: Event
    listener: Listener
    settings: Settings
    alias: str
    committed: Any  # what an atomic listener's transaction has committed

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

    def commit(self, answer: Any) -> bool:
        """Settle in an atomic listener's transaction; return whether the leases were ours."""
        raise NotImplementedError

    def report_if_late(self, seconds: float) -> None:
        """Report a call that took ``seconds`` if that is more than its timeout."""
        if self.timeout is None or seconds < self.timeout:
            return
        event, listener = self.event, self.listener
        logger.warning(
            "listener runs longer than its timeout "
            "event_id=%s event_type=%s listener=%r seconds=%.1f",
            event.event_id,
            event.event_type,
            listener.title,
            seconds,
        )
        announce(
            listener_overdue, sender=self.alias, event=event, listener=listener, seconds=seconds
        )

    def call_timed(self, call: Any, *args: Any) -> tuple[Any, float]:
        """Return what a call returned or raised, and how many seconds it took.

        Raises ``CallAbandoned`` if the call was abandoned before: this thread must not change
        anything then.
        """
        lease, timeout = self.lease, self.timeout
        timed: TimedCall | None = None
        started = lease.called_at = monotonic()
        if timeout is not None:
            timed = lease.timed = TimedCall(self, started, timeout)
        if self.listener.atomic:
            answer = self._in_transaction(timed, call, args)
        else:
            answer = self.call_intercepted(timed, call, args)
        seconds = monotonic() - started
        lease.called_at = 0.0
        if timed is not None:
            lease.timed = None
            self.report_if_late(timed.seconds)
        return answer, seconds

    def end_abandoned(self, seconds: float, leases: Sequence[Lease]) -> ListenerTimeout:
        """End a call in place of its thread, which hangs after ``seconds``; return the error."""
        self.report_if_late(seconds)
        for each in leases:
            each.duration += seconds / len(leases)
        self.lease.called_at, self.lease.timed = 0.0, None
        return self.timeout_error("its thread was written off")

    def _in_transaction(self, timed: TimedCall | None, call: Any, args: tuple[Any, ...]) -> Any:
        """Commit the decisions with the listener's changes, without a timeout; errors undo both."""
        connection, answer, has_begun = connections[self.alias], None, False
        try:
            with dialect_of(connection).read_committed():
                has_begun = True
                answer = self.call_intercepted(timed, call, args)
                if not isinstance(answer, BaseException) and not self.commit(answer):
                    answer = NotOurs()
                if isinstance(answer, BaseException):
                    raise _Rollback
        except _Rollback:
            self.committed = None
            return answer
        except Exception as error:
            self.committed = None
            if timed is not None and not (timed.has_returned or timed.mark_returned()):
                raise CallAbandoned from error  # the rollback failed
            if has_begun or not isinstance(error, (OperationalError, InterfaceError)):
                return error
            logger.warning(
                "transaction could not begin event_id=%s listener=%r error=%s",
                self.event.event_id,
                self.listener.title,
                error,
            )
            return NotBegun()
        return answer

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
        except BaseException as error:  # SystemExit too: no listener ends the worker
            if ends_drain(error):
                raise
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


def settle_together(
    ends: Sequence[tuple[Lease, Decision]], *, alias: str, settings: Settings
) -> bool:
    """Write decisions on the listener's connection; return whether all leases were still ours."""
    by_kind: dict[LeaseKind, list[Ending]] = {}
    for lease, decision in ends:
        by_kind.setdefault(lease.kind, []).append(lease.ending(decision))
    for kind, endings in by_kind.items():
        settled = settle_within(
            connections[alias],
            endings,
            me=ends[0][0].owner,
            kind=kind,
            delete_done=settings.RETENTION_DONE == 0,
        )
        if settled < len(endings):
            return False
    return True
