"""``Session``: an open backend and the calls that use it; and the event loop of an async one."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from time import monotonic
from typing import Any, Final, cast
from weakref import WeakSet

from ..exceptions import BrokerUnavailable, Unrecoverable
from ..log import report_quietly
from .backend import Backend, Message, Outcome, Together, Unconfirmed, is_refusal

logger = logging.getLogger("django_outbox")

THREAD_NAME: Final = "outbox-relay"
SETTLE: Final = 0.1  # seconds for tasks to see that their connection, or their loop, ends
OVERTIME = 1.0  # seconds that an async ``publish`` gets beyond its deadline before it is cancelled
OPEN_TIMEOUT = 10.0  # seconds; an async ``open`` or ``check`` that takes longer is cancelled
CLOSE_TIMEOUT = 5.0  # seconds


class Session:
    """An open backend and the calls that use it; closed when it is retired and the last has left.

    A context manager for one call; a ``BrokerUnavailable`` that passes through makes it ``failed``,
    so that the next call opens another.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self._pid, self.failed = backend, os.getpid(), False
        self._lock = threading.Lock()
        self._calls, self._is_retired, self._is_closed = 0, False, False
        methods = backend.open, backend.publish, backend.check, backend.close
        is_async = any(map(inspect.iscoroutinefunction, methods))
        self._loop = EventLoopThread() if is_async else None

    def open(self) -> None:
        """Open the backend; ``BrokerUnavailable`` if that fails."""
        try:
            self.run(self.backend.open, timeout=OPEN_TIMEOUT)
        except BaseException:
            self.retire()
            raise

    @property
    def is_ours(self) -> bool:
        """Return whether this process opened it. A forked one neither uses nor closes it."""
        return self._pid == os.getpid()

    def enter(self) -> None:
        with self._lock:
            self._calls += 1

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BrokerUnavailable):
            self.failed = True
        with self._lock:
            self._calls -= 1
        self._close_if_unused()

    def publish(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        """Have the backend publish what can be sent; return an outcome for each message."""
        prepared: list[Any] = []
        outcomes: list[Outcome] = []
        for each in messages:
            try:
                _expect_text(each)
                prepared.append(self.backend.prepare(each))
                outcomes.append(None)
            except Exception as error:  # noqa: BLE001 - of this message alone
                outcomes.append(error)
        answers = iter(self._answers(prepared, deadline) if prepared else ())
        outcomes = heard([next(answers) if each is None else each for each in outcomes])
        away = [each for each in outcomes if isinstance(each, BrokerUnavailable)]
        if away or any(isinstance(each, Unconfirmed) for each in outcomes):
            self.failed = True  # nothing that is still in it may be sent later
        if away and len(away) == len(outcomes):
            raise BrokerUnavailable(str(away[0]))
        return outcomes

    def _answers(self, prepared: Sequence[Any], deadline: float) -> list[Outcome]:
        """Have the backend publish; in halves, what the broker has refused together."""
        timeout = deadline - monotonic() + OVERTIME
        found = self.run(self.backend.publish, prepared, deadline, timeout=timeout)
        answers = [None] * len(prepared) if found is None else [*found]
        if len(answers) != len(prepared):
            error = TypeError(
                f"{type(self.backend).__qualname__}.publish returned {len(answers)} outcomes for "
                f"{len(prepared)} messages; expected one for each."
            )
            return [error] * len(prepared)  # not raised: smaller batches would send them again
        together = [i for i, each in enumerate(answers) if isinstance(each, Together)]
        if len(together) == 1:
            (index,) = together
            answers[index] = cast("Together", answers[index]).alone
            return answers
        half = len(together) // 2
        for part in (together[:half], together[half:]) if together else ():
            try:
                apart = self._answers([prepared[index] for index in part], deadline)
            except BrokerUnavailable as away:
                apart = [away] * len(part)
            for index, answer in zip(part, apart, strict=True):
                answers[index] = answer
        return answers

    def run(self, method: Any, *args: Any, timeout: float) -> Any:
        """Call a method of the backend; await it on the loop, if it is ``async def``."""
        if not inspect.iscoroutinefunction(method):
            return method(*args)
        assert self._loop is not None
        try:
            return self._loop.run(method(*args), timeout)
        except asyncio.TimeoutError:
            raise BrokerUnavailable(
                f"{type(self.backend).__qualname__}.{method.__name__} took longer than "
                f"{timeout:.0f} s"
            ) from None

    def retire(self) -> None:
        """Close the backend, once no call uses it."""
        self._is_retired = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._lock:
            if self._calls or not self._is_retired or self._is_closed:
                return
            self._is_closed = True
        try:
            self.run(self.backend.close, timeout=CLOSE_TIMEOUT)
        except Exception as error:  # noqa: BLE001 - it is of no use any more
            logger.debug("relay connection not closed cleanly error=%s", type(error).__name__)
        if self._loop is not None:
            self._loop.stop()


def heard(answers: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of a batch, after whose last answer the broker has fallen silent.

    It is away for what is unconfirmed from there on. What is unconfirmed before that is a matter of
    that message, such as a queue without a leader.
    """
    last = max((i for i, each in enumerate(answers) if _is_answer(each)), default=-1)
    return [
        BrokerUnavailable(str(each)) if i > last and isinstance(each, Unconfirmed) else each
        for i, each in enumerate(answers)
    ]


def _is_answer(outcome: Outcome) -> bool:
    return outcome is None or (is_refusal(outcome) and not isinstance(outcome, Unrecoverable))


def _expect_text(message: Message) -> None:
    try:
        for each in (message.to, message.group or "", *message.headers, *message.headers.values()):
            each.encode()
    except UnicodeError as error:
        raise Unrecoverable(f"A header or key of the message is not text: {error}") from None


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that knows its connections, to end those that a client could not close."""

    def __init__(self) -> None:
        super().__init__()
        self.transports: WeakSet[asyncio.Transport] = WeakSet()

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        found = await super().create_connection(*args, **options)
        self.transports.add(found[0])
        return found


class EventLoopThread:
    """Runs coroutines for other threads, so that a connection outlives the call that opened it."""

    def __init__(self) -> None:
        self._loop = _Loop()
        self._loop.set_exception_handler(report_quietly)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=THREAD_NAME, daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """Return what a coroutine returns; ``asyncio.TimeoutError`` after ``timeout`` seconds."""
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout), self._loop)
        try:
            return future.result(timeout + 1)
        except FutureTimeout:  # asyncio's own from Python 3.11 on; or the loop itself is blocked
            future.cancel()
            raise asyncio.TimeoutError from None

    def stop(self) -> None:
        """End the loop and its thread; what still runs is cancelled."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_end(self._loop), self._loop)
            self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()


async def _end(loop: _Loop) -> None:
    for transport in loop.transports:
        with suppress(AttributeError):  # asyncio's, of one that has lost its connection
            transport.abort()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    others = [each for each in tasks if each.cancel()]
    if others:  # a client may swallow the cancellation, and wait again
        await asyncio.wait(others, timeout=SETTLE)
    loop.call_soon(loop.stop)


async def late(
    tasks: Sequence[asyncio.Future[Any]], ended: asyncio.Future[Any], timeout: float
) -> list[asyncio.Future[Any]]:
    """Wait for tasks; return those not done in time, or when their connection ended."""
    everything = asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.wait(
        (everything, ended), timeout=max(timeout, 0), return_when=asyncio.FIRST_COMPLETED
    )
    if not everything.done() and ended.done():
        await asyncio.wait((everything,), timeout=SETTLE)
    return [each for each in tasks if not each.done()]
