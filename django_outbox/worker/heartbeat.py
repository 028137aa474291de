"""The heartbeat: renews a worker's leases and its row; at a stop it gives the leases back."""

from __future__ import annotations

import logging
from typing import Any

from .. import doorbell
from ..clocks import monotonic
from ..sql.values import EVENTS, STREAMS
from .effects import Steps, Wait, in_turn, single
from .gates import Gates
from .releases import AT_ONCE, LOCKED_RETRY_TIME, Releases
from .statistics import WRITE_INTERVAL, Statistics
from .worker_row import WorkerRow

logger = logging.getLogger("django_outbox")

COUNT_INTERVAL = 1.0  # seconds between two counts of workers, while a queue has a rate


def renew(releases: Releases) -> Steps[float]:
    """Renew leases older than a third of their length; return the seconds until the next step.

    A step comes every sixth of that length, so that a new lease never gets near its deadline.
    """
    started, held = monotonic(), releases.held
    runs = held.to_renew(started)
    parts = [runs[at : at + AT_ONCE] for at in range(0, len(runs), AT_ONCE)]
    yield from in_turn(*map(releases.renew, parts))
    return max(held.lease / 6 - (monotonic() - started), 0.001)


class Heartbeat:
    """Renews leases, shows that the worker is alive, and writes its statistics.

    It gives leases back once the worker stops, because its thread exists already: no thread can be
    started at the interpreter's exit. A database that does not answer must not block who stops it.
    """

    def __init__(
        self, *, releases: Releases, row: WorkerRow, statistics: Statistics, gates: Gates
    ) -> None:
        self._releases, self._held, self._gates = releases, releases.held, gates
        self._row, self._statistics = row, statistics
        self._limited = [each for each in gates if each.rate is not None]
        self._show_at = self._count_at = 0.0  # monotonic
        self._stopping = False  # set by ``begin_stop``
        self._due_after: float | None = None  # set by ``hand_back_in``
        self.released, self.handed_back = 0, 0  # so far; only its thread changes them

    def step(self) -> Steps[float]:
        started = monotonic()
        yield from in_turn(
            renew(self._releases),
            self._show(started),
            self._statistics.write_if_due(),
            self._release(),
        )
        count = COUNT_INTERVAL if self._limited else WRITE_INTERVAL
        pause = min(self._held.lease / 6, WRITE_INTERVAL, count)
        return max(pause - (monotonic() - started), 0.001)

    def begin_stop(self) -> None:
        """Release unstarted events at each step from now on. Any thread may call it."""
        self._row.note_stop()
        self._show_at, self._stopping = 0.0, True

    def hand_back_in(self, seconds: float | None) -> None:
        """Have ``close`` make due in so many seconds what still runs; None: when its lease ends."""
        self._due_after = seconds

    def close(self) -> Steps[None]:
        """Write the last statistics, remove the worker's row, give back what is left."""
        yield from in_turn(
            self._statistics.write(), single(self._row.remove), self._release(), self._hand_back()
        )

    # -- the worker's row ------------------------------------------------------------------------

    def _show(self, now: float) -> Steps[None]:
        """Show that the worker is alive, and adapt to the others.

        Streams are released for workers that have fewer; those that none claims come back.
        """
        if now >= self._show_at:
            yield self._row.update
            self._show_at = now + self._held.lease / 3
            others = yield from self._share_rates()
            self._gates.follow_others(len(others))
            self._releases.runs.leave_surplus([each["streams"] for each in others])
            yield from self._releases.release_ended()
        elif self._limited and now >= self._count_at:
            yield from self._share_rates()

    def _share_rates(self) -> Steps[list[dict[str, Any]]]:
        """Divide the rates of queues by the live workers that serve them; return the others."""
        others: list[dict[str, Any]] = yield self._row.others
        self._count_at = monotonic() + COUNT_INTERVAL
        for gate in self._limited:
            assert gate.rate is not None
            gate.rate.set_workers(1 + sum(gate.name in each["queues"] for each in others))
        return others

    # -- a stop ----------------------------------------------------------------------------------

    def _release(self) -> Steps[None]:
        """During a stop, release what has not started."""
        if not self._stopping:
            return
        rows, _ = yield from self._releases.give_back(self._held.of(EVENTS))
        count = len(rows) + (yield from self._releases.release_streams())
        self.released += count
        if count:
            yield doorbell.ring

    def _hand_back(self) -> Steps[None]:
        running = self._held.running()
        for lease in running:
            logger.warning(
                "listener still runs, event handed back "
                "event_id=%s event_type=%s listener=%r seconds=%.1f",
                *lease.named,
                monotonic() - lease.started_at,
            )
        self.handed_back = len(running)
        wanted = len(self._held.of(EVENTS)) + len(self._held.of(STREAMS))
        until = monotonic() + LOCKED_RETRY_TIME
        while wanted > 0:
            wanted -= yield from self._releases.hand_back(self._due_after)
            if monotonic() > until:
                break
            yield Wait(0.01 if wanted > 0 else 0)
        self._held.drop(running)
