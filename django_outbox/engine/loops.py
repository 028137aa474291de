"""A named daemon thread that repeats one step, survives every error and stops when told."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from django.db import connections
from django.db.utils import Error as DatabaseError

from .. import dialects
from ..conf import current

logger = logging.getLogger("django_outbox")

BACKOFF = (0.1, 5.0)  # seconds after the first error in a row, and at most
RARER = 8  # of a row of errors the 1st is logged, the 8th, the 64th: all threads meet an outage


class Loop:
    """Repeats ``step`` on a connection of the engine's own.

    ``step`` returns the seconds to wait before the next one, 0 for at once; ``wake`` cuts the wait.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], float],
        *,
        alias: str,
        lock_wait: float,
        close: Callable[[], None] = lambda: None,
        broke: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._step = step
        self._alias = alias
        self._lock_wait = lock_wait
        self._close = close  # gives back what the step opened, in the same thread
        self._broke = broke  # is told of errors of the database
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._errors = 0  # in a row; owner of this and the next four: the thread
        self._told = 1  # how many errors in a row the next line of the log tells of
        self._error = ""  # the class of the last one
        self._began: float | None = None  # monotonic; when the step that runs began
        self._worked = False  # a step has succeeded
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        """Ask the thread to end after its step; harmless when repeated."""
        self._stopping.set()
        self._woken.set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end; return whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def fault(self, longest: float) -> str | None:
        """Say why a new process is needed: the thread has ended, or hangs in a step for too long.

        ``longest`` is in seconds. None: it lives, or was told to end.
        """
        if self._thread.ident is None or self.stopping:
            return None
        if not self._thread.is_alive():
            return f"{self.name} has ended"
        lasts = self._lasts()
        return f"{self.name} has been in one step for {lasts:.0f} s" if lasts > longest else None

    def trouble(self, longest: float) -> str | None:
        """Say why its work does not get on: it fails, or its step lasts, or none was made yet."""
        if self._errors:
            return f"{self.name} failed {self._errors} times in a row: {self._error}"
        if (lasts := self._lasts()) > longest:
            return f"{self.name} has been in one step for {lasts:.0f} s"
        return None if self._worked else f"{self.name} has not begun"

    def _lasts(self) -> float:
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def _run(self) -> None:
        connection = dialects.engine_connection(self._alias, lock_wait=self._lock_wait)
        connections[self._alias] = connection
        try:
            while not self._stopping.is_set():
                pause = self._try()
                if pause > 0:
                    self._woken.wait(pause)
                self._woken.clear()
        finally:
            self._close()
            connection.close()
            del connections[self._alias]

    def _try(self) -> float:
        self._began = time.monotonic()
        try:
            if self._errors:  # a step with nothing to ask would seem to work again
                connections[self._alias].ensure_connection()
            pause = self._step()
        except Exception as error:  # noqa: BLE001 - reported, and the thread lives on
            return self._failed(error)
        finally:
            self._began = None
        if self._errors:
            logger.warning("%s works again errors=%d", self.name, self._errors)
        self._errors, self._told, self._worked = 0, 1, True
        return pause

    def _failed(self, error: Exception) -> float:
        """Report at a bounded rate, make the connection anew, back off."""
        self._errors += 1
        self._error = type(error).__name__  # its text may say more than a probe should know
        if isinstance(error, DatabaseError):
            connections[self._alias].close()
            self._broke()
        first, most = BACKOFF
        most = min(most, current().LEASE / 6)  # as often as the heartbeat, which has to renew
        pause: float = min(first * 2 ** min(self._errors - 1, 10), most)
        if self._errors == self._told:
            self._told *= RARER
            logger.error(
                "%s failed error=%s times=%d next_try=%.1fs",
                self.name, str(error).partition("\n")[0], self._errors, pause,
                exc_info=None if isinstance(error, DatabaseError) else error,
            )  # fmt: skip
        return pause * random.uniform(0.8, 1.2)
