"""``EventLoopThread``: an event loop in a thread of its own, for clients that are async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final

from ..log import report_quietly

THREAD_NAME: Final = "outbox-relay"
SETTLE: Final = 0.1  # seconds for tasks to see that their connection has ended


class EventLoopThread:
    """Runs coroutines for other threads, so that a connection outlives the call that opened it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(report_quietly)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=THREAD_NAME, daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """Return what a coroutine returns; ``asyncio.TimeoutError`` after ``timeout`` seconds."""

        async def limited() -> Any:
            return await asyncio.wait_for(work, timeout)

        future = asyncio.run_coroutine_threadsafe(limited(), self._loop)
        try:
            return future.result(timeout + 1)
        except FutureTimeout:  # asyncio's own from Python 3.11 on; or the loop itself is blocked
            future.cancel()
            raise asyncio.TimeoutError from None

    def stop(self) -> None:
        """End the loop and its thread; what still runs is cancelled."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
            self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
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
