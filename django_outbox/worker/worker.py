"""``Worker``: delivers the events of one database; starts and stops the threads that do it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from math import inf
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from ..conf import Settings, current
from ..models import OutboxEvent
from ..signals import announce, worker_started, worker_stopped
from ..sql import is_in_memory
from ..writing.hot_queue import hot_queues
from .health import DeliveringPart, Health, Part, health_of_parts
from .parts import Parts

logger = logging.getLogger("django_outbox")


JOIN_TIMEOUT = 1.0  # seconds that each part gets to end, in addition to the drain timeout
UNREADY_AFTER = 3  # poll intervals that one step of a part may last before the worker is unready
DEAD_AFTER = (10, 120.0)  # leases, or seconds if longer, that a step may last; then restart


class Worker(Parts):
    """Delivers the events of one database alias from threads of this process.

    Use it as a context manager, or call ``start()`` and ``stop()``; calling one twice is harmless.
    A stopped worker cannot be started again: make a new one. Keyword arguments override the
    settings of the same name for this worker only. ``queues`` are the queues that it serves;
    None: all. It raises ``ValueError`` for one that ``OUTBOX["QUEUES"]`` does not have.

    ``start()`` raises ``ImproperlyConfigured`` for an in-memory SQLite database, which other
    threads cannot reach. It raises ``RuntimeError`` if this process has a worker for the alias.
    """

    def __init__(
        self,
        *,
        using: str | None = None,
        workers: int | None = None,
        poll_interval: float | None = None,
        drain_timeout: float | None = None,
        queues: Collection[str] | None = None,
        purge: bool = True,
        max_events: int | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "WORKERS": workers,
            "POLL_INTERVAL": poll_interval,
            "DRAIN_TIMEOUT": drain_timeout,
        }
        settings = replace(
            current(), **{name: value for name, value in given.items() if value is not None}
        )
        alias = using or router.db_for_write(OutboxEvent)
        super().__init__(
            alias,
            new_owner(),
            settings,
            queues=served(queues, settings),
            purge=purge,
            max_events=max_events,
        )
        self._state, self._pid = "new", 0
        self._start_stop_lock = threading.RLock()  # one start or stop at a time

    # -- start and stop --------------------------------------------------------------------------

    def start(self) -> None:
        """Start all threads and return; raise ``RuntimeError`` if the worker was stopped.

        If ``OUTBOX["ENABLED"]`` is False, log that and start nothing.
        """
        with self._start_stop_lock:
            self._start()

    def _start(self) -> None:
        if self._state == "running":
            return
        if self._state != "new":
            raise RuntimeError("This worker was stopped. Make a new Worker and start that one.")
        if not self.settings.ENABLED:
            logger.warning('OUTBOX["ENABLED"] is False: nothing is delivered alias=%s', self.alias)
            return
        if is_in_memory(connections[self.alias]):
            raise ImproperlyConfigured(
                f"The database {self.alias!r} is in memory, where no worker thread can reach it. "
                "Use a file, or deliver with drain() in this thread."
            )
        if hot_queues.by_alias.setdefault(self.alias, self._gates) is not self._gates:
            raise RuntimeError(f"This process already has a worker for {self.alias!r}.")
        self._state, self._pid = "running", os.getpid()
        try:
            for part in self._threaded_parts():
                part.start()
            self._housekeeper_loop.start()
        except BaseException:
            self.stop(timeout=0)
            raise
        logger.info("worker started id=%s alias=%s", self.id, self.alias)
        announce(worker_started, sender=self.alias, worker_id=self.id, worker=self)

    def depths(self) -> dict[str, int]:
        """Return how many events are ``hot`` (offered), ``cold`` (wait for a thread) and ``held``.

        ``held`` counts all events that are claimed and not settled, including the cold ones.
        """
        waiting = sum(len(each.ready) for each in self._gates)
        cold = waiting + sum(self._held.load(each.name).followers for each in self._gates)
        hot = sum(len(each.offers) for each in self._gates)
        return {"hot": hot, "cold": cold, "held": len(self._held)}

    @property
    def lost_threads(self) -> tuple[str, ...]:
        """Return why only a new process helps: a thread ended, or too many hang."""
        parts: list[Part] = [*self._threaded_parts(), self._event_loop, self._housekeeper_loop]
        return tuple(filter(None, (each.dead_reason(inf) for each in parts)))

    def health(self) -> Health:
        """Return the health of the threads, as they report it, without a database query."""
        if self._state != "running":
            state = "starting" if self._state == "new" else "draining"
            why = tuple(filter(None, (each.dead_reason(0.0) for each in self._executors)))
            return Health(dead=why, unready=(state,)).prefixed(self.alias)
        settings = self.settings
        dead_after = max(DEAD_AFTER[0] * settings.LEASE, DEAD_AFTER[1])
        unready_after = UNREADY_AFTER * settings.POLL_INTERVAL + 2 * settings.LOCK_WAIT
        parts: list[Part] = [*self._threaded_parts(), self._event_loop, self._housekeeper_loop]
        delivering: list[DeliveringPart] = [
            self._claimer_loop,
            self._heartbeat_loop,
            self._settler_loop,
        ]
        delivering += [*self._executors, self._event_loop]
        if self._active is not None:
            delivering.append(self._active_loop)
        if settings.MODE == "writer_only":
            delivering = []
        return health_of_parts(
            parts, delivering, dead_after=dead_after, unready_after=unready_after
        )

    def stop(
        self, timeout: float | None = None, *, hurry: Callable[[], bool] = lambda: False
    ) -> bool:
        """Stop claiming, wait for running listeners, then hand back what has not ended.

        Wait for at most ``timeout`` seconds (default: ``DRAIN_TIMEOUT``), or until ``hurry()`` is
        true. Return whether nothing had to be handed back. No thread can be interrupted, so a
        listener may run on: its event becomes due when its lease ends, and its result is refused.
        """
        until = time.monotonic() + (self.settings.DRAIN_TIMEOUT if timeout is None else timeout)
        finished = self.finish(lambda: hurry() or time.monotonic() > until)
        self.hand_back()
        return finished

    def finish(self, give_up: Callable[[], bool]) -> bool:
        """Stop claiming, release unstarted events, settle what ends before ``give_up()`` is true.

        Return whether everything ended. Leases of what still runs are renewed until ``hand_back``.
        """
        if self._pid not in (0, os.getpid()):
            self._state = "stopped"  # a forked copy has no leases, but its lock may be locked
            return True
        with self._start_stop_lock:
            if self._state != "running":
                self._state = "stopped" if self._state == "new" else self._state
                return True
            self._state = "finished"
            logger.info("worker draining id=%s alias=%s", self.id, self.alias)
            return self._finish(give_up)

    def _finish(self, give_up: Callable[[], bool]) -> bool:
        self._stop_accepting()
        self._lease_returner.begin()
        self._heartbeat_loop.wake()
        finished = True
        for part in self._delivering:
            finished = part.join(give_up) and finished
        settled = self._settle_the_rest(give_up)
        self._watchdog.stop()
        self._watchdog.join(JOIN_TIMEOUT)
        for loop in (
            self._active_loop if self._active else None,
            self._housekeeper_loop,
            self._doorbell_loop,
        ):
            if loop is not None:
                loop.stop()
                loop.join(JOIN_TIMEOUT)
        announce(worker_stopped, sender=self.alias, worker_id=self.id)
        return finished and settled

    def hand_back(self, after: float | None = None) -> None:
        """Give back the leases of events that still run after ``finish``.

        They become due ``after`` seconds from now; None: when their leases end. Their listeners run
        on, but can no longer settle them. To exit before they are due, exit right after this call.
        """
        if self._state != "finished":
            return
        with self._start_stop_lock:
            self._state = "stopped"
            self._lease_returner.after = after
            self._heartbeat_loop.stop()
            self._heartbeat_loop.join(JOIN_TIMEOUT + 2 * self.settings.LOCK_WAIT)
            logger.info(
                "worker stopped id=%s alias=%s released=%d handed_back=%d",
                self.id,
                self.alias,
                self._lease_returner.released,
                self._lease_returner.handed_back,
            )

    def _stop_accepting(self) -> None:
        self._gates.close()
        if hot_queues.by_alias.get(self.alias) is self._gates:
            del hot_queues.by_alias[self.alias]
        self._housekeeper.stop()
        self._housekeeper_loop.stop()
        if self._doorbell_loop is not None:
            self._doorbell_loop.stop()
        self._claimer_loop.stop()
        for part in self._delivering:
            part.stop()
        self._claimer_loop.join(JOIN_TIMEOUT)

    def _settle_the_rest(self, give_up: Callable[[], bool]) -> bool:
        while not self._settler.is_idle and not give_up():
            time.sleep(0.002)
        settled = self._settler.is_idle
        self._settler_loop.stop()
        self._decisions.wake()
        return self._settler_loop.join(JOIN_TIMEOUT) and settled

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()


def served(queues: Collection[str] | None, settings: Settings) -> frozenset[str]:
    """Return the queues to serve; None: all. Raises ``ValueError`` for an unknown one, or none."""
    known = settings.queues
    if queues is None:
        return frozenset(known)
    unknown = [each for each in queues if each not in known]
    if unknown or not queues or isinstance(queues, str):
        raise ValueError(
            f"The queues to serve are {queues!r}; expected some of {', '.join(known)}, which are "
            'those in OUTBOX["QUEUES"].'
        )
    return frozenset(queues)


def new_owner() -> str:
    """Return a name that no other process start has: it is the fence of every settle."""
    return f"{socket.gethostname()[:80]}-{os.getpid()}-{secrets.token_hex(6)}"
