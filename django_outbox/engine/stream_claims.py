"""The claimer's side of streams: claim what is due, read the events, plan how they are run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import takewhile
from math import ceil, inf
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import dialects
from ..conf import Settings
from ..delivery import Lease, is_paused, lost, take
from ..dialects.vocabulary import KEYED, POSTPONED_FOR, Found, Read, StreamClaim
from ..events import stored_instant
from ..outcomes import Status
from ..signals import announce, event_rescued, events_claimed
from .pausing import Pausing
from .queues import Decisions, Held, Ready
from .reach import Walks
from .streams import Stream, Streams

logger = logging.getLogger("django_outbox")

LONGEST = 32  # events of one stream in hand
SEQ, STATUS, RESCUES = (KEYED.index(name) for name in ("seq", "status", "rescues"))
DELIVER_AT = KEYED.index("deliver_at")
OF_A_PAUSE = [KEYED.index(name) for name in ("event_type", "aggregate_type", "progress", "key")]
FIRST_DUE, CREATED = KEYED.index("first_due_at"), KEYED.index("created_at")


class StreamClaims:
    """One thread only: the claimer's."""

    def __init__(
        self, *, alias: str, me: str, settings: Settings, held: Held, ready: Ready,
        decisions: Decisions, streams: Streams, pausing: Pausing, is_proven: Callable[[], bool],
        connect: Callable[[], BaseDatabaseWrapper], walks: Walks, at: datetime | None = None,
    ) -> None:  # fmt: skip
        self._alias, self._me, self._settings, self._connect = alias, me, settings, connect
        self._held, self._ready, self._decisions = held, ready, decisions
        self.streams, self._pausing, self._is_proven = streams, pausing, is_proven
        self.walks = walks
        self._at = at  # instead of the database's now, for drain()
        self.exclude: list[str] = []  # keys that are not to come again
        self.postponed = 0  # streams so far whose heads are paused
        self._share = 2  # events that a stream is expected to bring
        self.suspect: tuple[Stream, Lease] | None = None  # to be run when the hands are empty

    def claim(self, room: int) -> tuple[int, bool]:
        """Claim due streams; return how many events they brought, and whether more are due."""
        most = max(room // self._share, min(room, self._settings.WORKERS))
        now = time.monotonic()
        deadline = self._held.deadline(now)
        left_out = [*self.exclude, *self.streams.left_out(now)]
        found = self._dialect.claim_streams(
            self._connection,
            StreamClaim(
                me=self._me, lease=self._held.lease, limit=most, at=self._at, exclude=left_out,
                since=self.walks.back(),
            ),
        )  # fmt: skip
        self.walks.note(found, skipped=bool(left_out))  # which the next claim has to find
        new = self.streams.claimed(
            Stream(key, deadline, careful=0 if was in (None, self._me) else LONGEST)
            for key, was in found.rows
        )
        count = self._read([each for key in new if (each := self.streams.get(key))], room)
        if new:
            self._share = min(2 * ceil(count / len(new)) or 1, LONGEST)
        return count, found.more

    def read_again(self, now: float, room: int) -> None:
        """Read the streams that could not be released, or go on event by event."""
        self._read(self.streams.to_read(now, room), room)

    def _read(self, wanted: Sequence[Stream], room: int) -> int:
        if not wanted:
            return 0
        settings, keys = self._settings, [each.key for each in wanted]
        limit = max(min(room // len(keys), LONGEST), 1)
        read = Read(
            me=self._me, keys=keys, limit=limit, dead_too=settings.ON_DEAD == "block",
            only_due_retries=not settings.STOP_ON_FIRST_FAILURE,
        )  # fmt: skip
        streams = self._dialect.read_streams(self._connection, read)
        retries: dict[str, datetime] = {}
        if read.only_due_retries and streams:
            retries = self._dialect.next_retries(self._connection, read)
        mine = {each.key for each in streams}
        self.streams.lose(each for each in wanted if each.key not in mine)
        if any(self._is_paused(row) for each in streams for row in each.rows[:1]):
            # Whoever has resumed it since made a new version of the stream, after what we read.
            self._pausing.read(self._connection)
        careful: list[tuple[Stream, Found, Lease, float]] = []
        count = 0
        for found in streams:
            stream = self.streams.get(found.key)
            if stream is None:
                continue
            leases, due = self._plan(stream, found, limit, retries.get(found.key))
            if leases and (stream.careful or leases[0].rescues):
                careful.append((stream, found, leases[0], due))
            else:
                innocent = [*takewhile(lambda each: not each.rescues, leases)]
                if len(innocent) < len(leases):
                    due = 0.0  # what may have ended a worker becomes the head
                self.streams.take_in(stream, found.seq, innocent, due)
                count += len(innocent)
        self._run_carefully(careful)
        self.streams.release(self._connection)
        count += len(careful)
        announce(events_claimed, sender=self._alias, count=count, source="cold")
        return count

    def _plan(
        self, stream: Stream, found: Found, limit: int, retry: datetime | None
    ) -> tuple[list[Lease], float]:
        """Return the events to run now, and when (monotonic) the stream is due again."""
        now, started = self._at or stored_instant(found.now), time.monotonic()
        assert now is not None
        leases: list[Lease] = []
        due = inf if retry is None else started + (retry - now).total_seconds()
        for row in found.rows:
            if row[STATUS] == Status.DEAD:
                return leases, due  # it blocks what is behind it, not a retry before it
            if self._is_paused(row):
                return leases, started + (0.0 if leases else self._postpone(stream))
            next_try = stored_instant(row[DELIVER_AT])
            if next_try is not None and next_try > now:
                return leases, started + (next_try - now).total_seconds()
            leases.append(self._lease(row, stream, found.now, next_try))
        if len(found.rows) == limit and found.rows[-1][SEQ] != found.seq:
            due = 0.0
        return leases, due

    def _is_paused(self, row: Sequence[Any]) -> bool:
        pauses = self._pausing.pauses
        return bool(pauses) and is_paused(pauses, *(row[place] for place in OF_A_PAUSE))

    def _postpone(self, stream: Stream) -> float:
        """Return the seconds for which a stream whose head is paused is left alone."""
        self.postponed += 1
        if self._at is not None:  # it would be due again
            self.exclude.append(stream.key)
        return POSTPONED_FOR

    def _lease(
        self, row: Sequence[Any], stream: Stream, now: Any, next_try: datetime | None
    ) -> Lease:
        due = next_try or row[FIRST_DUE] or row[CREATED]
        was = "a lost worker" if stream.careful else None
        return take((*row, due, was, now), KEYED, deadline=stream.deadline, me=self._me)

    # -- what a worker was lost with -------------------------------------------------------------

    def _run_carefully(self, heads: Sequence[tuple[Stream, Found, Lease, float]]) -> None:
        """Run these one event at a time, each noted before it starts and settled before the next.

        Two lost workers make a suspect, which is run alone (design section 5).
        """
        starting = []
        for stream, found, lease, ends in heads:
            stream.careful = max(stream.careful - 1, 0)
            lease.rescues += 1
            due = min(ends, time.monotonic())  # its followers come next
            if lease.rescues >= self._settings.MAX_RESCUES:
                note_rescue(self._alias, lease)
                self._bury(stream, found.seq, lease, due)
            elif lease.rescues == 1:
                starting.append((stream, found.seq, lease, due))
            elif self.suspect is None and self._is_proven():
                self.suspect = (stream, lease)
                self.streams.park(stream, found.seq, due)
            else:  # one at a time; another process may have its hands empty sooner
                later = time.monotonic() + min(self._held.lease, 1.0)
                self.streams.take_in(stream, found.seq, [], later)
        self._start([lease for _, _, lease, _ in starting])
        for stream, seq, lease, due in starting:
            self.streams.take_in(stream, seq, [lease], due)

    def run_suspect(self) -> bool:
        """Start the suspect, if there is one; the hands are empty."""
        if self.suspect is None:
            return False
        (stream, lease), self.suspect = self.suspect, None
        if self.streams.get(stream.key) is not stream:
            return False
        self._start([lease])
        self.streams.take_in(stream, stream.seq, [lease], stream.due)
        return True

    def drop_suspect(self) -> None:
        """Give the suspect up: the hands did not become empty."""
        if self.suspect is not None:
            (stream, _), self.suspect = self.suspect, None
            self.streams.take_in(stream, stream.seq, [], time.monotonic())
            self.streams.release(self._connection)

    def _start(self, leases: Sequence[Lease]) -> None:
        if leases:
            ids = [each.event_id for each in leases]
            self._dialect.note_starts(self._connection, me=self._me, ids=ids)
            for each in leases:
                note_rescue(self._alias, each)

    def _bury(self, stream: Stream, seq: int, lease: Lease, due: float) -> None:
        self.streams.bury(stream, seq, lease, due)
        self._decisions.put((lease, lost(lease.rescues)))

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        return self._connect()

    @property
    def _dialect(self) -> Any:
        return dialects.of(self._connection)


def note_rescue(alias: str, lease: Lease) -> None:
    logger.warning(
        "rescued event_id=%s event_type=%s rescues=%d",
        lease.event_id, lease.event_type, lease.rescues,
    )  # fmt: skip
    announce(event_rescued, sender=alias, event=lease.event, rescues=lease.rescues)
