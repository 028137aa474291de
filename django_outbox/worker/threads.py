"""Daemon threads that survive every error, each repeating a step; and the health they report."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error as DatabaseError

from ..clocks import monotonic
from ..conf import current
from ..doorbell.base import MAX_INTERVALS, Ear
from ..log import first_line
from ..queue_settings import DEFAULT_QUEUE
from ..sql import dialect_of, engine_connection
from .connection_cleanup import BrokenSessions
from .effects import Steps, perform
from .polling import Wakeup

logger = logging.getLogger("django_outbox")

BACKOFF = (0.1, 1.0)  # seconds of back-off after the first of consecutive errors, and at most
CONFLICTS = 10  # in a row, after which one is an error like any other
CONFLICT_PAUSE = 0.02  # seconds at most until a step that another node has beaten is tried again
WAIT_TIMEOUT = 0.2  # seconds of one wait for a notification; a stop may have to wait as long
COMMIT_MARGIN = 0.005  # seconds after a writer's quiet interval; what it wrote is committed by then
LOGGED = {8**power for power in range(9)}  # of consecutive errors, as an outage affects all threads


class Loop:
    """Repeats ``step`` in a thread, on a database connection of its own.

    ``step`` returns the seconds to wait before the next step; 0: none. ``wake`` ends the wait.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], Steps[float]],
        *,
        alias: str,
        close: Callable[[], Steps[None]] | None = None,
        woken: threading.Event | None = None,
        sessions: BrokenSessions | None = None,
    ) -> None:
        self.name = name
        self._step = step
        self._alias = alias
        self._close = close  # gives back what the steps took
        self._sessions = sessions or BrokenSessions()  # those of the same worker
        self._woken = woken or threading.Event()  # set by ``wake``
        self.stopping = False  # set by ``stop``
        self._connected_at = monotonic()  # only the thread sets this and the next five
        self._conflicts = 0  # consecutive
        self._errors = 0  # consecutive
        self._error = ""  # the class of the last one
        self._step_began: float | None = None  # monotonic; when the step began that runs now
        self._has_succeeded = False  # a step has succeeded
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        """Ask the thread to end after its step; harmless when repeated."""
        self.stopping = True
        self._woken.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread to end; return whether it did."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> Loop:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()
        self.join()

    def dead_reason(self, longest: float) -> str | None:
        """Return why a new process is needed: the thread has ended, or hangs in a step too long.

        ``longest``: seconds that a step may last. None: all is well, or it was told to end.
        """
        if self._thread.ident is None or self.stopping:
            return None
        if not self._thread.is_alive():
            return f"{self.name} has ended"
        seconds = self._step_seconds()
        if seconds > longest:
            return f"{self.name} has been in one step for {seconds:.0f} s"
        return None

    def unready_reason(self, longest: float) -> str | None:
        """Return why it makes no progress: errors, a step that takes too long, or no step yet."""
        if self._errors:
            return f"{self.name} failed {self._errors} times in a row: {self._error}"
        if (seconds := self._step_seconds()) > longest:
            return f"{self.name} has been in one step for {seconds:.0f} s"
        return None if self._has_succeeded else f"{self.name} has not begun"

    def _step_seconds(self) -> float:
        began = self._step_began  # the thread may reset it meanwhile
        return 0.0 if began is None else time.monotonic() - began

    def _run(self) -> None:
        connection = engine_connection(self._alias, lock_wait=current().LOCK_WAIT)
        connections[self._alias] = connection
        try:
            while not self.stopping:
                pause = self._run_step()
                if pause > 0:
                    self._woken.wait(pause)
                self._woken.clear()
            self._end(connection)
        finally:
            connection.close()
            del connections[self._alias]

    def _end(self, connection: BaseDatabaseWrapper) -> None:
        try:
            if connection.connection is not None and not connection.is_usable():
                connection.close()
            if self._close is not None:
                perform(connection, self._close())
        except Exception as error:  # noqa: BLE001 - stopping goes on
            logger.warning("%s not closed error=%s", self.name, first_line(error))

    def _run_step(self) -> float:
        self._step_began = time.monotonic()
        try:
            if self._errors or self._sessions.broke_at > self._connected_at:
                self._reconnect()
            pause = perform(connections[self._alias], self._step())
        except Exception as error:  # noqa: BLE001 - reported, and the thread lives on
            return self._handle_error(error)
        finally:
            self._step_began = None
        if self._errors:
            logger.warning("%s works again errors=%d", self.name, self._errors)
        self._errors, self._conflicts, self._has_succeeded = 0, 0, True
        return pause

    def _reconnect(self) -> None:
        """Connect anew: where one session broke, another may be to a server that is none any more.

        A step without a query would seem to work again, so this raises what keeps it from that.
        """
        with suppress(Exception):  # Django drops it whatever that raises
            connections[self._alias].close()
        connections[self._alias].ensure_connection()
        self._connected_at = monotonic()

    def _handle_error(self, error: Exception) -> float:
        """Log at a limited rate, reset the connection, return the back-off in seconds."""
        dialect = dialect_of(connections[self._alias])
        if dialect.is_conflict(error) and self._conflicts < CONFLICTS:
            self._conflicts += 1
            logger.debug("%s beaten error=%s", self.name, first_line(error))
            return random.uniform(0.0, CONFLICT_PAUSE)
        self._errors += 1
        self._error = type(error).__name__  # its text may reveal more than a probe should show
        if isinstance(error, DatabaseError):
            with suppress(Exception):  # Django drops it whatever that raises
                connections[self._alias].close()
            if not dialect.is_lock_wait(error):
                self._sessions.report_broken()
        first, most = BACKOFF
        most = min(most, current().LEASE / 6)  # no longer, because the heartbeat must renew leases
        pause: float = min(first * 2 ** min(self._errors - 1, 10), most)
        if self._errors in LOGGED:
            logger.error(
                "%s failed error=%s times=%d next_try=%.1fs",
                self.name,
                first_line(error),
                self._errors,
                pause,
                exc_info=None if isinstance(error, DatabaseError) else error,
            )
        return pause * random.uniform(0.8, 1.2)


