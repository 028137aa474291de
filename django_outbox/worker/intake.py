"""``Intake``: what the claimer knows of one queue: its room, its watermark and its next poll."""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import CENTURY, Settings
from ..sql.values import Branch
from .pools import Pool
from .prefetch import Prefetch
from .releases import Releases
from .shedding import Shedding
from .watermark import Watermark


class Intake:
    """Decides how much to claim from one queue, and when. The claimer's thread only."""

    def __init__(
        self, pool: Pool, *, settings: Settings, releases: Releases, most_bytes: int
    ) -> None:
        """``most_bytes``: the queue's share of the payload text that may be in memory."""
        self.pool, self.name, self._settings = pool, pool.name, settings
        self.prefetch = Prefetch(
            settings, pool.settings, held=releases.held, ready=pool.ready, most_bytes=most_bytes
        )
        self.shedding = Shedding(pool=pool, releases=releases)
        self.watermark = Watermark(margin=settings.SKIP_RECENT)
        self.room = 0  # events that may be claimed in this step
        self.more = False  # more was due than the last claim took
        self.poll_at = 0.0  # monotonic; the next poll
        self.due_at = 0.0  # monotonic; when something falls due, as far as we know
        self._was_closed = False

    def find_room(self, connection: BaseDatabaseWrapper, now: float) -> bool:
        """Set the free places; return whether offers were left to other workers.

        A claim waits until it can take a fair part of a batch.
        """
        pool, self.room = self.pool, 0
        pool.needs_room = not pool.is_closed
        if not pool.needs_room:
            pool.offers.take(len(pool.offers))  # the table has them
            return False
        if self.prefetch.is_busy(now):
            return self.shedding.drop_offers(connection)
        self.room = self._room(now)
        if not self.room:
            return False
        pool.needs_room = False
        if pool.rate is not None:
            self.room = self._within_rate(now, pool.rate.available())
        return not self.room and self.shedding.drop_offers(connection)

    def _room(self, now: float) -> int:
        load = self.pool.async_load()
        if not load.is_full and (waited := self.shedding.clear_excluded(now)):
            self.watermark.lower(waited)
        self.prefetch.adapt(backlog=self.more or len(self.pool.offers) > 0)
        return self.prefetch.room(for_loop=load.waiting)

    def _within_rate(self, now: float, available: int) -> int:
        """Return the room, at most what the rate leaves; if there is none, wait with the poll."""
        assert self.pool.rate is not None
        if available < 1 or (self.more and self.pool.rate.wait() > 0):
            self.poll_at = max(self.poll_at, now + max(self.pool.rate.wait(), 0.001))
            return 0
        return min(self.room, available)

    def follow_pauses(self, connection: BaseDatabaseWrapper, now: float) -> None:
        """Release what waits for a thread while the queue is paused; poll at once after a pause."""
        closed = self.pool.is_closed
        breaker = self.pool.breaker
        if closed and not (breaker is not None and breaker.is_probing):
            if self.prefetch.holds_any:
                self.shedding.release_all(connection, now)
        elif self._was_closed and not closed:
            self.poll_at = 0.0
            self.watermark.set(now, CENTURY)
        self._was_closed = closed

    def release_late(self, connection: BaseDatabaseWrapper, now: float) -> None:
        """Leave events to other workers that have waited too long for a thread."""
        if waited := self.shedding.release_late(connection, now):
            self.watermark.lower(waited)
            self.poll_at = 0.0  # as soon as a thread is free

    def branch(self, limit: int, *, scan: bool) -> Branch:
        """Return what a claim takes of this queue, at most ``limit`` events."""
        since = self.watermark.begin_claim(scan=scan)
        return Branch(self.name, limit, since, self.prefetch.bytes_left)

    def count(self, events: int) -> None:
        """Count events that were claimed for this queue."""
        self.room -= events
        if events and self.pool.rate is not None:
            self.pool.rate.spend(events)
