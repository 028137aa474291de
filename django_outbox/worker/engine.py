"""``Engine``: the parts of one worker, connected, without the threads that drive them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..conf import Settings
from ..queue_settings import DEFAULT_QUEUE
from .claimer import Claimer
from .claims import Claims
from .connection_cleanup import BrokenSessions
from .gate import Gate
from .gates import Gates
from .heartbeat import Heartbeat
from .held import Held
from .housekeeper import Housekeeper
from .named_lease import ActiveLease
from .pauses import KnownPauses
from .purger import Purger
from .quarantine import Quarantine
from .queues import Decisions
from .releases import Releases
from .runs import Runs
from .settler import Settler
from .statistics import Statistics
from .stream_reads import StreamReads
from .wakeup import Wakeup
from .worker_row import WorkerRow


class Engine:
    """What a worker knows, and the loops that act on it; ``Worker`` gives each of them a thread.

    ``queues`` are those that it serves. It claims no more once it has settled ``max_events``.
    """

    def __init__(
        self,
        alias: str,
        me: str,
        settings: Settings,
        *,
        queues: Collection[str],
        purge: bool = True,
        max_events: int | None = None,
    ) -> None:
        self.alias, self.me, self.settings = alias, me, settings
        self.queues, self._max_events = queues, max_events
        self.held, self.decisions, self.wakeup = Held(settings.LEASE), Decisions(), Wakeup()
        self.sessions, self._known_pauses = BrokenSessions(), KnownPauses()
        self.gates = self._make_gates()
        self.runs = Runs(settings=settings, held=self.held, pools=self.gates, wakeup=self.wakeup)
        self.releases = Releases(
            alias=alias, me=me, held=self.held, runs=self.runs, wakeup=self.wakeup
        )
        statistics = Statistics(me)
        self.settler = Settler(
            settings=settings,
            decisions=self.decisions,
            wakeup=self.wakeup,
            gates=self.gates,
            releases=self.releases,
            statistics=statistics,
            sessions=self.sessions,
        )
        self.heartbeat = Heartbeat(
            releases=self.releases,
            row=WorkerRow(
                releases=self.releases, wakeup=self.wakeup, mode=settings.MODE, queues=queues
            ),
            statistics=statistics,
            gates=self.gates,
        )
        self.active: ActiveLease | None = None
        if settings.MODE == "single_node":
            self.active = ActiveLease(me=me, lease=settings.LEASE, poll=settings.POLL_INTERVAL)
        self.claimer = self._make_claimer()
        purger = Purger(me=me, lease=settings.LEASE, interval=settings.PURGE_INTERVAL)
        self.housekeeper = Housekeeper(
            purger=purger if purge else None,
            known_pauses=self._known_pauses,
            wakeup=self.wakeup,
            configured={*settings.queues},
            adopts=settings.MODE != "writer_only" and DEFAULT_QUEUE in queues,
        )

    @property
    def is_spent(self) -> bool:
        """Return whether it has settled ``max_events``."""
        return self._max_events is not None and self.settler.settled >= self._max_events

    def _make_gates(self) -> Gates:
        settings = self.settings
        gates = [
            Gate(
                queue,
                alias=self.alias,
                settings=settings,
                most_bytes=max(settings.PREFETCH_BYTES // len(self.queues), 1),
                held=self.held,
                known_pauses=self._known_pauses,
                wakeup=self.wakeup,
            )
            for name, queue in settings.queues.items()
            if name in self.queues
        ]
        return Gates(gates, decisions=self.decisions, wakeup=self.wakeup)

    def _make_claimer(self) -> Claimer:
        parts: dict[str, Any] = {
            "settings": self.settings,
            "releases": self.releases,
            "pools": self.gates,
            "decisions": self.decisions,
        }
        reads = StreamReads(known_pauses=self._known_pauses, gates=self.gates.by_queue, **parts)
        claims = Claims(reads=reads, gates=self.gates.by_queue, **parts)
        return Claimer(
            settings=self.settings,
            gates=self.gates,
            claims=claims,
            releases=self.releases,
            quarantine=Quarantine(
                gates=self.gates,
                claims=claims,
                releases=self.releases,
                wakeup=self.wakeup,
                settled=lambda: self.settler.settled,
            ),
            known_pauses=self._known_pauses,
            wakeup=self.wakeup,
            may_claim=self._may_claim,
        )

    def _may_claim(self) -> bool:
        return not self.is_spent and (self.active is None or self.active.leader.holds)
