"""Releases events that wait too long for a thread, because other workers may be idle."""

from __future__ import annotations

from math import inf

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..delivery.deliver import is_async
from ..delivery.lease import Lease
from .effects import perform
from .pools import Pool
from .releases import Releases

# Seconds that an event may wait for a thread before it is left to other workers.
MAX_THREAD_WAIT = 2.0
SHED_INTERVAL = 0.5  # seconds between two checks
MAX_EXCLUDED = 1000  # events that are left out of claims; beyond that, the list is cleared


class Shedding:
    """Leaves events of one queue to other workers. The claimer's thread only."""

    def __init__(self, *, pool: Pool, releases: Releases) -> None:
        self._pool, self._releases = pool, releases
        self._next = 0.0  # monotonic; the next check
        # Events that the event loop had no place for, and since when (monotonic) each was due. This
        # worker leaves them to others for as long as its loop is full.
        self._excluded: dict[str, float] = {}

    def drop_offers(self, connection: BaseDatabaseWrapper) -> bool:
        """Leave what this process offered to other workers; return whether there was anything."""
        offers = self._pool.offers
        found = bool(offers.take(len(offers)))
        if found:
            doorbell.ring(connection)
        return found

    def release_late(self, connection: BaseDatabaseWrapper, now: float) -> float:
        """Release events that have waited too long for a thread, with their old due times.

        Return for how many seconds the first of them has been due; 0.0 if there were none.
        """
        if now < self._next:
            return 0.0
        self._next = now + SHED_INTERVAL
        return self._release(connection, now, before=now - MAX_THREAD_WAIT)

    def release_all(self, connection: BaseDatabaseWrapper, now: float) -> None:
        """Release all events that wait for a thread, because the queue is paused."""
        self._release(connection, now, before=inf)

    def _release(self, connection: BaseDatabaseWrapper, now: float, *, before: float) -> float:
        runs = self._releases.held.late(before, self._pool.name)
        rows, _ = perform(connection, self._releases.give_back(runs)) if runs else ([], 0)
        if not rows:
            return 0.0
        if self._pool.rate is not None:
            self._pool.rate.give_back(len(rows))
        self._exclude(rows)
        return max(each.lag + now - each.claimed_at for each in rows)

    def _exclude(self, late: list[Lease]) -> None:
        if len(self._excluded) > MAX_EXCLUDED:
            self._excluded.clear()
        awaited = [each for each in late if is_async(each)]
        self._excluded |= {each.id: each.claimed_at - each.lag for each in awaited}

    @property
    def excluded_ids(self) -> list[str]:
        """Return the ids of events that a claim leaves to other workers."""
        return [*self._excluded]

    def clear_excluded(self, now: float) -> float:
        """Stop leaving events out; return the seconds since the first of them was due, or 0.0."""
        waited = now - min(self._excluded.values(), default=now)
        self._excluded.clear()
        return waited
