"""``Call``: one call of a listener or its fallback: in its transaction, intercepted, and timed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import isawaitable
from math import inf
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync, sync_to_async
from django.db import InterfaceError, OperationalError, connections

from .. import hooks
from ..clocks import monotonic
from ..conf import current
from ..events import Event, delivering
from ..exceptions import ListenerTimeout
from ..listeners import callables
from ..listeners.callables import location
from ..listeners.outcomes import Failure
from ..listeners.registry import Listener
from ..log import first_line
from ..signals import announce, listener_overdue
from ..sql import dialect_of
from .decide import NotBegun, NotOurs, checked, thread_limit
from .lease import Lease

if TYPE_CHECKING:
    from .delivery import Delivery

logger = logging.getLogger("django_outbox")

CHECK_INTERVAL = 0.1  # seconds between two checks while a listener waits for a database connection
CANCELLATION_GRACE = 1.0  # seconds in which a cancelled coroutine has to end

# Exceptions that end drain().
drain_ending_errors: ContextVar[tuple[type[BaseException], ...]] = ContextVar(
    "drain_ending_errors", default=()
)


class CallAbandoned(BaseException):
    """Ends a thread whose call was written off: the delivery is no longer its own."""


class _Rollback(Exception):
    """Rolls back the transaction of an atomic listener."""


@dataclass(frozen=True, slots=True)
class _Raised:
    """A returned exception: raised in a task, some end the event loop, and asgiref adds frames."""

    error: BaseException


class Call:
    """One call with an event, or with some of a batch.

    ``make`` and ``amake`` return what it returned or raised. A call in a thread either returns in
    time, or the watchdog writes it off and decides.
    """

    answer: Any = None  # what it returned or raised
    committed: Any = None  # what an atomic listener's transaction has committed
    started = 0.0  # monotonic
    ends_at = inf  # monotonic; from then on it may be written off
    seconds = 0.0  # duration, set when it ends
    has_returned = False  # before it was written off
    _ended: threading.Lock | None = None  # taken by who ends it

    def __init__(
        self,
        owner: Delivery,
        listener: Listener,
        leases: list[Lease],
        failure: Failure | None = None,
    ) -> None:
        """``failure``: of the listener; then its fallback is called."""
        self.owner, self.listener, self.leases, self.failure = owner, listener, leases, failure
        self.event = leases[0].event  # the first
        self.called: Any = listener.call if failure is None else listener.fallback
        self.timeout = listener.timeout  # seconds; None: no limit
        if self.timeout is None and listener.check is None:  # a relay ends its calls by itself
            self.timeout = current().LISTENER_TIMEOUT
        # Whether it is called with a list; its arguments; what ``current_event()`` returns.
        self._takes_batch = listener.batching is not None and failure is None
        self._arguments: tuple[Any, ...]
        self._subject: Event | tuple[Event, ...] = self.event
        if self._takes_batch:
            events = [each.event for each in leases]
            self._arguments, self._subject = (events,), (*events,)
            self._interceptors = hooks.batch_interceptors()
        else:
            self._arguments = (self.event,) if failure is None else (self.event, failure)
            self._interceptors = hooks.interceptors()

    # -- in a thread -----------------------------------------------------------------------------

    def make(self) -> Any:
        """Call; raise ``CallAbandoned`` if it was written off: nothing may be changed then."""
        delivering.set(self._subject)
        self.started = monotonic()
        if self.timeout is not None:
            self._ended, self.ends_at = threading.Lock(), self.started + self.timeout
        answer = self._in_transaction() if self.listener.atomic else self._intercepted()
        self.count(monotonic() - self.started)
        return answer

    def count(self, seconds: float, clocked: float | None = None) -> None:
        """Count the duration, an equal share for each event; report it if it is too long.

        ``clocked``: seconds without the waits for a connection, for which there is no timeout.
        """
        self.seconds = seconds
        for each in self.leases:
            each.duration += seconds / len(self.leases)
        clocked = seconds if clocked is None else clocked
        if self.timeout is None or clocked < self.timeout:
            return
        logger.warning(
            "listener runs longer than its timeout "
            "event_id=%s event_type=%s listener=%r seconds=%.1f",
            *self.leases[0].named,
            clocked,
        )
        announce(
            listener_overdue,
            sender=self.owner.alias,
            event=self.event,
            listener=self.listener,
            seconds=clocked,
        )

    def end(self) -> bool:
        """End the call once, in its thread or from another; return whether this one did it."""
        return self._ended is None or self._ended.acquire(blocking=False)

    def _in_transaction(self) -> Any:
        """Commit the decisions with the listener's changes, without a timeout; errors undo both."""
        alias, answer, has_begun = self.owner.alias, None, False
        try:
            with dialect_of(connections[alias]).read_committed():
                has_begun = True
                answer = self._intercepted()
                if not isinstance(answer, BaseException) and not self.owner.commit(self, answer):
                    answer = NotOurs()
                if isinstance(answer, BaseException):
                    raise _Rollback
        except _Rollback:
            self.committed = None
        except Exception as error:
            self.committed = None
            if not (self.has_returned or self.end()):
                raise CallAbandoned from error  # the rollback failed
            if has_begun or not isinstance(error, (OperationalError, InterfaceError)):
                return error
            logger.warning(
                "transaction could not begin event_id=%s listener=%r error=%s",
                self.event.event_id,
                self.listener.title,
                first_line(error),
            )
            return NotBegun()
        return answer

    def _intercepted(self) -> Any:
        answer: Any
        try:
            if self._interceptors:
                with self._intercept():
                    answer = self._answer()
            else:
                answer = self._answer()
        except BaseException as error:  # SystemExit too: no listener ends the worker
            if ends_drain(error):
                raise
            answer = NotBegun() if thread_limit.refused(error) else error
        self.has_returned = self._ended is None or self.end()
        if not self.has_returned:
            raise CallAbandoned
        return answer

    def _answer(self) -> Any:
        answer = self.called(*self._arguments)
        if answer is None:
            return None
        if isawaitable(answer):
            if self.timeout is not None:  # it starts now; a cancelled coroutine has time to end
                self.ends_at = monotonic() + self.timeout + CANCELLATION_GRACE
            answer = async_to_sync(self._await_with_timeout)(answer)
        return self._checked(answer)

    # -- on the event loop -----------------------------------------------------------------------

    async def amake(self) -> Any:
        """Await the call; it is cancelled after its timeout."""
        lease = self.owner.lead
        self.started, began = monotonic(), lease.clock
        delivering.set(self._subject)
        called = self.called if self.failure is None else as_async(self.called)
        try:
            with self._intercept():
                return self._checked(await self._await_with_timeout(called(*self._arguments)))
        except BaseException as error:
            if lease.cancelled and isinstance(error, asyncio.CancelledError):
                raise
            return NotBegun() if thread_limit.refused(error) else error
        finally:
            self.count(monotonic() - self.started, lease.clock - began)

    async def _await_with_timeout(self, awaitable: Awaitable[Any]) -> Any:
        """Return what the listener returned or raised; cancel it after the timeout."""
        lease, timeout = self.owner.lead, self.timeout
        started, timer = lease.clock, None if timeout is None else Timer(timeout, lease)
        try:
            return await awaitable
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, Exception) as error:
            is_late = timeout is not None and lease.clock - started >= timeout
            if isinstance(error, asyncio.CancelledError):
                if lease.cancelled and not is_late:  # by the worker, which is stopping
                    raise
                # Else the listener has cancelled itself. If the loop was blocked, a worker that is
                # stopping may come before the timer.
                is_late = is_late and (lease.cancelled or (timer is not None and timer.expired))
            elif not isinstance(error, asyncio.TimeoutError):
                is_late = False
            if not is_late:
                return _Raised(error)
            timeout_error = self.timeout_error("cancelled")
            timeout_error.__cause__ = error
            return _Raised(timeout_error)
        finally:
            if timer is not None:
                timer.stop()

    # -- for both --------------------------------------------------------------------------------

    def _intercept(self) -> ExitStack:
        """Enter the interceptors; of a batch those that take one as a whole."""
        subject = [each.event for each in self.leases] if self._takes_batch else self.event
        return intercept(subject, self._interceptors)

    def _checked(self, answer: Any) -> Any:
        """Return the answer that a returned value means; raise if it is not one."""
        if isinstance(answer, _Raised):
            raise answer.error
        if self._takes_batch:
            return checked(answer, len(self.leases))
        return None if isinstance(answer, BaseException) else answer  # returned, not raised

    def timeout_error(self, consequence: str) -> ListenerTimeout:
        """Return the error of a call that ran longer than its timeout."""
        where = location(self.called)
        return ListenerTimeout(f"{where} ran longer than {self.timeout} s; {consequence}")


