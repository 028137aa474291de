"""Timeouts for async listeners; waiting for a database connection does not count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

from asgiref.sync import sync_to_async

from ..listeners import callables
from .lease import Lease

CHECK_INTERVAL = 0.1  # seconds between two checks while a listener waits for a database connection


async def with_timeout(timeout: float | None, awaitable: Awaitable[Any], lease: Lease) -> Any:
    """Await like ``asyncio.wait_for``, but measure the timeout by the lease's clock."""
    if timeout is None:
        return await awaitable
    timer = Timer(timeout, lease)
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        if timer.expired and not lease.cancelled:
            raise asyncio.TimeoutError from error
        raise
    finally:
        timer.stop()


class Timer:
    """Cancels the task that creates it after ``timeout`` seconds, unless ``stop`` comes first."""

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
        left = self._until - self._lease.clock
        if left > 0:
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
