"""The heartbeat: renews a worker's leases, and the row that shows that it is alive."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from django.db import connections

from ..clocks import monotonic
from ..sql.halving import in_turn
from .effects import perform
from .gates import Gates
from .held import Held
from .releases import AT_ONCE, Releases
from .runs import Runs
from .statistics import WRITE_INTERVAL, Statistics
from .worker_registry import OtherWorker, WorkerRow

logger = logging.getLogger("django_outbox")

COUNT_INTERVAL = 1.0  # seconds between two counts of workers, while a queue has a rate


class Heartbeat:
    """Renews leases older than a third of their length, on a connection of its own.

    It makes a step every sixth of that length, so that a new lease never gets near its deadline.
    """

    def __init__(
        self,
        *,
        alias: str,
        me: str,
        held: Held,
        worker_row: WorkerRow | None,
        runs: Runs,
        releases: Releases,
        statistics: Statistics | None = None,
        gates: Gates | None = None,
    ) -> None:
        self._alias, self._me, self._held, self._worker_row = alias, me, held, worker_row
        self._runs, self._releases = runs, releases
        self._statistics, self._gates = statistics, gates
        self._limited = [each for each in gates or () if each.rate is not None]
        self._update_row_at = self._count_at = 0.0  # monotonic

    def step(self) -> float:
        started, connection = monotonic(), connections[self._alias]
        runs = self._held.to_renew(started)
        steps: list[Callable[[], object]] = [
            partial(perform, connection, self._releases.renew(runs[start : start + AT_ONCE]))
            for start in range(0, len(runs), AT_ONCE)
        ]
        if self._worker_row is not None:
            steps.append(partial(self._show, self._worker_row, started))
        if self._statistics is not None:
            steps.append(self._statistics.write_if_due)
        in_turn(connection, *steps)
        pause = min(self._held.lease / 6, WRITE_INTERVAL)
        if self._limited:
            pause = min(pause, COUNT_INTERVAL)
        return max(pause - (monotonic() - started), 0.001)

    def _show(self, worker_row: WorkerRow, now: float) -> None:
        """Show that the worker is alive, and adapt to the others."""
        if now >= self._update_row_at:
            worker_row.update()
            self._update_row_at = now + self._held.lease / 3
            self._follow_others(worker_row)
        elif self._limited and now >= self._count_at:
            self._share_rates(worker_row.others())

    def note_stop(self) -> None:
        """Show in the worker's row, from the next step on, that the worker is stopping."""
        if self._worker_row is not None:
            self._worker_row.note_stop()
            self._update_row_at = 0.0

    def close(self) -> None:
        """Write the last statistics, remove the worker's row. Call it in the thread of ``step``."""
        if self._statistics is not None:
            self._statistics.write()
        if self._worker_row is not None:
            try:
                self._worker_row.delete()
            except Exception as error:  # noqa: BLE001 - the leases are to be given back
                logger.warning("the worker's row could not be removed error=%s", error)

    def _follow_others(self, worker_row: WorkerRow) -> None:
        """Release streams for workers that have fewer; those that none claims come back."""
        others = worker_row.others()
        self._share_rates(others)
        streams = [each.streams for each in others if each.streams is not None]
        if self._gates is not None:
            self._gates.follow_others(len(streams))
        self._runs.leave_surplus(streams)
        perform(connections[self._alias], self._releases.release_ended())

    def _share_rates(self, others: list[OtherWorker]) -> None:
        """Divide the rates of queues by the live workers that serve them."""
        self._count_at = monotonic() + COUNT_INTERVAL
        for gate in self._limited:
            assert gate.rate is not None
            gate.rate.set_workers(1 + sum(each.serves(gate.name) for each in others))