class Timer:
    """Cancels the task that creates it after ``timeout`` seconds of the lease's clock."""

    def __init__(self, timeout: float, lease: Lease) -> None:
        self.expired = False
        self._lease, self._until = lease, lease.clock + timeout
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(timeout, self._check)

    def stop(self) -> None:
        """Stop the timer, and take back a cancellation that it has requested."""
        self._handle.cancel()
        uncancel = getattr(self._task, "uncancel", None)  # since Python 3.11
        if self.expired and uncancel is not None:
            uncancel()

    def _check(self) -> None:
        if (left := self._until - self._lease.clock) > 0:
            pause = max(left, CHECK_INTERVAL) if self._lease.connection_wait_since else left
            self._handle = self._loop.call_later(pause, self._check)
        elif self._task is not None:
            self.expired = True
            self._task.cancel()


def as_async(call: Any) -> Callable[..., Awaitable[Any]]:
    """Return a callable to await: the fallback, or, if it is plain, a wrapper around it.

    The wrapper runs it in the thread of its delivery, where it may use the database.
    """
    if callables.is_async(call):
        return call  # type: ignore[no-any-return]

    async def in_thread(*args: Any) -> Any:
        answer = await sync_to_async(call)(*args)
        return await answer if isawaitable(answer) else answer

    return in_thread


def ends_drain(error: BaseException) -> bool:
    """Return whether a listener's exception ends ``drain()`` instead of counting as a failure."""
    return isinstance(error, drain_ending_errors.get())


def intercept(
    subject: Event | list[Event], interceptors: Iterable[Callable[[Any], Any]]
) -> ExitStack:
    """Enter every interceptor with an event, or the events of a batch, in order.

    Leaving the stack leaves them in reverse.

    An error on entering one is raised after the ones before it were left.
    """
    with ExitStack() as stack:
        for interceptor in interceptors:
            manager = interceptor(subject)
            if not hasattr(manager, "__enter__") or not hasattr(manager, "__exit__"):
                raise TypeError(
                    f"The interceptor {interceptor!r} returned {manager!r}; expected a context "
                    "manager, as @contextmanager makes one."
                )
            manager.__enter__()
            stack.push(_leaving(manager, interceptor))
        return stack.pop_all()


def _leaving(manager: Any, interceptor: Any) -> Callable[..., None]:
    def leave(*raised: Any) -> None:
        try:
            manager.__exit__(*raised)  # its result is ignored: it cannot swallow the error
        except BaseException as error:
            if ends_drain(error):
                raise
            logger.exception("interceptor failed at its end interceptor=%r", interceptor)

    return leave
