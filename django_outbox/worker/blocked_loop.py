"""Detects that the event loop is blocked, and logs what blocks it; called from another thread."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ..delivery.lease import Lease

logger = logging.getLogger("django_outbox")

WARN_AFTER = 1.0  # seconds
# Seconds between two checks; after more, the whole process may have been stopped.
PROCESS_STOPPED_AFTER = 1.0


class BlockedLoopWatch:
    """Schedules a callback on the loop at intervals, and logs when it does not run.

    Its clock stops while the machine is suspended, because nothing can run then.
    """

    def __init__(
        self,
        name: str,
        *,
        stuck_after: float,
        lease_of: Callable[[asyncio.Task[object]], Lease | None],
    ) -> None:
        self._name = name
        self._stuck_after = stuck_after  # seconds
        self._lease_of = lease_of  # returns the lease that a task works for
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
        if self._is_stuck or seconds < min(WARN_AFTER, self._stuck_after):
            return
        if seconds >= self._stuck_after:
            self._reported = self._is_stuck = True
            logger.error(
                "event loop stuck seconds=%.1f event_id=%s event_type=%s listener=%r task=%r at=%s",
                seconds,
                *self._blocking_call(loop, thread),
            )
        elif not self._reported:
            self._reported = True
            logger.warning(
                "event loop blocked "
                "seconds=%.1f event_id=%s event_type=%s listener=%r task=%r at=%s",
                seconds,
                *self._blocking_call(loop, thread),
            )

    def _blocking_call(
        self, loop: asyncio.AbstractEventLoop, thread: threading.Thread
    ) -> tuple[object, ...]:
        """Return event id, event type, listener, task and place; without a task only the place."""
        task = asyncio.current_task(loop)
        lease = task and self._lease_of(task)
        frame = sys._current_frames().get(thread.ident or 0)
        return (
            *(lease.named if lease else (None, None, None)),
            task and task.get_name(),
            frame and f"{frame.f_code.co_filename}:{frame.f_lineno}",
        )
