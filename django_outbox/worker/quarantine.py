"""The quarantine: a mode in which a worker runs suspects, one at a time and nothing else.

A row or stream is a suspect once two workers were lost with it: it may be what they died of. One
worker at a time is in quarantine, by a named lease; the others go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from ..clocks import monotonic
from .held import Held
from .leader_lease import Leader

NAME: Final = "quarantine"  # of the lease
MAX_WAIT = 5.0  # seconds for which one stays in quarantine while something else runs
PROBATION = 3.0  # seconds; a process that has settled nothing may be doomed for so long
# Seconds until the next try after what ran did not end in time: at first, and at most. If it never
# ends, claims rest for a twentieth of the time, and less and less.
RETRY_WAITS = (100.0, 3600.0)


class Quarantine:
    """Whether this worker is in quarantine. The claimer's thread only."""

    def __init__(self, *, alias: str, me: str, held: Held, settled: Callable[[], int]) -> None:
        """``settled`` returns how many events this worker has settled."""
        self._settled = settled
        self._leader = Leader(alias=alias, me=me, name=NAME, lease=held.lease)
        self._held, self._max_wait = held, min(held.lease, MAX_WAIT)
        # Not the same for all: what kills young processes would meet a suspect each time.
        self.proven_at = monotonic() + min(PROBATION, held.lease) * random.uniform(1.0, 1.6)
        self._since: float | None = None  # monotonic; since when one suspect is waited for
        self._not_before, self._pause = 0.0, RETRY_WAITS[0]  # the next try (monotonic); seconds

    @property
    def is_on(self) -> bool:
        return self._since is not None

    def enter(self) -> bool:
        """Enter it if this worker may, and no other is in it; return whether it did.

        A process that begins, and has settled nothing, must not count against a suspect.
        """
        now = monotonic()
        is_proven = self._settled() > 0 or now > self.proven_at
        if not is_proven or (len(self._held) and now < self._not_before):
            return False
        if self._leader.take():
            self._since = now
        return self.is_on

    def go_on(self) -> bool:
        """Go on with the next suspect; return False if another worker is in quarantine now."""
        self._since, self._pause = monotonic(), RETRY_WAITS[0]
        return self._leader.take()

    @property
    def lasts_too_long(self) -> bool:
        """Return whether what runs has not ended in time."""
        return self._since is not None and monotonic() - self._since > self._max_wait

    def give_up(self) -> None:
        """Leave it while something runs; later tries are less and less frequent."""
        self._not_before = monotonic() + self._pause
        self._pause = min(2 * self._pause, RETRY_WAITS[1])
        self.leave()

    def leave(self) -> None:
        """Let this worker claim again, and others enter."""
        self._since = None
        self._leader.close("")
