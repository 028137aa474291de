"""Gives back the leases of a stopping worker: unstarted ones at once, running ones at the end."""

from __future__ import annotations

import logging
import time
from functools import partial

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..sql.halving import in_turn
from ..sql.values import EVENTS, STREAMS
from .effects import perform
from .held import Held
from .leases import Heartbeat
from .releases import LOCKED_RETRY_TIME, Releases, release_streams

logger = logging.getLogger("django_outbox")


class LeaseReturner:
    """A heartbeat that, once the worker stops, also gives leases back.

    It runs in the heartbeat's thread, which exists already: no thread can be started at the
    interpreter's exit. A database that does not answer must not block the thread that calls stop.
    """

    def __init__(self, heartbeat: Heartbeat, *, alias: str, held: Held, releases: Releases) -> None:
        self._heartbeat, self._alias = heartbeat, alias
        self._held, self._releases = held, releases
        self._begun = False
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
        rows, _ = perform(connection, self._releases.give_back(self._held.of(EVENTS)))
        count = len(rows) + release_streams(connection, self._releases, self._held)
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
        wanted = len(self._held.of(EVENTS)) + len(self._held.of(STREAMS))
        until = monotonic() + LOCKED_RETRY_TIME
        while wanted > 0:
            wanted -= perform(connection, self._releases.hand_back(self.after))
            if monotonic() > until:
                break
            time.sleep(0.01 if wanted > 0 else 0)
        self._held.drop(running)
