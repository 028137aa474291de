"""``Engine``: the parts of one worker, connected, without the threads that drive them."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Collection

from ..conf import Settings
from ..queue_settings import DEFAULT_QUEUE
from .claimer import Claimer
from .claims import Claims
from .connection_cleanup import BrokenSessions
from .gate import Gate, Gates
from .heartbeat import Heartbeat, Statistics
from .held import Held
from .housekeeper import Housekeeper, Operations, Purger
from .leases import ActiveLease, Releases
from .pauses import KnownPauses
from .polling import Wakeup
from .runs import Runs
from .settler import Settler


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
        self.held, self.wakeup = Held(settings.LEASE), Wakeup()
        self.sessions, self._known_pauses = BrokenSessions(), KnownPauses()
        self.gates = self._make_gates()
        self.runs = Runs(
            me=me, settings=settings, held=self.held, pools=self.gates, wakeup=self.wakeup
        )
        self.releases = Releases(alias=alias, runs=self.runs)
        gates, releases, statistics = self.gates, self.releases, Statistics(me)
        self.settler = Settler(
            gates=gates, releases=releases, statistics=statistics, sessions=self.sessions
        )
        self.heartbeat = Heartbeat(releases=releases, statistics=statistics, gates=gates)
        self.active: ActiveLease | None = None
        if settings.MODE == "single_node":
            self.active = ActiveLease(me=me, lease=settings.LEASE, poll=settings.POLL_INTERVAL)
        self.claimer = self._make_claimer()
        operations = Operations(
            me=me, lease=settings.LEASE, known_pauses=self._known_pauses, wakeup=self.wakeup
        )
        purger = Purger(me=me, lease=settings.LEASE, interval=settings.PURGE_INTERVAL)
        self.housekeeper = Housekeeper(
            chores=[operations, purger] if purge else [operations],
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
        return Gates(gates, wakeup=self.wakeup)

    def _make_claimer(self) -> Claimer:
        gates, releases = self.gates, self.releases
        claims = Claims(releases=releases, known_pauses=self._known_pauses, gates=gates.by_queue)
        return Claimer(
            gates=gates,
            claims=claims,
            releases=releases,
            settled=lambda: self.settler.settled,
            may_claim=self._may_claim,
        )

    def _may_claim(self) -> bool:
        return not self.is_spent and (self.active is None or self.active.leader.holds)


def served(queues: Collection[str] | None, settings: Settings) -> frozenset[str]:
    """Return the queues to serve; None: all. Raises ``ValueError`` for an unknown one, or none."""
    known = settings.queues
    if queues is None:
        return frozenset(known)
    unknown = [each for each in queues if each not in known]
    if unknown or not queues or isinstance(queues, str):
        raise ValueError(
            f"The queues to serve are {queues!r}; expected some of {', '.join(known)}, which are "
            'those in OUTBOX["QUEUES"].'
        )
    return frozenset(queues)


def new_owner() -> str:
    """Return a name that no other process start has: it is the fence of every settle."""
    return f"{socket.gethostname()[:80]}-{os.getpid()}-{secrets.token_hex(6)}"
