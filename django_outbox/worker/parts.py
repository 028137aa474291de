"""Creates and connects the parts of one worker; ``Worker`` starts and stops them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connections

from .. import doorbell
from ..conf import Settings
from ..sql.halving import in_turn
from .claimer import Claimer
from .claims import Claims
from .connection_cleanup import BrokenSessions
from .deliveries import Deliveries
from .doorbell_listener import DoorbellListener
from .effects import perform
from .event_loop import AsyncDeliveries, EventLoop
from .executor import Executor
from .gate import Gate
from .gates import Gates
from .health import StartedPart
from .held import Held
from .housekeeper import Housekeeper
from .leader_lease import ActiveLease
from .leases import Heartbeat
from .pauses import KnownPauses
from .purger import Purger
from .quarantine import Quarantine
from .queues import Decisions
from .releases import Releases
from .runs import Runs
from .settler import Settler
from .statistics import Statistics
from .stopping import LeaseReturner
from .stream_reads import StreamReads
from .threads import Loop
from .wakeup import Wakeup
from .worker_registry import WorkerRow

WATCH_INTERVAL = 0.25  # seconds between two looks for calls that exceed their timeouts


class Parts:
    """The parts of a worker, each with the threads that it needs; none is started here."""

    def __init__(
        self,
        alias: str,
        me: str,
        settings: Settings,
        *,
        queues: frozenset[str],
        purge: bool,
        max_events: int | None,
    ) -> None:
        self.alias, self.id, self.settings, self.queues = alias, me, settings, queues
        self._purge, self._max_events = purge, max_events
        self._assemble()

    def _assemble(self) -> None:
        settings, alias = self.settings, self.alias
        self._wakeup = Wakeup()
        self._held, self._decisions = Held(settings.LEASE), Decisions()
        known_pauses = KnownPauses()
        self._gates = gates = self._make_gates(known_pauses)
        self._sessions = BrokenSessions()
        parts: dict[str, Any] = {"alias": alias, "held": self._held, "gates": gates}
        self._runs = Runs(settings=settings, held=self._held, pools=gates, wakeup=self._wakeup)
        self._releases = Releases(
            alias=alias, me=self.id, held=self._held, runs=self._runs, wakeup=self._wakeup
        )
        if (active := self._single_node()) is not None:
            self._active_loop = self._loop("active", active.step, close=active.release)
        self._active = active
        self._give_queues_threads()
        self._claimer = self._make_claimer(known_pauses)
        statistics = Statistics(alias=alias, me=self.id)
        self._settler = Settler(
            me=self.id,
            settings=settings,
            decisions=self._decisions,
            wakeup=self._wakeup,
            runs=self._runs,
            releases=self._releases,
            statistics=statistics,
            sessions=self._sessions,
            **parts,
        )
        heartbeat = Heartbeat(
            me=self.id,
            worker_row=self._worker_row(),
            runs=self._runs,
            releases=self._releases,
            statistics=statistics,
            **parts,
        )
        self._give_threads(heartbeat, known_pauses)

    def _make_claimer(self, known_pauses: KnownPauses) -> Claimer:
        gates, releases = self._gates, self._releases
        parts: dict[str, Any] = {
            "settings": self.settings,
            "releases": releases,
            "pools": gates,
            "decisions": self._decisions,
        }
        reads = StreamReads(known_pauses=known_pauses, gates=gates.by_queue, **parts)
        claims = Claims(reads=reads, gates=gates.by_queue, **parts)
        return Claimer(
            settings=self.settings,
            gates=gates,
            claims=claims,
            releases=releases,
            quarantine=Quarantine(
                gates=gates,
                claims=claims,
                releases=releases,
                wakeup=self._wakeup,
                settled=lambda: self._settler.settled,
            ),
            known_pauses=known_pauses,
            wakeup=self._wakeup,
            may_claim=self._may_claim,
        )

    def _make_gates(self, known_pauses: KnownPauses) -> Gates:
        settings = self.settings
        gates = [
            Gate(
                queue,
                alias=self.alias,
                settings=settings,
                most_bytes=max(settings.PREFETCH_BYTES // len(self.queues), 1),
                held=self._held,
                known_pauses=known_pauses,
                wakeup=self._wakeup,
            )
            for name, queue in settings.queues.items()
            if name in self.queues
        ]
        return Gates(gates, decisions=self._decisions, wakeup=self._wakeup)

    def _give_queues_threads(self) -> None:
        """Create the threads of each queue, and the event loop."""
        stuck_after = self.settings.STUCK_AFTER
        self._event_loop = loop = EventLoop(
            alias=self.alias, stuck_after=stuck_after, held=self._held
        )
        self._executors: list[Executor] = []
        for gate in self._gates:
            deliveries = Deliveries(
                alias=self.alias, queue=gate, settles=self._gates, held=self._held, runs=self._runs
            )
            on_loop = AsyncDeliveries(loop=loop, gate=gate, deliveries=deliveries)
            self._executors.append(
                Executor(
                    gate=gate,
                    deliveries=deliveries,
                    stuck_after=stuck_after,
                    sessions=self._sessions,
                    to_loop=on_loop.put,
                )
            )

    def _single_node(self) -> ActiveLease | None:
        settings = self.settings
        if settings.MODE != "single_node":
            return None
        return ActiveLease(
            alias=self.alias, me=self.id, lease=settings.LEASE, poll=settings.POLL_INTERVAL
        )

    def _worker_row(self) -> WorkerRow:
        return WorkerRow(
            alias=self.alias,
            me=self.id,
            held=self._held,
            runs=self._runs,
            mode=self.settings.MODE,
            wakeup=self._wakeup,
            queues=self.queues,
        )

    def _give_threads(self, heartbeat: Heartbeat, known_pauses: KnownPauses) -> None:
        settings = self.settings
        self._watchdog = self._loop("watchdog", self._watch)
        self._settler_loop = self._loop("settler", self._settler.step)
        self._lease_returner = LeaseReturner(
            heartbeat, alias=self.alias, held=self._held, releases=self._releases
        )
        self._heartbeat_loop = self._loop(
            "heartbeat", self._lease_returner.step, close=self._lease_returner.close
        )
        self._claimer_loop = self._loop("claimer", self._claim, close=self._claimer.close)
        self._wakeup.wake = self._claimer_loop.wake
        self._housekeeper = self._make_housekeeper(known_pauses)
        self._housekeeper_loop = self._loop(
            "housekeeper", self._housekeeper.step, close=self._housekeeper.close
        )
        self._doorbell_loop: Loop | None = None
        if (ear := doorbell.ear(self.alias)) is not None:
            listener = DoorbellListener(
                ear, interval=settings.DOORBELL_INTERVAL, wakeup=self._wakeup
            )
            self._doorbell_loop = self._loop("doorbell", listener.step, close=listener.close)

    def _make_housekeeper(self, known_pauses: KnownPauses) -> Housekeeper:
        settings = self.settings
        interval = settings.PURGE_INTERVAL if self._purge else None
        delivers = settings.MODE != "writer_only"
        return Housekeeper(
            alias=self.alias,
            purger=Purger(alias=self.alias, me=self.id, lease=settings.LEASE, interval=interval),
            known_pauses=known_pauses,
            wakeup=self._wakeup,
            queues=self.queues if delivers else (),
            configured={*settings.queues},
        )

    def _claim(self) -> float:
        return perform(connections[self.alias], self._claimer.step())

    def _watch(self) -> float:
        """Look for calls that exceed their timeouts; return the seconds to wait."""
        in_turn(connections[self.alias], *(each.watch for each in self._delivering))
        return WATCH_INTERVAL

    @property
    def _delivering(self) -> list[Executor | EventLoop]:
        """What calls listeners: the threads of each queue, then the event loop."""
        return [*self._executors, self._event_loop]

    def _loop(
        self, name: str, step: Callable[[], float], close: Callable[[], None] = lambda: None
    ) -> Loop:
        return Loop(
            f"outbox-{self.alias}-{name}",
            step,
            alias=self.alias,
            lock_wait=self.settings.LOCK_WAIT,
            close=close,
            on_database_error=self._sessions.report_broken,
        )

    def _threaded_parts(self) -> list[StartedPart]:
        """Return the parts with threads in start order: each after the parts that it feeds."""
        if self.settings.MODE == "writer_only":
            return []
        parts: list[StartedPart] = [
            self._watchdog,
            *self._executors,
            self._settler_loop,
            self._heartbeat_loop,
        ]
        if self._active is not None:
            parts.append(self._active_loop)
        parts.append(self._claimer_loop)
        if self._doorbell_loop is not None:
            parts.append(self._doorbell_loop)
        return parts

    @property
    def is_spent(self) -> bool:
        """Return whether it has delivered ``max_events`` and should be replaced."""
        return self._max_events is not None and self._settler.settled >= self._max_events

    def _may_claim(self) -> bool:
        return not self.is_spent and (self._active is None or self._active())

    def poll(self) -> None:
        """Have the claimer poll the table now."""
        self._wakeup.poll()
