"""The claimer: leases what the hot queues offer and what is due in the table."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from math import inf
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..conf import Settings
from ..delivery.lease import Lease
from ..delivery.paused import is_paused
from ..sql import dialect_of
from ..sql.values import Table
from .claims import SMALL_CLAIM, Claims
from .closed_queues import ClosedQueues
from .effects import Steps, T, perform
from .intake import Intake
from .pauses import READ_INTERVAL, KnownPauses
from .poll_times import PollTimes
from .pools import Pools
from .quarantine import Quarantine
from .queues import Decisions, Offer
from .releases import Releases
from .shedding import SHED_INTERVAL
from .stream_reads import StreamReads
from .throttle import ClaimThrottle, Throttle
from .wakeup import Wakeup

STREAMS_INTERVAL = 0.05  # seconds between claims of streams while other events wait
MAX_SCANNED = 2000  # rows due first of a queue in which suspects are looked for
SCAN_AGAIN = 1.0  # seconds after a quarantine until suspects are looked for again
HOT_BATCH = 500  # offered events that are claimed together


class Claimer:
    """Leases events as there is room, from the hot queues and from the table. One thread only."""

    def __init__(
        self,
        *,
        settings: Settings,
        pools: Pools,
        decisions: Decisions,
        may_claim: Callable[[], bool],
        settled: Callable[[], int],
        releases: Releases,
        known_pauses: KnownPauses,
        wakeup: Wakeup,
        throttle: ClaimThrottle,
    ) -> None:
        self.alias, self.me, self.settings = releases.alias, releases.me, settings
        self.held, self._runs, self._known_pauses = releases.held, releases.runs, known_pauses
        self._make_claims(pools, decisions, releases)
        hot, cold = settings.FAIRNESS
        self._settled = settled
        self._quarantine = Quarantine(alias=self.alias, me=self.me, held=self.held)
        self._may_claim = may_claim  # False on the standby of single_node
        self._turns = cycle([True] * hot + [False] * cold)  # True: hot
        self._poll_times = PollTimes(settings, intakes=self._intakes, wakeup=wakeup)
        self._scans = Throttle()
        self._more_events = False  # more rows were due than the last claim of events took
        self._streams_wait = False  # the last claim of streams found events
        # Monotonic; the next full scan and the next claim of streams during a backlog.
        self._scan_at = self._streams_at = 0.0
        self._wakeup, self._throttle = wakeup, throttle
        wakeup.expect(self._quarantine.proven_at - monotonic())

    def _make_claims(self, pools: Pools, decisions: Decisions, releases: Releases) -> None:
        settings, known_pauses = self.settings, self._known_pauses
        most_bytes = max(settings.PREFETCH_BYTES // len(pools), 1)
        self._intakes = {
            pool.name: Intake(pool, settings=settings, releases=releases, most_bytes=most_bytes)
            for pool in pools
        }
        parts: dict[str, Any] = {
            "settings": settings,
            "releases": releases,
            "pools": pools,
            "decisions": decisions,
        }
        self._reads = StreamReads(known_pauses=known_pauses, count=self._count, **parts)
        self._claims = Claims(reads=self._reads, intakes=self._intakes, **parts)
        self._closed = ClosedQueues(
            intakes=self._intakes, claims=self._claims, known_pauses=known_pauses
        )

    def step(self) -> float:
        """Make one claim, if there is room and reason; return the seconds to wait."""
        if not self._may_claim():
            return min(self.settings.PROBE_INTERVAL, self.settings.POLL_INTERVAL)
        self._known_pauses.refresh(self._connection, notified=self._wakeup.poll_wanted)
        now = monotonic()
        if self._quarantine.is_on:
            return self._run_suspects(now)
        self._closed.follow(self._connection, now)
        for intake in self._intakes.values():
            intake.release_late(self._connection, now)
        open_ones = self._with_room(now)
        if not open_ones:
            return min(self.settings.POLL_INTERVAL, SHED_INTERVAL, self._next_event(now) - now)
        if self._wakeup.take_due(now):
            self._poll_all()
        if self._runs.next_read() <= now:
            room = sum(each.room for each in open_ones)
            self._perform(self._reads.read(self._runs.to_read(now, room), room))
            return 0.0
        poll_at = max(min(each.poll_at for each in open_ones), self._throttle.next_poll())
        hot = any(len(each.pool.offers) for each in open_ones)
        if not hot and now < poll_at:
            return max(self._wait_until(open_ones, poll_at) - now, 0.0)
        self._throttle.wait()
        if hot and (now < poll_at or next(self._turns)):
            self._claim_hot(open_ones)
        else:
            has_backlog = any(each.more for each in open_ones)  # else one statement asks for all
            self._claim_due(
                [each for each in open_ones if each.poll_at <= now or not has_backlog], now
            )
        return 0.0

    def _with_room(self, now: float) -> list[Intake]:
        """Return the queues with free places."""
        found = []
        for intake in self._intakes.values():
            if intake.find_room(self._connection, now):
                self._wakeup.poll_wanted = True  # perhaps no other worker runs
            if intake.room:
                found.append(intake)
        return found

    def _wait_until(self, open_ones: list[Intake], poll_at: float) -> float:
        """Return until when (monotonic) only a wakeup can bring work."""
        until = min(self._runs.next_read(), poll_at)
        if poll_at == min(each.poll_at for each in open_ones):  # or it is another worker's turn
            until = min(until, self._wakeup.next_poll())
        until = min(until, self._next_event(monotonic()))
        if len(open_ones) < len(self._intakes):  # late events of the others are to be released
            until = min(until, monotonic() + SHED_INTERVAL)
        return min(until, monotonic() + READ_INTERVAL) if len(self.held) else until

    def _next_event(self, now: float) -> float:
        """Return when (monotonic) a rate leaves room, or there is work about paused queues."""
        times = [
            each.poll_at
            for each in self._intakes.values()
            if each.pool.rate is not None and each.poll_at > now
        ]
        return max(min([self._closed.next_step(now), *times]), now + 0.001)

    # -- claims ----------------------------------------------------------------------------------

    def _claim_hot(self, open_ones: list[Intake]) -> None:
        offered: list[Offer] = []
        for intake in open_ones:
            offered += intake.pool.offers.take(min(intake.room, HOT_BATCH))
        events = {each.id: each.event for each in offered if not self._is_paused(each)}
        if len(events) < len(offered):
            self._wakeup.poll_wanted = True  # the poll postpones what is paused
        if not events:
            return
        if len(events) < SMALL_CLAIM and not any(len(each.pool.offers) for each in open_ones):
            self._throttle.count()
        try:
            self._perform(self._claims.claim_hot(events))
        except BaseException:
            self._wakeup.poll_wanted = True  # the offers are gone, but the table has them
            raise

    def _is_paused(self, offer: Offer) -> bool:
        pauses = self._known_pauses.pauses
        return bool(pauses) and is_paused(pauses, offer.event.event_type, offer.listener, None)

    def _claim_due(self, intakes: list[Intake], now: float) -> None:
        most = self.settings.POLL_BATCH_SIZE
        limits = {each.name: min(each.room, most) for each in intakes}
        limits = self._known_pauses.postpone_due(self._connection, limits)
        scan = now >= self._scans.until and (now >= self._scan_at or not self._more_events)
        if scan and self._look_for_suspects(now):
            return
        wanted = {name: limit for name, limit in limits.items() if limit > 0}
        finished = self._poll(wanted, now, scan=scan) if wanted else set()
        if scan:
            self._scans.after(now)
        for name in limits:
            self._intakes[name].more = name not in finished
        if finished:
            again = inf if scan else self._scans.until
            self._throttle.count_poll(monotonic() - now)
            again = min(again, self._runs.next_exclusion_end())
            soonest = self._poll_times.plan(self._connection, finished, now, again=again)
            self._scan_at = min(self._scan_at, soonest)  # it may be the end of a lease

    def _poll(self, limits: dict[str, int], now: float, *, scan: bool) -> set[str]:
        """Claim due events and streams; return the queues in which nothing more is due.

        A full scan finds what committed late or was locked when a claim passed it.
        """
        most = {
            name: (limit + 1) // 2 if self._streams_wait else limit
            for name, limit in limits.items()
        }
        intakes = [self._intakes[name] for name in limits]
        claim = self._claims.of(
            [each.branch(most[each.name], scan=scan) for each in intakes],
            exclude=[one for each in intakes for one in each.shedding.excluded_ids],
        )
        claim = replace(claim, skip_recent=self.settings.SKIP_RECENT)
        found = self._perform(self._claims.claim_rows(claim))
        for intake in intakes:
            intake.watermark.end_claim(found.found(intake.name))
        more = {queue for queue, each in found.queues.items() if each.more}
        self._more_events = bool(more)
        if found.rows and not more:
            self._throttle.count()
        if more and not self._streams_wait and now < self._streams_at:
            return set()
        rooms = {each.name: max(min(each.room, limits[each.name]), 1) for each in intakes}
        added, more_streams = self._perform(self._claims.claim_streams(rooms, scan=scan))
        self._streams_wait, self._streams_at = added > 0, now + STREAMS_INTERVAL
        return limits.keys() - more - more_streams

    # -- suspects --------------------------------------------------------------------------------

    def _look_for_suspects(self, now: float) -> bool:
        """Enter the quarantine if a suspect is due and no other worker is in it."""
        self._scan_at = now + self.settings.POLL_INTERVAL * random.uniform(0.8, 1.2)
        self._wakeup.suspect_waits = bool(self._suspects())
        if not (self._wakeup.suspect_waits and self._quarantine.enter(settled=self._settled())):
            return False
        for intake in self._intakes.values():
            intake.shedding.release_all(self._connection, now)
        return True

    def _suspects(self) -> list[tuple[Table, str]]:
        """Return the tables and queues in which suspects are due."""
        queues = [each.name for each in self._intakes.values() if not each.pool.is_closed]
        dialect = dialect_of(self._connection)
        return dialect.suspects(me=self.me, queues=queues, limit=MAX_SCANNED) if queues else []

    def _run_suspects(self, now: float) -> float:
        """Run one suspect after another, each once nothing else runs; then claim as before."""
        for intake in self._intakes.values():
            intake.shedding.drop_offers(self._connection)
        suspect = self._runs.suspect()
        if suspect is not None and suspect.read_at <= now:
            self._quarantine.go_on()
            self._perform(self._reads.read([suspect], 1))
        elif suspect is not None or not self.held.wait_empty(0.05):
            if not self._quarantine.lasts_too_long:
                return 0.01
            self._quarantine.give_up()
            self._poll_all()
        elif not (self._quarantine.go_on() and self._claim_suspect()):
            self._quarantine.leave()
            self._scans.after(now, least=SCAN_AGAIN)  # one may be locked, or left to others
            self._poll_all()
        return 0.0

    def _claim_suspect(self) -> bool:
        """Lease the suspect that is due first in one queue and table; return if there was one."""
        return any(
            self._perform(self._claims.claim_suspect(table, queue))
            for table, queue in self._suspects()
        )

    def _count(self, lease: Lease) -> None:
        """Count an event of a stream that is to be run here."""
        if (intake := self._intakes.get(lease.queue)) is not None:
            intake.count(1)

    def _poll_all(self) -> None:
        for intake in self._intakes.values():
            intake.poll_at = 0.0

    def _perform(self, steps: Steps[T]) -> T:
        return perform(self._connection, steps)

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        return connections[self.alias]

    def close(self) -> None:
        """Let another worker enter the quarantine at once. Call it in the thread of ``step``."""
        self._quarantine.leave()
