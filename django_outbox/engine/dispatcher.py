"""Worker threads: each takes one lease, delivers it and passes the decision on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone, translation

from ..delivery import Lease, deliver, faulty, is_async
from .queues import Decisions, Held, Ready

logger = logging.getLogger("django_outbox")

LOOK_UP = 1.0  # seconds after which an idle thread looks whether it should end


class Dispatcher:
    """``WORKERS`` threads around the ready queue."""

    def __init__(
        self,
        *,
        alias: str,
        workers: int,
        held: Held,
        ready: Ready,
        decisions: Decisions,
        made_room: Callable[[], None],
        to_loop: Callable[[Lease], None],
    ) -> None:
        self._alias, self._held, self._ready, self._decisions = alias, held, ready, decisions
        self._made_room, self._to_loop = made_room, to_loop
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"outbox-{alias}-worker-{number}", daemon=True)
            for number in range(workers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let no thread start another event; harmless when repeated."""
        self._stopping.set()
        self._ready.wake(len(self._threads))

    def join(self, give_up: Callable[[], bool]) -> bool:
        """Wait for the listeners that run; return whether all came to their end."""
        for thread in self._threads:
            while thread.is_alive() and not give_up():
                thread.join(0.02)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        hygiene = Hygiene(self._held.lease)
        while not self._stopping.is_set():
            lease = self._ready.take(LOOK_UP)
            self._made_room()
            if lease is None:
                continue
            if is_async(lease):
                self._to_loop(lease)
            elif self._may_start(lease):
                self._deliver(lease, hygiene)
        connections.close_all()

    def _may_start(self, lease: Lease) -> bool:
        if self._held.is_current(lease):
            return not self._stopping.is_set()
        return self._held.wait_current(lease, self._stopping.is_set)

    def _deliver(self, lease: Lease, hygiene: Hygiene) -> None:
        lease.started_at = time.monotonic()
        try:
            hygiene.before()
            decision = deliver(lease, alias=self._alias)
            hygiene.after(lease)
        except BaseException:  # whatever it is, it does not cost the thread
            logger.exception("delivery failed event_id=%s", lease.event.event_id)
            decision = faulty()
        self._decisions.put((lease, decision))


class Hygiene:
    """Keeps one event's leavings from the next: connections, time zone, language.

    Connections stay open whatever CONN_MAX_AGE says, for reconnecting costs 3.3 ms an event; one is
    closed after an error that broke it, after a leak, and checked before use after a pause.
    """

    def __init__(self, idle: float) -> None:
        self._idle = idle  # seconds
        self._last = time.monotonic()

    def before(self) -> None:
        now = time.monotonic()
        if now - self._last > self._idle:
            for connection in _open():
                connection.close()
        elif now - self._last > 1:
            for connection in _open():
                if not connection.is_usable():
                    connection.close()

    def after(self, lease: Lease) -> None:
        for connection in _open():
            if connection.in_atomic_block or not connection.get_autocommit():
                logger.error(
                    "listener left a transaction open; its connection is closed "
                    "event_id=%s event_type=%s alias=%s",
                    lease.event.event_id, lease.event.event_type, connection.alias,
                )  # fmt: skip
                abandon(connection)
            elif connection.errors_occurred:
                connection.errors_occurred = False
                if not connection.is_usable():
                    connection.close()
        timezone.deactivate()
        translation.deactivate()
        self._last = time.monotonic()


def abandon(connection: BaseDatabaseWrapper) -> None:
    """Close a connection in whatever state it was left; what was not committed is undone."""
    connection.run_on_commit = []
    connection.savepoint_ids = []
    connection.atomic_blocks = []
    connection.in_atomic_block = False
    connection.needs_rollback = False
    connection.closed_in_transaction = False
    connection.close()
    connection.connection = None


def _open() -> list[BaseDatabaseWrapper]:
    return [each for each in connections.all(initialized_only=True) if each.connection is not None]
