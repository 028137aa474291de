"""Workers as threads: each has a circuit breaker, a cache of pauses and a connection of its own.

They share what real workers share, the table of pauses, and do with it what a claimer does. Many
of them fit into one process, where many real ones would not fit on one machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from django.db import connections

from django_outbox.clocks import monotonic
from django_outbox.delivery.lease import Lease
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import DONE, Decision, Status
from django_outbox.queue_settings import BreakerSettings
from django_outbox.worker.breaker import Breaker
from django_outbox.worker.pauses import KnownPauses
from django_outbox.worker.queues import Held
from django_outbox.worker.threads import Loop
from django_outbox.worker.wakeup import Wakeup
from tests.faults import clock
from tests.waiting import wait_until

COUNT = 50  # workers
FAILURES = 5  # in a row, that open the breaker
CALL = 0.2  # seconds between two calls of a worker
LOST = 0.25  # share of the probes whose worker is lost with them
EARLY = 0.02  # seconds by which clocks and their rounding may differ

FAILED = Decision(status=Status.RETRY, delay=1.0, spent=1, kind="ConnectionError")


@dataclass(frozen=True, kw_only=True)
class Call:
    worker: int
    start: float  # monotonic
    end: float
    failed: bool
    probe: bool
    lost: bool = False  # its worker said nothing of it
    since: float = 0.0  # monotonic; shortly before a probe was won


class Partner:
    """Somebody who is called, and who may be away. Any thread may call its methods."""

    def __init__(self) -> None:
        self.calls: list[Call] = []  # append is atomic
        self.is_away = False
        self.came_at = 0.0  # monotonic

    def go(self) -> None:
        self.is_away = True

    def come(self) -> None:
        self.came_at, self.is_away = clock.now(), False

    def call(
        self, worker: int, seconds: float = 0.0, *, since: float = 0.0, lost: bool = False
    ) -> bool:
        """Take that long; return whether it went well. A probe was won after ``since``."""
        start, failed = clock.now(), self.is_away
        time.sleep(seconds)  # the call's own time
        self.calls.append(
            Call(
                worker=worker,
                start=start,
                end=clock.now(),
                failed=failed,
                probe=since > 0,
                lost=lost,
                since=since,
            )
        )
        return not failed


class SimulatedWorker:
    """Calls the partner while its queue is open, and probes while it is not."""

    def __init__(self, number: int, simulation: Simulation) -> None:
        self._number, self._simulation = number, simulation
        self._luck = random.Random(f"{simulation.seed}-{number}")
        self.loop = Loop(f"simulated-{number}", self.step, alias="default", lock_wait=1.0)
        self._begin()

    def _begin(self) -> None:
        """Know nothing, as a process that has just started."""
        simulation = self._simulation
        self._known = KnownPauses()
        self._breaker = Breaker(
            simulation.queue,
            simulation.settings,
            alias="default",
            wakeup=Wakeup(),
            held=Held(simulation.lease),
        )

    def step(self) -> float:
        """Do once what a claimer does about breakers; return the seconds to wait."""
        connection, queue = connections["default"], self._simulation.queue
        breaker, known = self._breaker, self._known
        known.refresh(connection)
        if breaker.write(connection):
            known.read(connection)
            if breaker.is_tripped and queue in known.closed:
                breaker.settle_trip()
        if not breaker.is_tripped and queue not in known.closed:
            self._record(self._simulation.partner.call(self._number))
        at, pause = known.breakers.get(queue, (inf, 0.0))
        if at <= monotonic():
            since = clock.now()
            if breaker.begin_probe(connection, pause):
                self._probe(since)
            known.read(connection)
        return CALL * self._luck.uniform(0.5, 1.5)

    def _record(self, went_well: bool) -> None:
        self._breaker.record(next(iter(registry.listeners())), DONE if went_well else FAILED)

    def _probe(self, since: float) -> None:
        """Deliver one event; now and then be lost with it, and begin anew."""
        assert self._breaker.is_probe(an_event())
        assert not self._breaker.is_probe(an_event()), "two events for one probe"
        partner, seconds = self._simulation.partner, self._simulation.lease / 8
        lost = partner.is_away and self._luck.random() < LOST
        went_well = partner.call(self._number, seconds, since=since, lost=lost)
        if lost:
            self._begin()
        else:
            self._record(went_well)


def an_event() -> Lease:
    return Lease(
        row=(),
        positions={},
        event_id="simulated",
        event_type="simulated",
        aggregate_type="",
        owner="",
        rescued=False,
        rescues=0,
        progress=None,
        deadline=inf,
    )


class Simulation:
    """The workers, their partner, and what can be said of them in the end."""

    queue, count, failures = "simulated", COUNT, FAILURES

    def __init__(self, *, lease: float, pause: float, seed: int) -> None:
        self.lease, self.pause, self.seed = lease, pause, seed
        self.settings = BreakerSettings(failures=FAILURES, within=60.0, pause=pause)
        self.partner = Partner()
        self._workers = [SimulatedWorker(number, self) for number in range(COUNT)]

    def __enter__(self) -> Simulation:
        for each in self._workers:
            each.loop.start()
        return self

    def __exit__(self, *raised: object) -> None:
        for each in self._workers:
            each.loop.stop()
        for each in self._workers:
            each.loop.join(30)

    def wait_until_closed(self, within: float) -> None:
        """Wait until every worker has called again since the partner came back."""
        with suppress(AssertionError):
            wait_until(lambda: not self.silent(), within=within)

    @property
    def _again(self) -> dict[int, float]:
        """When each worker's first call since the partner came back ended, by its number."""
        found: dict[int, float] = {}
        for each in [*self.partner.calls]:
            if each.start >= self.partner.came_at and not each.probe:
                found[each.worker] = min(each.end, found.get(each.worker, inf))
        return found

    def silent(self) -> int:
        """Return how many workers have not called again."""
        return COUNT - len(self._again)

    def recovery(self) -> float:
        """Return the seconds from the partner's return until the last worker called again."""
        return max(self._again.values(), default=inf) - self.partner.came_at

    def failed_calls(self) -> int:
        return sum(each.failed for each in self.partner.calls)

    def failed_probes(self) -> int:
        return sum(each.failed and each.probe for each in self.partner.calls)

    def longest(self, pause: float) -> float:
        """Return the seconds until the next probe at the partner's return, at most.

        ``pause`` was the breaker's then. A probe that was under way may double it, or be lost.
        """
        under_way = [
            each
            for each in self.partner.calls
            if each.probe
            and each.failed
            and each.since <= self.partner.came_at <= each.since + self.lease
        ]
        failed = any(not each.lost for each in under_way)
        lost = any(each.lost for each in under_way)
        return max(2 * pause if failed else pause, self.lease if lost else 0.0)

    def early_probes(self) -> int:
        probes = sorted(
            (each for each in self.partner.calls if each.probe), key=lambda each: each.start
        )
        return len(early(probes, lease=self.lease, pause=self.pause))


def early(probes: Sequence[Call], *, lease: float, pause: float) -> list[Call]:
    """Return the probes that began beside the one before, or before the pause after it was over.

    One that is lost with its worker, or takes too long, keeps the others away for a lease.
    """
    return [
        after
        for before, after in pairwise(probes)
        if after.start
        < (
            before.since + lease
            if before.lost or before.end > before.since + lease / 2
            else before.end + pause
        )
        - EARLY
    ]
