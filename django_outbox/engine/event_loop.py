"""Where ``async def`` listeners run: one event loop, ``ASYNC_CONCURRENCY`` of them at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, sync_to_async
from django.db import connections

from ..delivery import Lease, adeliver, faulty
from .hygiene import tidy
from .pausing import Pausing
from .queues import Decisions, Held

logger = logging.getLogger("django_outbox")


class EventLoop:
    """One thread with a loop; everything but ``put`` and the life cycle happens in it."""

    def __init__(
        self, *, alias: str, slots: int, held: Held, decisions: Decisions, pausing: Pausing
    ) -> None:
        self._alias, self._slots, self._held, self._decisions = alias, slots, held, decisions
        self._pausing = pausing
        self._loop: asyncio.AbstractEventLoop  # made at the start, closed by the thread
        self._waiting: deque[Lease] = deque()  # bounded by Held, as all that is claimed
        self._running: dict[asyncio.Task[None], Lease] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"outbox-{alias}-loop", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def put(self, lease: Lease) -> None:
        """Have a lease delivered; from any thread."""
        self._loop.call_soon_threadsafe(self._take_in, lease)

    def stop(self) -> None:
        """Let no further listener start."""
        self._stopping = True

    def join(self, give_up: Callable[[], bool]) -> bool:
        """Wait for what runs, then cancel it; return whether all ended by themselves."""
        if self._thread.ident is None:
            return True
        while self._running and not give_up():
            time.sleep(0.005)
        finished = not self._running
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(1)
        return finished

    def fault(self, longest: float) -> str | None:
        """Say that its thread has ended though nobody told it to."""
        ended = self._thread.ident and not self._thread.is_alive() and not self._stopping
        return f"{self._thread.name} has ended" if ended else None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            connections.close_all()

    def _take_in(self, lease: Lease) -> None:
        self._waiting.append(lease)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots and not self._stopping:
            lease = self._waiting.popleft()
            task = self._loop.create_task(self._deliver(lease))
            self._running[task] = lease
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        lease = self._running.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("delivery failed event_id=%s", lease.event_id, exc_info=error)
            self._decisions.put((lease, faulty()))
        self._fill()

    async def _deliver(self, lease: Lease) -> None:
        if not await self._current(lease) or not self._held.start(lease):
            return
        decision = None
        try:
            async with ThreadSensitiveContext() as context:

                async def between(lease: Lease) -> bool:
                    await _close_connections(context, lease)
                    return self._held.is_current(lease) and not self._stopping

                try:
                    decision = await adeliver(
                        lease, alias=self._alias, between=between, pauses=self._pausing.pauses
                    )
                finally:
                    await _close_connections(context, lease)
        except asyncio.CancelledError:
            lease.started_at = 0.0  # really ended: the lease can be given back
            raise
        except RuntimeError:  # the context's end needs a thread, which a dying interpreter refuses
            if decision is None:
                raise
        self._decisions.put((lease, decision))

    async def _current(self, lease: Lease) -> bool:
        while not self._stopping and not self._held.is_current(lease):
            if not self._held.has(lease):
                return False
            await asyncio.sleep(0.05)
        return not self._stopping

    def _cancel(self) -> None:
        for task, lease in self._running.items():
            lease.cancelled = True
            task.cancel()
        ending = asyncio.gather(*self._running, return_exceptions=True)
        ending.add_done_callback(lambda _: self._loop.stop())


async def _close_connections(context: ThreadSensitiveContext, lease: Lease) -> None:
    """Close what this delivery's own thread opened, if it ever needed one."""

    def close() -> None:
        for connection in connections.all(initialized_only=True):
            tidy(connection, lease)
            connection.close()

    if context in SyncToAsync.context_to_thread_executor:
        await sync_to_async(close, thread_sensitive=True)()
