"""The claimer: leases what the hot queue offers and what is due in the table."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from datetime import datetime
from itertools import cycle
from math import inf

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..conf import Settings
from ..delivery.deliver import dead_after_rescues
from ..delivery.lease import lease_from_row
from ..delivery.paused import is_paused
from ..events import Event
from ..signals import announce, events_claimed
from ..sql import dialect_of
from ..sql.values import Claim, Claimed, RescueState
from .pauses import READ_INTERVAL, KnownPauses
from .prefetch import Prefetch
from .queues import AsyncLoad, Decisions, Held, Offers, Ready
from .shedding import SHED_INTERVAL, Shedding
from .stream_claims import StreamClaims, report_rescue
from .streams import Streams
from .suspects import Trial
from .throttle import ClaimThrottle, Throttle
from .wakeup import Wakeup
from .watermark import ScanningWatermark, Watermark

logger = logging.getLogger("django_outbox")

PROBATION = 3.0  # seconds; a process that lives longer may try a suspect
STREAMS_INTERVAL = 0.05  # seconds between claims of streams while other events wait
SMALL_CLAIM = 50  # events; a claim of fewer is a small one
DUE_TIME_FACTOR = 10.0  # the query for the next due time pauses that many times as long as it takes
MAX_SCANNED = 2000  # rows due first in which a full scan searches for the leases of lost workers


class Claimer:
    """Leases events as there is room, from the hot queue and from the table. One thread only."""

    def __init__(
        self,
        *,
        alias: str,
        me: str,
        settings: Settings,
        offers: Offers,
        held: Held,
        ready: Ready,
        decisions: Decisions,
        may_claim: Callable[[], bool],
        settled: Callable[[], int],
        loop: Callable[[], AsyncLoad],
        streams: Streams,
        known_pauses: KnownPauses,
        wakeup: Wakeup,
        throttle: ClaimThrottle,
    ) -> None:
        self.alias, self.me, self.settings = alias, me, settings
        self.offers, self.held, self.ready, self.decisions = offers, held, ready, decisions
        hot, cold = settings.FAIRNESS
        self._settled, self._started_at = settled, monotonic()
        self._loop = loop
        self._prefetch = Prefetch(settings, held=held, ready=ready)
        self._shedding = Shedding(me=me, held=held, offers=offers, streams=streams)
        self._trial, self._is_fresh = Trial(lease=held.lease, held=held), True
        self._suspect_row_waits = False  # the last full scan found a suspect
        self._known_pauses = known_pauses
        self._streams = StreamClaims(
            alias=alias, me=me, settings=settings, held=held, ready=ready, decisions=decisions,
            streams=streams, known_pauses=known_pauses, may_try=self._may_try_suspect,
            connect=lambda: self._connection, watermark=ScanningWatermark(),
        )  # fmt: skip
        self._may_claim = may_claim  # False on the standby of single_node
        self._watermark = Watermark(margin=settings.SKIP_RECENT)
        self._one_suspect = Claim(me=me, lease=held.lease, limit=1, state=RescueState.SUSPECT)
        self._turns = cycle([True] * hot + [False] * cold)  # True: hot
        self._poll_at = 0.0  # monotonic; the next poll
        self._due_at = 0.0  # monotonic; when something falls due, as far as we know
        self._due_times, self._scans = Throttle(DUE_TIME_FACTOR), Throttle()
        self._more_events = False  # more rows were due than the last claim of events took
        self._more_due = False  # the same of the last claim of events or of streams
        self._scan_at = 0.0  # monotonic; the next full scan
        self._streams_wait = False  # the last claim of streams found events
        self._streams_at = 0.0  # monotonic; the next claim of streams during a backlog
        self._lost_until: datetime | None = None  # latest due time of what lost workers leased
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
        if waited := self._shedding.release_late(self._connection, now):
            self._watermark.lower(waited)
            self._poll_at = 0.0  # as soon as a thread is free
        self._wakeup.needs_room = True
        room = self._room(now)
        if not room:
            return min(self.settings.POLL_INTERVAL, SHED_INTERVAL)  # pauses may have begun
        self._wakeup.needs_room = False
        if self._wakeup.take_due(now):
            self._poll_at = 0.0
        if self._streams.streams.next_read() <= now:
            self._streams.read_again(now, room)
            self._schedule_trial(now)
            return 0.0
        poll_at = max(self._poll_at, self._throttle.next_poll())
        if not len(self.offers) and now < poll_at:
            return self._wait_until(poll_at) - now
        self._throttle.wait()
        if len(self.offers) and (now < poll_at or next(self._turns)):
            self._claim_hot(room)
        else:
            self._claim_due(room, now)
        return 0.0

    def _wait_until(self, poll_at: float) -> float:
        """Return until when (monotonic) only a wakeup can bring work."""
        until = min(self._streams.streams.next_read(), poll_at)
        if self._poll_at == poll_at:  # otherwise it is another worker's turn
            until = min(until, self._wakeup.next_poll())
        return min(until, monotonic() + READ_INTERVAL) if len(self.held) else until

    def _room(self, now: float) -> int:
        """Return the free places; a claim waits until it can take a fair part of a batch."""
        if self._prefetch.is_busy(now):
            if self._shedding.drop_offers(self._connection):
                self._wakeup.poll_wanted = True  # perhaps no other worker runs
            return 0
        if self._lost_until or self._trial.is_on:
            return self._prefetch.room_for_recovery(self._streams.streams.followers)
        loop = self._loop()
        if not loop.is_full and (waited := self._shedding.clear_excluded(now)):
            self._watermark.lower(waited)
        self._prefetch.adapt(backlog=self._more_due or len(self.offers) > 0)
        followers = self._streams.streams.followers
        return self._prefetch.room(for_loop=loop.waiting, followers=followers)

    def _claim_hot(self, room: int) -> None:
        offered = self.offers.take(min(room, 500))
        events = {each.event_id: each for each in offered if not self._is_paused(each)}
        if len(events) < len(offered):
            self._wakeup.poll_wanted = True  # the poll postpones what is paused
        if not events:
            return
        if len(events) < SMALL_CLAIM:
            self._throttle.count()
        claim = Claim(me=self.me, lease=self.held.lease, limit=len(events), ids=[*events])
        try:
            self._claim(claim, events)
        except BaseException:
            self._wakeup.poll_wanted = True  # the offers are gone, but the table has them
            raise

    def _is_paused(self, event: Event) -> bool:
        pauses = self._known_pauses.pauses
        return bool(pauses) and is_paused(
            pauses, event.event_type, event.aggregate_type, None, event.key
        )

    def _claim_due(self, room: int, now: float) -> None:
        most = min(room, self.settings.POLL_BATCH_SIZE)
        limit = self._known_pauses.postpone_due(self._connection, most)
        scan = now >= self._scans.until and (now >= self._scan_at or not self._more_events)
        if scan:
            self._full_scan(now)
            if self._is_fresh and self._trial.is_on:
                return  # while nothing else is in flight, the suspect delays nothing else
            limit = min(limit, self._room(now))
        self._is_fresh = False
        if self._lost_until:
            limit -= self._recover((limit + 1) // 2)
        self._more_due = more = limit <= 0 or self._poll(limit, now)
        if not more and not self._lost_until:
            self._plan_next_poll(now, again=inf if scan else self._scans.until)

    def _poll(self, limit: int, now: float) -> bool:
        """Claim due events and streams; return whether more are due."""
        most = (limit + 1) // 2 if self._streams_wait else limit
        claim = Claim(
            me=self.me,
            lease=self.held.lease,
            limit=most,
            since=self._watermark.begin_claim(),
            skip_recent=self.settings.SKIP_RECENT,
            most_bytes=self._prefetch.bytes_left,
            exclude=self._shedding.excluded_ids,
        )
        found = self._claim(claim)
        self._watermark.end_claim(found)
        self._more_events = found.more
        count = len(found.rows)
        if count and not found.more:
            self._throttle.count()
        if found.more and not self._streams_wait and now < self._streams_at:
            return True
        added, more = self._streams.claim(max(limit - count, 1))
        self._streams_wait, self._streams_at = added > 0, now + STREAMS_INTERVAL
        self._schedule_trial(now)
        return found.more or more

    def _full_scan(self, now: float) -> None:
        """Search for the leases of lost workers, which ordinary claims skip.

        Reset the watermark to the first row that is due.
        """
        started = monotonic()
        self._lost_until, suspect, waited = dialect_of(self._connection).lost_events(
            self._connection, me=self.me, limit=MAX_SCANNED
        )
        self._scans.after(started)
        self._watermark.set(started, waited)
        self._suspect_row_waits = suspect
        if suspect and self._is_fresh:
            # At a random age: something that kills young processes, again and again, would meet
            # the trial each time.
            age = self._probation * random.uniform(1.0, 1.6)
            self._trial.schedule(max(now, self._started_at + age))
        if self._is_proven(now):
            self._scan_at = now + self.settings.POLL_INTERVAL * random.uniform(0.8, 1.2)
            if suspect and self._trial.is_allowed(now):
                self._trial.schedule(now)  # after this claim, so that other events get their turn

    def _recover(self, most: int) -> int:
        """Claim some of what lost workers had leased; return how many events."""
        lease = self.held.lease
        claim = Claim(
            me=self.me, lease=lease, limit=most, at=self._lost_until, state=RescueState.LOST
        )
        count = len(self._claim(claim).rows) if most else 0
        if count:
            self._scan_at = 0.0  # there may be more
        else:
            self._lost_until = None
        return count

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

    def _plan_next_poll(self, now: float, *, again: float) -> None:
        """Nothing more is due: set the time of the next poll.

        That is when the next row falls due, or when a throttled query may run again; ``again``
        (monotonic) at the latest.
        """
        self._throttle.count_poll(monotonic() - now)
        exclusion_end = self._streams.streams.next_exclusion_end()
        times = [again, exclusion_end, self._streams.watermark.next_scan()]
        if (queried_at := monotonic()) >= self._due_times.until:
            self._due_at = self._next_due(now)
            self._due_times.after(queried_at)
        else:
            times.append(self._due_times.until)
            if self._due_at <= now:  # this poll has covered it
                self._due_at = inf
        self._poll_at = min(self._due_at, *times)

    def _next_due(self, now: float) -> float:
        """Return when (monotonic) the next row falls due, or the next poll."""
        pause = self.settings.POLL_INTERVAL
        if not self._wakeup.doorbell_is_reliable:  # a poll takes the place of notifications
            pause = min(pause, self.settings.PROBE_INTERVAL)
        pause *= random.uniform(0.8, 1.2)
        due = dialect_of(self._connection).seconds_to_next_due(
            self._connection, since=monotonic() - now + 0.001
        )
        if due is not None:
            pause = min(pause, due + 0.001)
            self._scan_at = min(self._scan_at, now + pause)  # it may be the end of a lease
        if self.settings.SKIP_RECENT:
            pause = min(pause, self.settings.SKIP_RECENT)  # what was too young will be old enough
        return monotonic() + max(pause, 0.001)

    def _claim(self, claim: Claim, hot: dict[str, Event] | None = None) -> Claimed:
        """Lease events, register their leases and queue them for the threads."""
        deadline = self.held.deadline(monotonic())
        found = dialect_of(self._connection).claim(self._connection, claim)
        by_id = hot or {}
        leases = [
            lease_from_row(row, claim.columns, deadline=deadline, me=self.me, hot=by_id.get(row[0]))
            for row in found.rows
        ]
        new = self.held.add(leases)
        if hot is None:
            self._prefetch.note_sizes(len(leases), sum(each.payload_bytes for each in leases))
        for lease in new:
            if lease.rescued:
                report_rescue(self.alias, lease)
            if lease.rescues >= self.settings.MAX_RESCUES:
                lease.decided = True
                self.decisions.put((lease, dead_after_rescues(lease.rescues)))
            else:
                self.ready.put(lease)
        if len(new) < SMALL_CLAIM:
            time.sleep(0)  # let the threads that wait for them run first
        source = "cold" if hot is None else "hot"
        announce(events_claimed, sender=self.alias, count=len(new), source=source)
        return found

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
        if not trial.begun and (
            self._streams.run_suspect() or bool(self._claim(self._one_suspect).rows)
        ):
            trial.begin()
            return 0.0
        trial.end()
        self._is_fresh = False
        self._scan_at = self._poll_at = 0.0  # there may be another
        return 0.0

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        return connections[self.alias]
