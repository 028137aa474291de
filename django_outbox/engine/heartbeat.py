"""Renews what is held, so that a lease lives as long as its process; tells people it is alive."""

from __future__ import annotations

import logging
import time

from django.db import connections

from .. import dialects
from ..signals import announce, lease_lost
from .queues import Held

logger = logging.getLogger("django_outbox")

BATCH = 500


class Heartbeat:
    """One step every third of a lease, on a connection of its own."""

    def __init__(self, *, alias: str, me: str, held: Held) -> None:
        self._alias, self._me, self._held = alias, me, held

    def step(self) -> float:
        started = time.monotonic()
        ids = self._held.to_renew(started)
        for start in range(0, len(ids), BATCH):
            self._renew(ids[start : start + BATCH])
        # Half a third: what was claimed just after a step must not come near its deadline.
        return max(self._held.lease / 6 - (time.monotonic() - started), 0.001)

    def _renew(self, ids: list[str]) -> None:
        connection = connections[self._alias]
        deadline = self._held.deadline(time.monotonic())
        renewed, mine = dialects.of(connection).renew(
            connection, me=self._me, ids=ids, lease=self._held.lease
        )
        self._held.renewed(renewed, deadline)
        if lost := set(ids) - mine:
            self._lose(lost)

    def _lose(self, ids: set[str]) -> None:
        """Forget what is not ours any more, but for what runs: its settle will be refused."""
        unstarted = ids.intersection(self._held.unstarted())
        self._held.drop(unstarted)
        if unstarted:
            logger.warning("lost leases: %d before their start", len(unstarted))
            announce(lease_lost, sender=self._alias, count=len(unstarted))
