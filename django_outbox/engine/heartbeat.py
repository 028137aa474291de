"""Renews what is held, so that a lease lives as long as its process; tells people it is alive."""

from __future__ import annotations

import logging
import time

from django.db import DatabaseError, connections

from .. import dialects
from ..delivery import Lease
from ..signals import announce, lease_lost
from .news import Pace
from .presence import Presence
from .queues import Held
from .statistics import INTERVAL, Statistics
from .streams import Streams

logger = logging.getLogger("django_outbox")

BATCH = 500


class Heartbeat:
    """A step every sixth of a lease, on a connection of its own; it renews what is older than a
    third. What was claimed just after a step does not come near its deadline that way."""

    def __init__(self, *, alias: str, me: str, held: Held, presence: Presence | None,
        streams: Streams | None = None, statistics: Statistics | None = None,
        pace: Pace | None = None,
    ) -> None:  # fmt: skip
        self._alias, self._me, self._held, self._presence = alias, me, held, presence
        self._streams, self._statistics, self._pace = streams, statistics, pace
        self._show_at = 0.0  # monotonic

    def step(self) -> float:
        started = time.monotonic()
        leases = self._held.to_renew(started)
        for start in range(0, len(leases), BATCH):
            self._renew(leases[start : start + BATCH])
        if self._streams is not None:
            self._streams.renew(connections[self._alias], self._streams.to_renew(started))
        self._report_overdue(started)
        if self._presence is not None and started >= self._show_at:
            self._presence.show()
            self._show_at = started + self._held.lease / 3
            self._share(self._presence)
        if self._statistics is not None:
            self._statistics.step()
        pause = min(self._held.lease / 6, INTERVAL)
        return max(pause - (time.monotonic() - started), 0.001)

    def close(self) -> None:
        """Write the last statistics, take the worker's row away; in the thread of ``step``."""
        if self._statistics is not None:
            self._statistics.write()
        if self._presence is not None:
            try:
                self._presence.leave()
            except DatabaseError as error:
                logger.warning("the worker's row could not be removed error=%s", error)

    def _renew(self, leases: list[Lease]) -> None:
        connection = connections[self._alias]
        deadline = self._held.deadline(time.monotonic())
        renewed, mine = dialects.of(connection).renew(
            connection, me=self._me, ids=[each.event_id for each in leases], lease=self._held.lease
        )
        self._held.renewed([each for each in leases if each.event_id in renewed], deadline)
        self._lose([each for each in leases if each.event_id not in mine])

    def _share(self, presence: Presence) -> None:
        """Leave streams to who has fewer, and looks to the others; what nobody takes comes back."""
        others = presence.others()
        if self._pace is not None:
            self._pace.others = len(others)
        if self._streams:
            self._streams.share(others)
            self._streams.release(connections[self._alias])

    def _lose(self, leases: list[Lease]) -> None:
        """Forget what is not ours any more, but for what runs: its settle will be refused."""
        unstarted = [each for each in leases if self._held.has(each) and not each.started_at]
        self._held.drop(unstarted)
        if unstarted:
            logger.warning("lost leases before their start count=%d", len(unstarted))
            announce(lease_lost, sender=self._alias, count=len(unstarted))

    def _report_overdue(self, now: float) -> None:
        """A thread cannot be stopped; it keeps its lease and is never run twice, only reported."""
        for lease in self._held.running():
            if lease.overdue_at and now > lease.overdue_at:
                lease.overdue_at = 0.0
                logger.warning(
                    "listener runs longer than its timeout event_id=%s event_type=%s",
                    lease.event_id, lease.event_type,
                )  # fmt: skip
