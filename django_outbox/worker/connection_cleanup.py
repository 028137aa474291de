"""Keeps database connections from one event to the next: cleaned up, or in a savepoint."""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from ..clocks import monotonic
from ..delivery.lease import Lease
from ..log import first_line
from ..sql import begin_session

logger = logging.getLogger("django_outbox")

CHECK_AFTER = 1.0  # seconds without a delivery after which connections are checked


class BrokenSessions:
    """When a database session of a worker broke: if one is gone, others often are, too.

    The server may have moved, or take no writes any more, to which a session is blind that only
    reads. So a thread that finds a broken one reports it, and all connect anew before they go on.
    """

    def __init__(self) -> None:
        self.broke_at = -math.inf  # monotonic; set by any thread

    def report_broken(self) -> None:
        self.broke_at = monotonic()


class ConnectionCleanup:
    """Keeps the connections of one worker thread usable; called around every delivery.

    Connections stay open whatever CONN_MAX_AGE says, since reconnecting costs 3.3 ms per event. One
    is closed after an error that broke it, an open transaction or a long pause, and when a session
    of this worker broke. It is checked after a short pause: a dead one would fail an innocent
    event.
    """

    def __init__(self, idle: float, sessions: BrokenSessions) -> None:
        self._idle = idle  # seconds without a delivery after which connections are closed
        self._sessions = sessions
        self._last_end = self._last_start = monotonic()
        self._thread = threading.get_ident()
        self._connections: list[BaseDatabaseWrapper] = []  # those that this thread has open
        # To list them with Django around every event took longer than the delivery itself.
        connection_created.connect(self._on_connect)

    def before(self) -> None:
        now = monotonic()
        pause, one_broke = now - self._last_end, self._sessions.broke_at >= self._last_start
        if pause > CHECK_AFTER or one_broke:
            self.close_half_made()
            for connection in self._connections:
                if pause > self._idle or one_broke or not connection.is_usable():
                    connection.close()
            self._remove_closed()
        self._last_start = now

    def after(self, lease: Lease) -> None:
        for connection in self._connections:
            try:
                # An error has ended its session, unless the code that used it closed it.
                is_open = connection.connection is not None
                if is_open and connection.errors_occurred and not connection.is_usable():
                    self._sessions.report_broken()
                tidy(connection, lease)
            except Exception:  # noqa: BLE001 - too broken to be checked
                abandon(connection)
        if self._connections:
            self._remove_closed()
        self._last_end = monotonic()

    def close(self) -> None:
        """Close what this thread has opened."""
        connection_created.disconnect(self._on_connect)
        for connection in self._connections:
            connection.close()

    def close_half_made(self) -> None:
        """Close connections that failed while they were opened, so that Django sent no signal.

        Otherwise they would stay, dead, and fail every event that uses them in this thread.
        """
        for connection in connections.all(initialized_only=True):
            if connection.connection is not None and connection not in self._connections:
                abandon(connection)

    def _remove_closed(self) -> None:
        """Remove closed connections from the list; ``_on_connect`` adds reopened ones."""
        self._connections = [each for each in self._connections if each.connection is not None]

    def _on_connect(self, *, connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        begin_session(connection)
        if connection in self._connections:  # Django reconnected at the end of a transaction
            self._sessions.report_broken()
        else:
            self._connections.append(connection)


def tidy(connection: BaseDatabaseWrapper, lease: Lease) -> None:
    """Close a connection that a listener left in a transaction or with an error.

    Clear its query log, which Django fills with DEBUG and clears only between two requests.
    """
    if not connection.force_debug_cursor:  # else a test or a debugger is reading it
        connection.queries_log.clear()
    if connection.connection is None:
        return
    if connection.in_atomic_block or not connection.get_autocommit():
        logger.error(
            "listener left a transaction open; its connection is closed "
            "event_id=%s event_type=%s listener=%r alias=%s",
            *lease.named,
            connection.alias,
        )
        abandon(connection)
    elif connection.errors_occurred:
        abandon(connection)  # without is_usable(), which is always true on SQLite


def abandon(connection: BaseDatabaseWrapper) -> None:
    """Close a connection whatever its state; what was not committed is rolled back."""
    connection.atomic_blocks = []  # the rest of its state is reset when it connects again
    connection.in_atomic_block = connection.closed_in_transaction = False
    try:
        connection.close()
    except Exception as error:  # noqa: BLE001 - it is as good as closed
        logger.debug("closing a broken connection failed error=%s", first_line(error))
    connection.connection = None


class Savepoint:
    """A savepoint around a delivery that ``drain()`` makes in its caller's transaction.

    It is rolled back if the listener broke the transaction.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._sid: str | None = None

    def __enter__(self) -> Savepoint:
        connection = self._connection
        if connection.in_atomic_block:
            self._depth = len(connection.atomic_blocks)
            self._names = len(connection.savepoint_ids)
            connection.errors_occurred = False
            self._sid = connection.savepoint() or ""
        return self

    def __exit__(self, *raised: object) -> None:
        connection, sid = self._connection, self._sid
        if sid is None:
            return
        leaked = len(connection.atomic_blocks) > self._depth
        del connection.atomic_blocks[self._depth :], connection.savepoint_ids[self._names :]
        if leaked or connection.needs_rollback or connection.errors_occurred:
            connection.needs_rollback = False
            connection.savepoint_rollback(sid)
        else:
            connection.savepoint_commit(sid)

    def renew(self) -> None:
        """End the savepoint and begin another, so that two listeners do not affect each other."""
        self.__exit__()
        self.__enter__()
