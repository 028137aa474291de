"""The quarantine: a mode in which a worker runs suspects, one at a time and nothing else.

A row or stream is a suspect once two workers were lost with it: it may be what they died of. One
worker at a time is in quarantine, by a named lease; the others go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf
from typing import Final

from .. import doorbell
from ..clocks import monotonic
from ..sql.values import Table
from .claims import Claims
from .effects import Steps, ask
from .gate import Gates
from .leases import Leader, Releases

NAME: Final = "quarantine"  # of the lease
MAX_SCANNED = 2000  # rows due first of a queue in which suspects are looked for
MAX_WAIT = 5.0  # seconds for which one stays in quarantine while something else runs
PROBATION = 3.0  # seconds; a process that has settled nothing may be doomed for so long
# Seconds until the next try after what ran did not end in time: at first, and at most. If it never
# ends, claims rest for a twentieth of the time, and less and less.
RETRY_WAITS = (100.0, 3600.0)


class Quarantine:
    """Whether this worker is in quarantine, and what it does there. The claimer's thread only."""

    def __init__(
        self, *, gates: Gates, claims: Claims, releases: Releases, settled: Callable[[], int]
    ) -> None:
        """``settled`` returns how many events this worker has settled."""
        self._gates, self._claims, self._settled = gates, claims, settled
        self._releases = releases
        self._wakeup = gates.wakeup
        self._me, self._held, self._runs = releases.me, releases.held, releases.runs
        lease = self._held.lease
        self._leader = Leader(me=self._me, name=NAME, lease=lease)
        self._max_wait = min(lease, MAX_WAIT)
        # Not the same for all: what kills young processes would meet a suspect each time.
        self._proven_at = monotonic() + min(PROBATION, lease) * random.uniform(1.0, 1.6)
        self._since: float | None = None  # monotonic; since when one suspect is waited for
        self._not_before, self._pause = 0.0, RETRY_WAITS[0]  # the next try (monotonic); seconds
        self._wakeup.expect(self._proven_at - monotonic())

    @property
    def is_on(self) -> bool:
        return self._since is not None

    def enter(self) -> Steps[bool]:
        """Enter it if a suspect is due, this worker may, and no other is in it; return if it did.

        A process that begins, and has settled nothing, must not count against a suspect.
        """
        now, found = monotonic(), (yield from self._due())
        self._wakeup.note_suspects(found)
        is_proven = self._settled() > 0 or now > self._proven_at
        if not (found and is_proven) or (len(self._held) and now < self._not_before):
            return False
        if not (yield self._leader.take):
            return False
        self._since = now
        for gate in self._gates:
            rows, _ = yield from self._releases.give_back(self._held.late(inf, gate.name))
            gate.released(rows, monotonic())
        return True

    def step(self) -> Steps[float]:
        """Run the next suspect once nothing else runs, or leave; return the seconds to wait."""
        if [each for each in self._gates if each.leave_offers()]:
            yield doorbell.ring
        suspect, now = self._runs.suspect(), monotonic()
        is_next = suspect is not None and suspect.read_at <= now
        if not is_next and (suspect is not None or len(self._held)):
            if self._since is not None and now - self._since > self._max_wait:
                self._not_before = now + self._pause  # later tries are less and less frequent
                self._pause = min(2 * self._pause, RETRY_WAITS[1])
                yield from self.leave()
            return 0.01
        is_alone = yield self._leader.take
        if is_next and suspect is not None:
            yield from self._claims.read([suspect], 1)
        elif not (is_alone and (yield from self._claim_one())):
            yield from self.leave()
            return 0.0
        self._since, self._pause = monotonic(), RETRY_WAITS[0]
        return 0.0

    def _claim_one(self) -> Steps[bool]:
        """Lease the suspect that is due first in one queue and table; return if there was one."""
        for table, queue in (yield from self._due()):
            if (yield from self._claims.claim_suspect(table, queue)):
                return True
        return False

    def _due(self) -> Steps[list[tuple[Table, str]]]:
        """Return the tables and queues in which suspects are due."""
        queues = [each.name for each in self._gates if not each.closed]
        if not queues:
            return []
        found: list[tuple[Table, str]]
        found = yield ask("suspects", me=self._me, queues=queues, limit=MAX_SCANNED)
        return found

    def leave(self) -> Steps[None]:
        """Let this worker claim again, and others enter."""
        self._since = None
        yield from self._leader.release()
