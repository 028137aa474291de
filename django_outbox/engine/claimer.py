"""The one gate: what is offered and what is due is leased here, and nowhere else."""

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

from .. import dialects
from ..conf import Settings
from ..delivery import is_paused, lost, take
from ..dialects.vocabulary import Claim, Claimed, Past
from ..events import Event
from ..signals import announce, events_claimed
from .news import News, Pace
from .pausing import EVERY, Pausing
from .queues import Decisions, Held, Offers, Ready
from .reach import Reach, Rest, Walks
from .stream_claims import StreamClaims, note_rescue
from .streams import Streams

logger = logging.getLogger("django_outbox")

PROBATION = 3.0  # seconds
STREAMS_EVERY = 0.05  # seconds; beside a backlog of others a look for none is not free
FEW = 50  # events
ASKING = 10.0  # times as long as it takes to learn the next due time is the rest after it
LEFT_AMONG = 2000  # rows due first in which a sweep looks for what lost workers left
LOT = 4  # times the threads: so much is in hand while that is taken over


class Claimer:
    """Leases events as there is room, hot and cold alike. One thread only."""

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
        streams: Streams,
        pausing: Pausing,
    ) -> None:
        self.alias, self.me, self.settings = alias, me, settings
        self.offers, self.held, self.ready, self.decisions = offers, held, ready, decisions
        hot, cold = settings.FAIRNESS
        self._settled, self._born = settled, time.monotonic()
        self._pausing = pausing
        self._streams = StreamClaims(
            alias=alias, me=me, settings=settings, held=held, ready=ready, decisions=decisions,
            streams=streams, pausing=pausing, is_proven=lambda: self._is_proven(time.monotonic()),
            connect=lambda: self._connection, walks=Walks(),
        )  # fmt: skip
        self._may_claim = may_claim  # False on the standby of single_node
        self._reach = Reach(margin=settings.SKIP_RECENT)
        self._one_suspect = Claim(me=me, lease=held.lease, limit=1, past=Past.SUSPECT)
        self._turns = cycle([True] * hot + [False] * cold)  # True: hot
        self._look_at = 0.0  # monotonic; when the table is looked at next
        self._due_at = 0.0  # monotonic; when something falls due, as far as we know
        self._asking, self._walking = Rest(ASKING), Rest()
        self._backlog = False  # the last claim left more behind
        self._sweep_at = 0.0  # monotonic; when what lost workers held is looked for
        self._streams_wait = False  # the last claim of streams brought events
        self._streams_at = 0.0  # monotonic; when streams are asked for beside a backlog
        self._left: datetime | None = None  # latest due time of what lost workers held
        self._alone: float | None = None  # monotonic; since when claims rest for a suspect's sake
        self._solo = False  # the suspect is in our hands
        self.news, self.pace = News(first=min(PROBATION, held.lease)), Pace()
        self.hungry = False  # waiting for room; whoever makes some wakes us

    def step(self) -> float:
        """Make one claim, if there is room and reason; return the seconds to wait."""
        if not self._may_claim():
            return min(self.settings.PROBE_INTERVAL, self.settings.POLL_INTERVAL)
        self._pausing.look(self._connection, rung=self.news.rung)
        if self._alone is not None:
            return self._claim_suspect(self._alone)
        self.hungry = True
        room = self._room()
        if not room:
            return min(self.settings.POLL_INTERVAL, EVERY)  # a pause stops what is in hand, too
        self.hungry = False
        now = time.monotonic()
        if self.news.take(now):
            self._look_at = 0.0
        if self._streams.streams.next_read() <= now:
            self._streams.read_again(now, room)
            self._rest_for_suspect(now)
            return 0.0
        look_at = max(self._look_at, self.pace.next_look())
        if not len(self.offers) and now < look_at:
            return self._pause(look_at) - now
        self.pace.keep()
        if len(self.offers) and (now < look_at or next(self._turns)):
            self._claim_hot(room)
        else:
            self._claim_due(room, now)
        return 0.0

    def _pause(self, look_at: float) -> float:
        """Return, on the monotonic clock, until when there is nothing to do but hear of news."""
        until = min(self._streams.streams.next_read(), look_at)
        if self._look_at == look_at:  # else it is not our turn, whatever the news
            until = min(until, self.news.next())
        return min(until, time.monotonic() + EVERY) if len(self.held) else until

    def _room(self) -> int:
        """Free places; a claim waits until it can take a fair part of a batch."""
        capacity = self.settings.COLD_QUEUE_CAPACITY
        in_hand = self.settings.WORKERS + self.settings.ASYNC_CONCURRENCY
        if self._left or self._alone is not None:
            return self._room_for_lot(in_hand)
        waiting = len(self.ready) + self._streams.streams.followers
        # The second bound counts what runs and what waits to be settled or for the event loop.
        room = min(capacity - waiting, 2 * capacity + in_hand - len(self.held))
        worthwhile = min(self.settings.POLL_BATCH_SIZE, capacity) // 2
        return room if room >= worthwhile or (room > 0 and not waiting) else 0

    def _room_for_lot(self, in_hand: int) -> int:
        """Free places while what lost workers held is taken over, by and by.

        What is in hand when a second worker is lost has to be tried alone: it must be little.
        """
        lot = min(LOT * self.settings.WORKERS, self.settings.COLD_QUEUE_CAPACITY)
        out = len(self.held) - self._streams.streams.followers
        room = min(lot - len(self.ready), lot + in_hand - out)
        return room if room >= lot // 2 else 0

    def _claim_hot(self, room: int) -> None:
        offered = self.offers.take(min(room, 500))
        events = {each.event_id: each for each in offered if not self._is_paused(each)}
        if len(events) < len(offered):
            self.news.ring()  # what was offered and is paused is seen to in the table
        if not events:
            return
        if len(events) < FEW:
            self.pace.count()
        claim = Claim(me=self.me, lease=self.held.lease, limit=len(events), ids=[*events])
        try:
            self._claim(claim, events)
        except BaseException:
            self.news.ring()  # the offers are gone; the table has them
            raise

    def _is_paused(self, event: Event) -> bool:
        pauses = self._pausing.pauses
        return bool(pauses) and is_paused(
            pauses, event.event_type, event.aggregate_type, None, event.key
        )

    def _claim_due(self, room: int, now: float) -> None:
        limit = self._pausing.clear(self._connection, min(room, self.settings.POLL_BATCH_SIZE))
        walk = now >= self._walking.until and (now >= self._sweep_at or not self._backlog)
        if walk:
            self._walk(now)
            limit = min(limit, self._room())
        if self._left:
            limit -= self._claim_left((limit + 1) // 2)
        more = limit <= 0 or self._look(limit, now)
        if not more and not self._left:
            self._rest(now, again=inf if walk else self._walking.until)

    def _look(self, limit: int, now: float) -> bool:
        """Claim due events and streams; say whether more are due."""
        most = (limit + 1) // 2 if self._streams_wait else limit
        claim = Claim(
            me=self.me,
            lease=self.held.lease,
            limit=most,
            since=self._reach.back(),
            skip_recent=self.settings.SKIP_RECENT,
        )
        found = self._claim(claim)
        self._reach.note(found)
        self._backlog = found.more
        count = len(found.rows)
        if count and not found.more:
            self.pace.count()
        if found.more and not self._streams_wait and now < self._streams_at:
            return True
        brought, more = self._streams.claim(max(limit - count, 1))
        self._streams_wait, self._streams_at = brought > 0, now + STREAMS_EVERY
        self._rest_for_suspect(now)
        return found.more or more

    def _walk(self, now: float) -> None:
        """Look from the beginning: what lost workers held the claims of all others pass by.

        Where what is due begins is seen on the way.
        """
        started = time.monotonic()
        self._left, suspect, waited = dialects.of(self._connection).left_behind(
            self._connection, me=self.me, among=LEFT_AMONG
        )
        self._walking.after(started)
        self._reach.begin(started, waited)
        if self._is_proven(now):
            self._sweep_at = now + self.settings.POLL_INTERVAL * random.uniform(0.8, 1.2)
            if suspect:
                self._alone = now  # after this claim, so that others get their turn

    def _claim_left(self, most: int) -> int:
        """Take over some of what was lost once; return how many."""
        lease = self.held.lease
        claim = Claim(me=self.me, lease=lease, limit=most, at=self._left, past=Past.LOST)
        count = len(self._claim(claim).rows) if most else 0
        if count:
            self._sweep_at = 0.0  # there may be more
        else:
            self._left = None
        return count

    def _is_proven(self, now: float) -> bool:
        """Say whether this process may try a suspect: one that dies young only blames it more."""
        return self._settled() > 0 or now - self._born > min(PROBATION, self.held.lease)

    def _rest_for_suspect(self, now: float) -> None:
        """Claim no more while a suspect waits for empty hands."""
        if self._streams.suspect is not None and self._alone is None:
            self._alone = now

    def _rest(self, now: float, *, again: float) -> None:
        """Nothing more is due: sleep until the poll, or until the next row falls due.

        If not all was looked at from its beginning, or the next due time not asked for, then until
        that may be; and until ``again`` (monotonic) at most.
        """
        self.pace.count_look(time.monotonic() - now)
        rests = [again, self._streams.streams.next_end(), self._streams.walks.again()]
        if (asked := time.monotonic()) >= self._asking.until:
            self._due_at = self._next_due(now)
            self._asking.after(asked)
        else:
            rests.append(self._asking.until)
            if self._due_at <= now:  # that was looked at
                self._due_at = inf
        self._look_at = min(self._due_at, *rests)

    def _next_due(self, now: float) -> float:
        """Return when (monotonic) the next row falls due, or the next poll."""
        # Where no ring is sure to be heard, a look at the index takes its place.
        probe = self.settings.POLL_INTERVAL if self.news.sure else self.settings.PROBE_INTERVAL
        pause = min(probe, self.settings.POLL_INTERVAL) * random.uniform(0.8, 1.2)
        due = dialects.of(self._connection).seconds_to_next_due(
            self._connection, since=time.monotonic() - now + 0.001
        )
        if due is not None:
            pause = min(pause, due + 0.001)
            self._sweep_at = min(self._sweep_at, now + pause)  # it may be the end of a lease
        if self.settings.SKIP_RECENT:
            pause = min(pause, self.settings.SKIP_RECENT)  # what was too young will be old enough
        return time.monotonic() + max(pause, 0.001)

    def _claim(self, claim: Claim, hot: dict[str, Event] | None = None) -> Claimed:
        """Lease, take in and pass on."""
        deadline = self.held.deadline(time.monotonic())
        found = dialects.of(self._connection).claim(self._connection, claim)
        leases = [
            take(
                row,
                claim.columns,
                deadline=deadline,
                me=self.me,
                hot=hot.get(row[0]) if hot else None,
            )
            for row in found.rows
        ]
        new = self.held.add(leases)
        for lease in new:
            if lease.rescued:
                note_rescue(self.alias, lease)
            if lease.rescues >= self.settings.MAX_RESCUES:
                self.decisions.put((lease, lost(lease.rescues)))
            else:
                self.ready.put(lease)
        if len(new) < FEW:
            time.sleep(0)  # the interpreter to who waits for them, before we go on
        source = "cold" if hot is None else "hot"
        announce(events_claimed, sender=self.alias, count=len(new), source=source)
        return found

    def _claim_suspect(self, since: float) -> float:
        """Once the hands are empty, lease one suspect by itself and wait until it is settled.

        Whatever takes longer than a lease ends the wait; the next sweep comes back to it.
        """
        if not self.held.wait_empty(0.05):
            if time.monotonic() - since > self.held.lease:
                self._alone, self._solo = None, False
                self._streams.drop_suspect()
            return 0.0
        found = not self._solo and (
            self._streams.run_suspect() or bool(self._claim(self._one_suspect).rows)
        )
        self._alone, self._solo = (time.monotonic(), True) if found else (None, False)
        if not found:
            self._sweep_at = self._look_at = 0.0  # there may be another
        return 0.0

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        return connections[self.alias]
