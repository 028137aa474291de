"""Claims events without a key, and queues them for the threads of their queues."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..conf import Settings
from ..delivery.deliver import dead_after_rescues
from ..delivery.lease import Lease, lease_from_row, row_run
from ..events import Event
from ..listeners.queues import expected_queue
from ..signals import announce, events_claimed
from ..sql import dialect_of
from ..sql.values import Claim, Claimed, Unclaimed
from .coalescing import coalesce_and_complete
from .held import Held
from .intake import Intake
from .pools import Pools
from .queues import Decisions
from .rescues import report_rescues

SMALL_CLAIM = 50  # events; a claim of fewer is a small one
# Seconds by which an event is late at most each time that it is passed on to a queue that other
# workers serve: two that disagree about the queue must not do so all the time.
PASSED_ON_DELAY = 1.0


class EventClaims:
    """Leases events, registers their leases and queues them. The claimer's thread only."""

    def __init__(
        self,
        *,
        alias: str,
        me: str,
        settings: Settings,
        held: Held,
        decisions: Decisions,
        pools: Pools,
        intakes: Mapping[str, Intake],
        connect: Callable[[], BaseDatabaseWrapper],
    ) -> None:
        self._alias, self._me, self._settings = alias, me, settings
        self._held, self._decisions, self._pools = held, decisions, pools
        self._intakes, self._connect = intakes, connect
        self._several = len(settings.queues) > 1  # otherwise, all events belong to default

    def claim(self, claim: Claim, hot: Mapping[str, Event] | None = None) -> Claimed:
        """Make a claim; ``hot`` has the events that this process offered, by id."""
        deadline = self._held.deadline(monotonic())
        self._held.begin_claim()
        connection = self._connect()
        found = dialect_of(connection).claim(claim)
        by_id, now = hot or {}, monotonic()
        leases = [
            lease_from_row(
                row,
                claim.columns,
                run=row_run(row, claim.columns, deadline=deadline, me=self._me),
                me=self._me,
                claimed_at=now,
                hot=by_id.get(row[0]),
            )
            for row in found.rows
        ]
        if hot is None:
            self._note_sizes(leases)
        leases, queues = coalesce_and_complete(connection, leases, self._held)
        self._wake(connection, queues)
        leases = [each for each in leases if each.stream is None]
        if self._several:
            leases = self._in_their_queues(connection, leases)
        new = self._held.add_rows(leases)
        for queue, count in self._count(new).items():
            self._intakes[queue].count(count)
        report_rescues(connection, [each for each in new if each.rescued])
        self._pools.put_all([each for each in new if not self._ends(each)])
        if len(new) < SMALL_CLAIM:
            time.sleep(0)  # let the threads that wait for them run first
        source = "cold" if hot is None else "hot"
        announce(events_claimed, sender=self._alias, count=len(new), source=source)
        return found

    def _wake(self, connection: BaseDatabaseWrapper, queues: set[str]) -> None:
        """Have rows found that were added to queues."""
        for queue in queues:
            if (intake := self._intakes.get(queue)) is not None:
                intake.poll_at = 0.0
        if queues - self._intakes.keys():
            doorbell.ring(connection)

    def _ends(self, lease: Lease) -> bool:
        """Return whether an event has lost too many workers, and is dead."""
        if lease.rescues < self._settings.MAX_RESCUES:
            return False
        lease.decided = True
        self._decisions.put((lease, dead_after_rescues(lease.rescues)))
        return True

    def _count(self, leases: list[Lease]) -> Mapping[str, int]:
        if self._several:
            return Counter(each.queue for each in leases)
        return dict.fromkeys(self._intakes, len(leases))

    def _note_sizes(self, leases: list[Lease]) -> None:
        for queue in {each.run.queue for each in leases} if self._several else self._intakes:
            if (intake := self._intakes.get(queue)) is not None:
                sizes = [
                    each.payload_bytes
                    for each in leases
                    if not self._several or each.run.queue == queue
                ]
                intake.prefetch.note_sizes(len(sizes), sum(sizes))

    def _in_their_queues(self, connection: BaseDatabaseWrapper, leases: list[Lease]) -> list[Lease]:
        """Set the queue of each; release those whose threads are busy or in other workers.

        An event is found in a wrong queue if a writer did not know the listeners, or if these have
        another queue since.
        """
        kept: list[Lease] = []
        others: list[Lease] = []
        rooms = {queue: each.room for queue, each in self._intakes.items()}
        for lease in leases:
            lease.queue = expected_queue(lease.listener, lease.run.queue)
            room = rooms.get(lease.queue, 0)
            rooms[lease.queue] = room - 1
            (kept if lease.queue == lease.run.queue or room > 0 else others).append(lease)
        if others:
            self._move(connection, others)
        return kept

    def _move(self, connection: BaseDatabaseWrapper, leases: list[Lease]) -> None:
        """Release leases into the queues that they belong to."""
        due = [Unclaimed(each.id, each.locked_at, self._due(each), each.queue) for each in leases]
        dialect_of(connection).unclaim(me=self._me, due=due)
        for lease in leases:
            if (intake := self._intakes.get(lease.queue)) is not None:
                intake.watermark.lower(lease.lag)
                intake.poll_at = 0.0
        if any(each.queue not in self._intakes for each in leases):
            doorbell.ring(connection)

    def _due(self, lease: Lease) -> datetime:
        """Return the due time of an event that is released into another queue."""
        first = lease.first_due_at
        if lease.queue in self._intakes or first is None:
            return lease.due_at
        age = max((lease.now - first).total_seconds(), 0.0)
        return lease.now + timedelta(seconds=min(age, PASSED_ON_DELAY))
