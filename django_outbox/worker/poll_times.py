"""When the claimer polls each queue again: when something falls due there, or after an interval."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from math import inf

from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..conf import Settings
from ..sql import dialect_of
from .intake import Intake
from .throttle import Throttle
from .wakeup import Wakeup

DUE_TIME_FACTOR = 10.0  # the query for the next due time pauses that many times as long as it takes


class PollTimes:
    """Plans the next poll of queues in which nothing more is due. The claimer's thread only."""

    def __init__(
        self, settings: Settings, *, intakes: Mapping[str, Intake], wakeup: Wakeup
    ) -> None:
        self._settings, self._intakes, self._wakeup = settings, intakes, wakeup
        self._due_times = Throttle(DUE_TIME_FACTOR)

    def plan(
        self, connection: BaseDatabaseWrapper, queues: Iterable[str], now: float, *, again: float
    ) -> float:
        """Set the next polls of ``queues``, ``again`` (monotonic) at the latest.

        That is when the next row falls due, or when a throttled query may run again. Return when
        (monotonic) the first row falls due, if the table was asked; otherwise inf.
        """
        soonest = inf
        intakes = [self._intakes[name] for name in queues]
        if (queried_at := monotonic()) >= self._due_times.until:
            soonest = self._read(connection, now)
            self._due_times.after(queried_at)
        else:
            again = min(again, self._due_times.until)
            for intake in intakes:
                if intake.due_at <= now:  # this poll has covered it
                    intake.due_at = inf
        for intake in intakes:
            intake.poll_at = min(intake.due_at, again)
        return soonest

    def _read(self, connection: BaseDatabaseWrapper, now: float) -> float:
        """Set when (monotonic) the next row of each queue falls due, or the next poll."""
        longest = self._settings.POLL_INTERVAL
        if not self._wakeup.doorbell_is_reliable:  # a poll takes the place of notifications
            longest = min(longest, self._settings.PROBE_INTERVAL)
        longest *= random.uniform(0.8, 1.2)
        due = dialect_of(connection).seconds_to_next_due(
            queues=[*self._intakes], since=monotonic() - now + 0.001
        )
        queried_at, soonest = monotonic(), inf
        for intake in self._intakes.values():
            pause = longest
            if (seconds := due.get(intake.name)) is not None:
                pause = min(pause, seconds + 0.001)
                soonest = min(soonest, now + pause)
            if self._settings.SKIP_RECENT:
                pause = min(pause, self._settings.SKIP_RECENT)  # until what was too young is old
            intake.due_at = queried_at + max(pause, 0.001)
        return soonest
