"""The claimer: leases what the hot queues offer and what is due in the table."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import cycle
from math import inf

from ..clocks import monotonic
from ..conf import Settings
from ..delivery.paused import is_paused
from ..sql import dialect_of
from ..sql.values import Branch, Claim, RescueState
from .claim_parts import ClaimParts
from .event_claims import SMALL_CLAIM
from .intake import Intake
from .pauses import READ_INTERVAL, KnownPauses
from .poll_times import PollTimes
from .pools import Pools
from .queues import Decisions, Held, Offer
from .shedding import SHED_INTERVAL
from .streams import Streams
from .suspects import Trial
from .throttle import ClaimThrottle, Throttle
from .wakeup import Wakeup

PROBATION = 3.0  # seconds; a process that lives longer may try a suspect
STREAMS_INTERVAL = 0.05  # seconds between claims of streams while other events wait
MAX_SCANNED = 2000  # rows due first in which a full scan searches for the leases of lost workers
HOT_BATCH = 500  # offered events that are claimed together


class Claimer(ClaimParts):
    """Leases events as there is room, from the hot queues and from the table. One thread only."""

    def __init__(
        self,
        *,
        alias: str,
        me: str,
        settings: Settings,
        pools: Pools,
        held: Held,
        decisions: Decisions,
        may_claim: Callable[[], bool],
        settled: Callable[[], int],
        streams: Streams,
        known_pauses: KnownPauses,
        wakeup: Wakeup,
        throttle: ClaimThrottle,
    ) -> None:
        super().__init__(
            alias=alias,
            me=me,
            settings=settings,
            pools=pools,
            held=held,
            decisions=decisions,
            streams=streams,
            known_pauses=known_pauses,
        )
        hot, cold = settings.FAIRNESS
        self._settled, self._started_at = settled, monotonic()
        self._trial, self._is_fresh = Trial(lease=held.lease, held=held), True
        self._suspect_row_waits = False  # the last full scan found a suspect
        self._may_claim = may_claim  # False on the standby of single_node
        self._turns = cycle([True] * hot + [False] * cold)  # True: hot
        self._poll_times = PollTimes(settings, intakes=self._intakes, wakeup=wakeup)
        self._scans = Throttle()
        self._more_events = False  # more rows were due than the last claim of events took
        self._streams_wait = False  # the last claim of streams found events
        # Monotonic; the next full scan, and the next claim of streams during a backlog.
        self._scan_at = self._streams_at = 0.0
        self._probation = min(PROBATION, held.lease)  # seconds
        self._wakeup, self._throttle = wakeup, throttle
        wakeup.expect(self._probation)

    def step(self) -> float:
        """Make one claim, if there is room and reason; return the seconds to wait."""
        if not self._may_claim():
            return min(self.settings.PROBE_INTERVAL, self.settings.POLL_INTERVAL)
        self._known_pauses.refresh(self._connection, notified=self._wakeup.poll_wanted)
        if self._trial.is_on:
            return self._try_suspect()
        now = monotonic()
        if self._closed.follow(now):
            self._poll_all()
        for intake in self._intakes.values():
            intake.release_late(self._connection, now)
        open_ones = self._with_room(now)
        if not open_ones:
            return min(self.settings.POLL_INTERVAL, SHED_INTERVAL, self._next_event(now) - now)
        if self._wakeup.take_due(now):
            self._poll_all()
        if self._streams.streams.next_read() <= now:
            self._streams.read_again(now, sum(each.room for each in open_ones))
            self._schedule_trial(now)
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
        recovering = self._trial.is_on or any(
            each.is_recovering(now) for each in self._intakes.values()
        )
        found = []
        for intake in self._intakes.values():
            if intake.find_room(self._connection, now, recovering=recovering):
                self._wakeup.poll_wanted = True  # perhaps no other worker runs
            if intake.room:
                found.append(intake)
        return found

    def _wait_until(self, open_ones: list[Intake], poll_at: float) -> float:
        """Return until when (monotonic) only a wakeup can bring work."""
        until = min(self._streams.streams.next_read(), poll_at)
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
            self._events.claim(Claim(me=self.me, lease=self.held.lease, ids=[*events]), events)
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
        if scan:
            self._full_scan(now)
            if self._is_fresh and self._trial.is_on:
                return  # while nothing else is in flight, the suspect delays nothing else
            self._with_room(now)
            limits = {name: min(limit, self._intakes[name].room) for name, limit in limits.items()}
        self._is_fresh = False
        self._recover(limits)
        wanted = {name: limit for name, limit in limits.items() if limit > 0}
        finished = self._poll(wanted, now) if wanted else set()
        for name in limits:
            self._intakes[name].more = name not in finished
        finished = {name for name in finished if self._intakes[name].lost_until is None}
        if finished:
            again = inf if scan else self._scans.until
            self._throttle.count_poll(monotonic() - now)
            times = [again, self._streams.streams.next_exclusion_end(), self._streams.next_scan()]
            soonest = self._poll_times.plan(self._connection, finished, now, again=min(times))
            self._scan_at = min(self._scan_at, soonest)  # it may be the end of a lease

    def _poll(self, limits: dict[str, int], now: float) -> set[str]:
        """Claim due events and streams; return the queues in which nothing more is due."""
        most = {
            name: (limit + 1) // 2 if self._streams_wait else limit
            for name, limit in limits.items()
        }
        intakes = [self._intakes[name] for name in limits]
        claim = Claim(
            me=self.me,
            lease=self.held.lease,
            branches=[each.branch(most[each.name]) for each in intakes],
            skip_recent=self.settings.SKIP_RECENT,
            exclude=[one for each in intakes for one in each.shedding.excluded_ids],
        )
        found = self._events.claim(claim)
        for intake in intakes:
            intake.watermark.end_claim(found.found(intake.name))
        more = {queue for queue, each in found.queues.items() if each.more}
        self._more_events = bool(more)
        if found.rows and not more:
            self._throttle.count()
        if more and not self._streams_wait and now < self._streams_at:
            return set()
        rooms = {each.name: max(min(each.room, limits[each.name]), 1) for each in intakes}
        added, more_streams = self._streams.claim(rooms)
        self._streams_wait, self._streams_at = added > 0, now + STREAMS_INTERVAL
        self._schedule_trial(now)
        return limits.keys() - more - more_streams

    def _full_scan(self, now: float) -> None:
        """Search for the leases of lost workers, which ordinary claims skip.

        Reset the watermarks to the first row that is due.
        """
        started = monotonic()
        intakes = [each for each in self._intakes.values() if not each.pool.is_closed]
        found = dialect_of(self._connection).lost_events(
            me=self.me, queues=[each.name for each in intakes], limit=MAX_SCANNED
        )
        self._scans.after(started)
        for intake in intakes:
            lost = found.get(intake.name)
            intake.lost_until = lost.until if lost else None
            intake.watermark.set(started, lost.waited if lost else 0.0)
        suspect = self._suspect_row_waits = any(each.suspect for each in found.values())
        if suspect and self._is_fresh:
            # At a random age: something that kills young processes, again and again, would meet
            # the trial each time.
            age = self._probation * random.uniform(1.0, 1.6)
            self._trial.schedule(max(now, self._started_at + age))
        if self._is_proven(now):
            self._scan_at = now + self.settings.POLL_INTERVAL * random.uniform(0.8, 1.2)
            if suspect and self._trial.is_allowed(now):
                self._trial.schedule(now)  # after this claim, so that other events get their turn

    def _recover(self, limits: dict[str, int]) -> None:
        """Claim some of what lost workers had leased, and take it off the limits."""
        lost = [self._intakes[name] for name in limits if self._intakes[name].lost_until]
        branches = [
            Branch(each.name, (limits[each.name] + 1) // 2)
            for each in lost
            if limits[each.name] > 0
        ]
        if not branches:
            return
        until = max(each.lost_until for each in lost if each.lost_until)
        claim = Claim(
            me=self.me, lease=self.held.lease, branches=branches, at=until, state=RescueState.LOST
        )
        found = self._events.claim(claim).queues
        for branch in branches:
            if branch.queue in found:
                self._scan_at = 0.0  # there may be more
            else:
                self._intakes[branch.queue].lost_until = None
            limits[branch.queue] = min(limits[branch.queue], self._intakes[branch.queue].room)

    def _is_proven(self, now: float) -> bool:
        """Return whether this process may try a suspect; dying young must not count against one."""
        return self._settled() > 0 or now - self._started_at > self._probation

    def _may_try_suspect(self) -> bool:
        """Return whether other claims may wait for the suspect of a stream."""
        now = monotonic()
        return self._is_proven(now) and self._trial.is_allowed(now)

    def _schedule_trial(self, now: float) -> None:
        """Stop claiming while a stream's suspect waits until nothing is in flight."""
        if self._streams.suspect is not None:
            self._trial.schedule(now)
        self._wakeup.suspect_waits = self._suspect_row_waits or self._streams.suspect_waits

    # -- suspects --------------------------------------------------------------------------------

    def _try_suspect(self) -> float:
        """Once nothing is in flight, lease one suspect alone and wait until it is settled.

        After the longest time that a trial may last, claims go on; a later scan tries it again.
        """
        trial = self._trial
        if not self.held.wait_empty(0.05):
            if trial.lasts_too_long:
                trial.give_up()
                self._streams.drop_suspect()
            return 0.0
        if not (trial.is_due and self._is_proven(monotonic())):
            return 0.05
        if not trial.begun and (self._streams.run_suspect() or self._claim_suspect()):
            trial.begin()
            return 0.0
        trial.end()
        self._is_fresh = False
        self._scan_at = 0.0  # there may be another
        self._poll_all()
        return 0.0

    def _claim_suspect(self) -> bool:
        """Lease the suspect that is due first, of one queue; return whether there was one."""
        for intake in self._intakes.values():
            claim = Claim(
                me=self.me,
                lease=self.held.lease,
                branches=[Branch(intake.name, 1)],
                state=RescueState.SUSPECT,
            )
            if not intake.pool.is_closed and self._events.claim(claim).rows:
                return True
        return False
