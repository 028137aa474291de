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
STANDSTILL = 1.0  # seconds between two checks; after more, the whole process may have been stopped


class BlockedLoopWatch:
    """Schedules a callback on the loop again and again, and reports when it does not run.

    Its clock stops while the machine is suspended, because nothing can run then.
    """

    def __init__(
        self,
        name: str,
        *,
        stuck_after: float,
        serves: Callable[[asyncio.Task[object]], Lease | None],
    ) -> None:
        self._name = name
        self._stuck_after = stuck_after  # seconds
        self._serves = serves  # returns the lease that a task works for
        self._asked_at = self._looked_at = time.monotonic()  # set only by the watching thread
        self._used = time.process_time()
        self._answered_at: float | None = self._asked_at  # None: not yet. Owner: the loop
        self._reported = self._is_stuck = False  # of this blockage; set only by the watching thread

    def look(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        """Check whether the last callback ran; if so, schedule the next."""
        now = time.monotonic()
        used, self._used = self._used, time.process_time()
        gap, self._looked_at = now - self._looked_at, now
        if self._answered_at is None:
            # A long gap with little CPU time: the process was stopped, which does not count.
            # Otherwise a call held Python's global lock, which stops this thread, too.
            if gap > STANDSTILL and self._used - used < gap / 2:
                self._asked_at += gap
            self._report(now - self._asked_at, loop, thread)
            return
        if self._reported:
            logger.warning("event loop runs again seconds=%.1f", self._answered_at - self._asked_at)
        self._reported = self._is_stuck = False
        self._asked_at, self._answered_at = now, None
        with suppress(RuntimeError):  # closed
            loop.call_soon_threadsafe(self._answer)

    @property
    def trouble(self) -> str | None:
        """Return a reason if the loop has been blocked for ``stuck_after`` seconds."""
        lasts = self._looked_at - self._asked_at
        return f"{self._name} has been blocked for {lasts:.0f} s" if self._is_stuck else None

    def _answer(self) -> None:
        self._answered_at = time.monotonic()

    def _report(
        self, lasts: float, loop: asyncio.AbstractEventLoop, thread: threading.Thread
    ) -> None:
        if self._is_stuck or lasts < min(WARN_AFTER, self._stuck_after):
            return
        if lasts >= self._stuck_after:
            self._reported = self._is_stuck = True
            logger.error(
                "event loop stuck seconds=%.1f event_id=%s event_type=%s listener=%r task=%r at=%s",
                lasts, *self._culprit(loop, thread),
            )  # fmt: skip
        elif not self._reported:
            self._reported = True
            logger.warning(
                "event loop blocked "
                "seconds=%.1f event_id=%s event_type=%s listener=%r task=%r at=%s",
                lasts, *self._culprit(loop, thread),
            )  # fmt: skip

    def _culprit(
        self, loop: asyncio.AbstractEventLoop, thread: threading.Thread
    ) -> tuple[object, ...]:
        """Return event id, event type, listener, task and place; without a task only the place."""
        task = asyncio.current_task(loop)
        lease = task and self._serves(task)
        frame = sys._current_frames().get(thread.ident or 0)
        return (
            lease and lease.event_id,
            lease and lease.event_type,
            lease and lease.listener,
            task and task.get_name(),
            frame and f"{frame.f_code.co_filename}:{frame.f_lineno}",
        )