class DoorbellListener:
    """Requests a poll at each notification, and again when quiet writers may notify again."""

    def __init__(
        self, ear: Ear, *, interval: float, wakeup: Wakeup, sessions: BrokenSessions
    ) -> None:
        self._ear, self._sessions = ear, sessions
        self._quiet = (interval + COMMIT_MARGIN, MAX_INTERVALS * interval + COMMIT_MARGIN)
        self._wakeup = wakeup
        self._open, self._opened_at = False, 0.0  # monotonic

    def step(self) -> Steps[float]:
        """Wait for a notification; listen anew after a session of the worker broke."""
        try:
            if not self._open or self._sessions.broke_at > self._opened_at:
                self._opened_at = monotonic()
                yield lambda _: self._ear.listen()
                self._open = True
                self._wakeup.poll()  # finds what was announced before
            if (yield lambda _: self._ear.wait(WAIT_TIMEOUT)):
                self._wakeup.poll_again(self._quiet)
                self._wakeup.poll()
            self._wakeup.trust_doorbell(self._ear.sure)
        except BaseException:
            self._open = False
            self._wakeup.trust_doorbell(False)
            raise
        return 0.0

    def close(self) -> Steps[None]:
        yield lambda _: self._ear.close()


def thread_name(alias: str, queue: str, role: str) -> str:
    """Return the name of a thread that serves one queue."""
    return f"outbox-{alias}-{role}" if queue == DEFAULT_QUEUE else f"outbox-{alias}-{queue}-{role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The reasons why a process is dead or unready; without any it is well."""

    dead: tuple[str, ...] = ()  # why it should be restarted
    unready: tuple[str, ...] = ()  # why it delivers nothing now

    @property
    def is_live(self) -> bool:
        return not self.dead

    @property
    def is_ready(self) -> bool:
        return not (self.dead or self.unready)

    def prefixed(self, name: str) -> Health:
        """Return the same health with ``name`` in front of each reason."""
        return Health(
            dead=tuple(f"{name}: {each}" for each in self.dead),
            unready=tuple(f"{name}: {each}" for each in self.unready),
        )


def reasons(found: Iterable[str | None]) -> tuple[str, ...]:
    """Return the reasons that parts of a worker have given, without those that are well."""
    return tuple(filter(None, found))


def combine(parts: Iterable[Health]) -> Health:
    """Return the health of a whole, with the reasons of all its parts."""
    all_ = [*parts]
    return Health(
        dead=tuple(reason for each in all_ for reason in each.dead),
        unready=tuple(reason for each in all_ for reason in each.unready),
    )
