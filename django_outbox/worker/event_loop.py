"""A thread with an event loop for ``async def`` listeners, and a watch that logs what blocks it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from contextvars import Context, ContextVar
from typing import Any

from django.db import connections

from ..delivery.decide import thread_limit
from ..delivery.lease import Lease
from ..log import report_quietly
from ..queue_settings import DEFAULT_QUEUE
from .held import Held
from .threads import thread_name

logger = logging.getLogger("django_outbox")

LEFT_TIME = 1.0  # seconds that tasks which listeners left get to end, once they are cancelled
WARN_AFTER = 1.0  # seconds
# Seconds between two checks; after more, the whole process may have been stopped.
PROCESS_STOPPED_AFTER = 1.0

# What the current task delivers; inherited by the tasks that a listener creates.
CURRENT_LEASE: ContextVar[Lease] = ContextVar("django_outbox_current_lease")


class DeliveryTask(asyncio.Task[Any]):
    """A task that delivers a lease, or that its listener created."""

    lease: Lease

    @classmethod
    def make(
        cls, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> DeliveryTask:
        task = cls(coro, loop=loop, **options)
        if (lease := CURRENT_LEASE.get(None)) is not None:
            task.lease = lease
        return task


class EventLoop:
    """A worker's thread with an asyncio event loop, which starts with the first async listener.

    Other threads call the public methods.
    """

    def __init__(self, *, alias: str, stuck_after: float, held: Held) -> None:
        self._lock = held.lock
        self._loop: asyncio.AbstractEventLoop  # created by call(), closed by the thread
        self.running = set[DeliveryTask]()  # for the loop's thread
        self.at_end = ExitStack()  # what is to be called when it has ended
        self.stopping = False
        self._late = set[Callable[[], None]]()  # to be called once the thread could be started
        self._thread = threading.Thread(
            target=self._run, name=thread_name(alias, DEFAULT_QUEUE, "loop"), daemon=True
        )
        self._watch = BlockedLoopWatch(self._thread.name, stuck_after=stuck_after)

    def call(self, act: Callable[[], None]) -> None:
        """Have the loop call ``act``; start its thread if need be, but not during a stop."""
        if self._thread.ident is not None or self._start():
            self._loop.call_soon_threadsafe(act)
        else:
            self._late.add(act)

    def _start(self) -> bool:
        with self._lock:
            if self._thread.ident is None and not self.stopping:
                self._loop = asyncio.new_event_loop()
                self._loop.set_exception_handler(report_quietly)
                self._loop.set_task_factory(DeliveryTask.make)  # type: ignore[arg-type]
                try:
                    self._thread.start()
                except RuntimeError as error:
                    self._loop.close()
                    thread_limit.refused(error)
            return self._thread.ident is not None

    def create(self, delivery: Coroutine[Any, Any, None], lease: Lease) -> DeliveryTask:
        """Create the task that delivers a lease. In the loop's thread.

        In a context of its own: in that of another delivery it would use the thread of that one, or
        one that ``ASYNC_CONNECTIONS`` does not limit.
        """
        task = Context().run(self._loop.create_task, delivery, name=lease.id)
        assert isinstance(task, DeliveryTask)
        task.lease = lease
        self.running.add(task)
        return task

    def note(self, lease: Lease) -> None:
        """Note what the current task, and those that its listener creates, work for."""
        CURRENT_LEASE.set(lease)
        task = asyncio.current_task(self._loop)
        assert isinstance(task, DeliveryTask)
        task.lease = lease

    def stop(self) -> None:
        """Stop further listeners from starting."""
        with self._lock:
            self.stopping = True

    def join(self, give_up: Callable[[], bool]) -> bool:
        """Wait for running listeners until ``give_up()``, then cancel them.

        Return whether all ended by themselves.
        """
        if self._thread.ident is None:
            return True
        while self.running and not give_up():
            time.sleep(0.005)
        finished = not self.running
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(1)
        self.at_end.close()
        return finished

    def dead_reason(self, longest: float) -> str | None:
        """Return a reason if its thread has ended without being told to."""
        ended = self._thread.ident and not self._thread.is_alive() and not self.stopping
        return f"{self._thread.name} has ended" if ended else None

    def unready_reason(self, longest: float) -> str | None:
        """Return a reason if the loop has been blocked for ``STUCK_AFTER``, or lacks a thread."""
        return self._watch.unready_reason or thread_limit.unready_reason

    def watch(self) -> None:
        """Check whether the loop is blocked; the watchdog calls it a few times a second."""
        while self._late and self._start():
            self._loop.call_soon_threadsafe(self._late.pop())
        if self._thread.is_alive():
            self._watch.check(self._loop, self._thread)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._cancel_left_tasks()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            connections.close_all()

    def _cancel_left_tasks(self) -> None:
        """Cancel the tasks that listeners left running, as ``asyncio.run`` does.

        The garbage collector would end them in the context of whatever runs at that moment. asgiref
        would set their variables there, and a delivery would use the thread of another one.
        """
        if left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left, timeout=LEFT_TIME))

    def _cancel(self) -> None:
        for task in self.running:
            task.lease.cancelled = True
            task.cancel()
        ending = asyncio.gather(*self.running, return_exceptions=True)
        ending.add_done_callback(lambda _: self._loop.stop())


class BlockedLoopWatch:
    """Schedules a callback on the loop at intervals, and logs when it does not run.

    Its clock stops while the machine is suspended, because nothing can run then.
    """

    def __init__(self, name: str, *, stuck_after: float) -> None:
        self._name, self._stuck_after = name, stuck_after  # seconds
        self._scheduled_at = self._checked_at = time.monotonic()  # set only by the watching thread
        self._cpu_time = time.process_time()
        self._ran_at: float | None = self._scheduled_at  # by the loop's thread; None: not yet
        self._reported = self._is_stuck = False  # of this blockage; set only by the watching thread

    def check(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        """Check whether the last callback ran; if so, schedule the next."""
        now = time.monotonic()
        used, self._cpu_time = self._cpu_time, time.process_time()
        gap, self._checked_at = now - self._checked_at, now
        if self._ran_at is None:
            # A long gap with little CPU time: the process was stopped, which does not count.
            # Otherwise a call held Python's global lock, which stops this thread, too.
            if gap > PROCESS_STOPPED_AFTER and self._cpu_time - used < gap / 2:
                self._scheduled_at += gap
            self._report(now - self._scheduled_at, loop, thread)
            return
        if self._reported:
            logger.warning("event loop runs again seconds=%.1f", self._ran_at - self._scheduled_at)
        self._reported = self._is_stuck = False
        self._scheduled_at, self._ran_at = now, None
        with suppress(RuntimeError):  # closed
            loop.call_soon_threadsafe(self._note_run)

    @property
    def unready_reason(self) -> str | None:
        """Return a reason if the loop has been blocked for ``stuck_after`` seconds."""
        seconds = self._checked_at - self._scheduled_at
        return f"{self._name} has been blocked for {seconds:.0f} s" if self._is_stuck else None

    def _note_run(self) -> None:
        self._ran_at = time.monotonic()

    def _report(
        self, seconds: float, loop: asyncio.AbstractEventLoop, thread: threading.Thread
    ) -> None:
        is_stuck = seconds >= self._stuck_after
        if self._is_stuck or not (is_stuck or (seconds >= WARN_AFTER and not self._reported)):
            return
        self._reported, self._is_stuck = True, is_stuck
        task, frame = asyncio.current_task(loop), sys._current_frames().get(thread.ident or 0)
        lease: Lease | None = getattr(task, "lease", None)
        facts = (
            seconds,
            *(lease.named if lease else (None, None, None)),
            task and task.get_name(),
            frame and f"{frame.f_code.co_filename}:{frame.f_lineno}",
        )
        if is_stuck:
            logger.error(
                "event loop stuck seconds=%.1f event_id=%s event_type=%s listener=%r task=%r at=%s",
                *facts,
            )
        else:
            logger.warning(
                "event loop blocked "
                "seconds=%.1f event_id=%s event_type=%s listener=%r task=%r at=%s",
                *facts,
            )
