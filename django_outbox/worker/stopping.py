"""Gives back the leases of a stopping worker: unstarted ones at once, running ones at the end."""

from __future__ import annotations

import logging
import time
from functools import partial

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..delivery.lease import Lease, of_rows
from ..sql import dialect_of
from ..sql.halving import in_turn
from .leases import Heartbeat
from .queues import Held
from .streams import Streams

logger = logging.getLogger("django_outbox")

LOCKED_RETRY_TIME = 0.5  # seconds for which locked rows are tried again


class LeaseReturner:
    """A heartbeat that, once the worker stops, also gives leases back.

    It runs in the heartbeat's thread, which exists already: no thread can be started at the
    interpreter's exit. A database that does not answer must not block the thread that calls stop.
    """

    def __init__(
        self, heartbeat: Heartbeat, *, alias: str, me: str, held: Held, streams: Streams
    ) -> None:
        self._heartbeat, self._alias, self._me = heartbeat, alias, me
        self._held, self._streams = held, streams
        self._begun = False
        self._unreleased: list[Lease] = []  # of events that will not start any more
        self.after: float | None = None  # seconds until what runs is due; None: when leases end
        self.released, self.handed_back = 0, 0  # so far; only its thread changes them

    def begin(self) -> None:
        """Release unstarted events at each step from now on."""
        self._heartbeat.note_stop()
        self._begun = True

    def step(self) -> float:
        try:
            return self._heartbeat.step()
        finally:
            if self._begun:
                self._release(connections[self._alias])

    def close(self) -> None:
        """End the heartbeat; the last statement gives back what still runs."""
        connection = connections[self._alias]
        try:
            if connection.connection is not None and not connection.is_usable():
                connection.close()
            self._heartbeat.close()
            in_turn(
                connection, partial(self._release, connection), partial(self._hand_back, connection)
            )
        except Exception as error:  # noqa: BLE001 - stopping goes on
            logger.error("release failed; the leases end by themselves error=%s", error)

    def _release(self, connection: BaseDatabaseWrapper) -> None:
        with self._held.changed:
            unstarted = self._held.unstarted()
            self._held.drop(unstarted)
        self._unreleased += unstarted
        count = 0
        if leases := of_rows(self._unreleased):
            count = dialect_of(connection).release(me=self._me, leases=leases)
            if count == len(leases):
                self._unreleased = []  # otherwise one is locked for now
        count += self._streams.release_all(connection)
        self.released += count
        if count:
            doorbell.ring(connection)

    def _hand_back(self, connection: BaseDatabaseWrapper) -> None:
        running = self._held.running()
        for lease in running:
            logger.warning(
                "listener still runs, event handed back "
                "event_id=%s event_type=%s listener=%r seconds=%.1f",
                *lease.named,
                monotonic() - lease.started_at,
            )
        self.handed_back = len(running)
        rows = of_rows([*self._unreleased, *(each for each in running if each.stream is None)])
        wanted, until = len(rows) + len(self._streams), monotonic() + LOCKED_RETRY_TIME
        dialect = dialect_of(connection)
        while wanted > 0:
            if rows:
                wanted -= dialect.release(me=self._me, leases=rows, after=self.after)
            if len(self._streams):
                wanted -= self._streams.hand_back(connection, after=self.after)
            doorbell.ring(connection)
            if monotonic() > until:
                break
            time.sleep(0.01 if wanted > 0 else 0)
        self._held.drop(running)
