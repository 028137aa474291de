"""Leases: those of runs are renewed, released and handed back; those of a name are for one worker.

The latter are for what one worker at a time does for all; their rows store the progress.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..delivery.lease import Lease, Run
from ..models import OutboxLease
from ..signals import announce, lease_lost
from ..sql import dialect_of
from ..sql.values import EVENTS, STREAMS, Unclaimed
from .effects import Steps, Wait, ask
from .held import SAFE_PART, ids_and_leases
from .runs import Runs

logger = logging.getLogger("django_outbox")

LOCKED_RETRY_TIME = 0.5  # seconds for which locked streams are tried again
AT_ONCE = 500  # leases renewed by one statement
SINGLE_NODE: Final = "single_node"  # the name of the active worker's lease


class Releases:
    """Gives back the runs of a worker. Each verb is for one thread; several may be in progress."""

    def __init__(self, *, alias: str, runs: Runs) -> None:
        self.alias, self.me, self.settings = alias, runs.me, runs.settings
        self.held, self.runs = runs.held, runs

    def give_back(self, runs: Sequence[Run]) -> Steps[tuple[list[Lease], int]]:
        """Release what has not started of runs, due as before; return these rows, and streams.

        It is not started here any more: a thread that is about to, waits, and then may not. A
        stream of which an event runs is released once that is settled. What is locked stays held.
        """
        with self.held.changed:
            rows = [one for run in runs if run.table is EVENTS for one in run.unstarted]
            self.held.drop(rows)
            for run in runs:
                if run.table is STREAMS:
                    self.runs.leave(run)
        streams = yield from self.runs.release_ended()
        if not rows:
            return [], streams
        due = [Unclaimed(each.id, each.locked_at, each.due_at, each.run.queue) for each in rows]
        try:
            left = yield ask("unclaim", me=self.me, due=due)
        except BaseException:
            self.held.add_rows(rows)  # they are renewed, and may still start
            raise
        if left:
            self.held.add_rows(each for each in rows if each.id in left)
        yield doorbell.ring
        return [each for each in rows if each.id not in left], streams

    def release_streams(self) -> Steps[int]:
        """Release all streams, those that run once they are settled; return how many were.

        A business transaction that locks one may end soon: it is tried again for a moment.
        """
        count, until = 0, monotonic() + LOCKED_RETRY_TIME
        while True:
            for run in self.held.of(STREAMS):
                self.runs.interrupt(run)
            count += yield from self.runs.release_ended()
            if all(each.out for each in self.held.of(STREAMS)) or monotonic() > until:
                return count
            yield Wait(0.01)

    def hand_back(self, after: float | None) -> Steps[int]:
        """Release what still runs, whose settles will be refused; return how many runs were.

        They are due ``after`` seconds from now; with None, when their leases would have ended.
        """
        count = 0
        for table in (EVENTS, STREAMS):
            if runs := self.held.of(table):
                leases = ids_and_leases(runs)
                count += yield ask("release", me=self.me, table=table, leases=leases, after=after)
        yield doorbell.ring
        return count

    def renew(self, runs: Sequence[Run]) -> Steps[None]:
        """Renew the leases of runs; give up those that other workers own."""
        for table in (EVENTS, STREAMS):
            if not (mine := [each for each in runs if each.table is table]):
                continue
            leases, deadline = ids_and_leases(mine), self.held.deadline(monotonic())
            given = {"me": self.me, "table": table, "lease": self.held.lease}
            renewed, held = yield ask("renew", leases=leases, **given)
            self.held.renewed([each for each in mine if each.id in renewed], deadline)
            if count := self.held.lose(each for each in mine if each.id not in held):
                logger.warning("lost leases before their start count=%d", count)
                announce(lease_lost, sender=self.alias, count=count)


class Leader:
    """Takes and renews the lease of one name, which ends by itself if its worker dies."""

    def __init__(self, *, me: str, name: str, lease: float) -> None:
        self._me, self._name, self.lease = me, name, lease  # seconds
        self._until = self._renewed_at = 0.0  # monotonic; until when it is certainly ours
        self._taken = False  # taken and not given back

    @property
    def holds(self) -> bool:
        return monotonic() < self._until

    def take(self, connection: BaseDatabaseWrapper) -> bool:
        """Take the lease if it is free; return whether it is ours."""
        started = monotonic()
        taken = dialect_of(connection).take_lease(name=self._name, me=self._me, lease=self.lease)
        return self._record(taken, started)

    def state(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return the progress as the last holder stored it."""
        row = OutboxLease.objects.using(connection.alias).filter(pk=self._name)
        return row.values_list("state", flat=True).first()

    def renew(self, state: str) -> Steps[bool]:
        """Renew the lease and store the progress, if it is time; return whether that was done."""
        started = monotonic()
        if started < self._renewed_at + self.lease / 3:
            return False
        renewed = yield lambda connection: self._write(connection, state, self.lease)
        return self._record(renewed, started)

    def release(self, state: str = "") -> Steps[None]:
        """Give the lease back, if we have it, and store the progress."""
        if self._taken:
            yield lambda connection: self._write(connection, state, None)
            self._record(False, 0.0)

    def _write(self, connection: BaseDatabaseWrapper, state: str, lease: float | None) -> bool:
        return dialect_of(connection).note_lease(
            name=self._name, me=self._me, lease=lease, state=state
        )

    def _record(self, held: bool, started: float) -> bool:
        self._taken, self._renewed_at = held, started
        self._until = started + SAFE_PART * self.lease if held else 0.0
        return held


class ActiveLease:
    """Takes and renews the lease that makes a worker the active one."""

    def __init__(self, *, me: str, lease: float, poll: float) -> None:
        self._me, self._pause = me, min(lease / 6, poll)
        self.leader = Leader(me=me, name=SINGLE_NODE, lease=lease)
        self._held: bool | None = None  # as last logged; None: not yet

    def step(self) -> Steps[float]:
        held = yield self.leader.take
        if held is not self._held:
            self._held = held
            logger.info("active id=%s" if held else "standing by id=%s", self._me)
        return self._pause
