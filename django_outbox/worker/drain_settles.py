"""How ``drain()`` settles, and what it does not claim again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import inf

from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import Settings
from ..delivery.lease import Lease
from ..delivery.route import PAUSED
from ..listeners.outcomes import Decision
from ..sql import dialect_of
from ..sql.halving import answers
from .settle_log import Settled, log_refused, report_settled
from .settler import settle, split_by_kind

GATHER_COUNT = 20  # decisions after which they are settled
RETRY_DELAYS = (0.1, 0.5, 2.0)  # seconds before each further try of a settle


class DrainSettles:
    """Writes the decisions of a drain, in its thread."""

    def __init__(self, *, alias: str, me: str, settings: Settings, streams: list[str]) -> None:
        """``streams``: the names of those that are not claimed again."""
        self._alias, self._me, self._settings = alias, me, settings
        self.events: list[str] = []  # ids of those that are not claimed again
        self.away: set[str] = set()  # queues to leave alone: their broker is away
        self.horizon = inf  # seconds from the database's now to the drain's ``at``
        self._streams = streams
        self._total_delays: dict[str, float] = {}  # seconds, of each event so far
        self._accepts = False  # the database has accepted a decision
        self._refused = 0  # decisions that were refused while none had been accepted
        self._error: Exception | None = None  # by which

    def leave_delayed(self, lease: Lease, decision: Decision) -> None:
        """Leave an event alone if it is due at once, paused, or due beyond the horizon.

        After an outage, leave its whole queue: its events are due again before the run has ended.
        """
        if decision.unavailable:
            self.away.add(lease.queue)
        if decision.delay is None:
            return
        total = self._total_delays.get(lease.id, 0.0) + decision.delay
        self._total_delays[lease.id] = total
        if decision.delay == 0 or total > self.horizon or decision is PAUSED:
            self._leave([lease])

    def _leave(self, leases: Iterable[Lease]) -> None:
        for each in leases:
            (self.events if each.stream is None else self._streams).append(each.stream or each.id)

    def settle(self, connection: BaseDatabaseWrapper, decided: Settled) -> None:
        """Write decisions; retry after errors, so that the events need not run again.

        What the database refuses while it accepts others stays leased, and is left alone.
        """
        for part in split_by_kind(decided):
            pauses = iter(RETRY_DELAYS)
            while part:
                try:
                    self._write(connection, part)
                except Exception as error:
                    pause = next(pauses, None)
                    if pause is not None and not connection.in_atomic_block:
                        time.sleep(pause)
                        continue
                    # A few are left, in the hope that others are accepted.
                    self._error, self._refused = error, self._refused + len(part)
                    waits = dialect_of(connection).is_lock_wait(error)
                    if self._refused > GATHER_COUNT or waits or not answers(connection):
                        raise
                    self._refuse(part, error)
                    break

    def check(self) -> None:
        """Raise the last error if the database has accepted nothing."""
        if self._error is not None and not self._accepts:
            raise self._error

    def _write(self, connection: BaseDatabaseWrapper, part: Settled) -> None:
        """Write decisions of one kind and remove them from ``part``, but not those in doubt."""
        refused, problem = Settled(), None
        try:
            for each in settle(part, connection=connection, me=self._me, settings=self._settings):
                if each.is_written:
                    self._accepts = True
                    report_settled(each.rows, alias=self._alias)
                else:
                    refused, problem = refused + each.rows, each.error
            if problem is not None and not self._accepts:
                raise problem
        except Exception:
            part += refused
            raise
        if problem is not None:
            self._refuse(refused, problem)

    def _refuse(self, refused: Settled, error: Exception) -> None:
        log_refused(refused, error)
        self._leave(lease for lease, _ in refused)
