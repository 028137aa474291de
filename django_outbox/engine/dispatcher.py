"""Worker threads: each takes one lease, delivers it and passes the decision on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import copy_context

from ..delivery import Lease, deliver, faulty, is_async
from ..outcomes import Decision, Status
from .hygiene import Hygiene
from .pausing import Pausing
from .queues import Decisions, Held, Ready
from .sessions import Sessions
from .streams import Streams

logger = logging.getLogger("django_outbox")

# Seconds of its listeners' time that a thread may be ahead of the settler. A process that dies has
# that much repeated, or one event a thread; without it, all that a group commit had gathered.
RUN_AHEAD = 0.0005
LOOK_UP = 1.0  # seconds after which an idle thread looks whether it should end


class Dispatcher:
    """``WORKERS`` threads around the ready queue."""

    def __init__(
        self,
        *,
        alias: str,
        workers: int,
        held: Held,
        ready: Ready,
        decisions: Decisions,
        made_room: Callable[[], None],
        to_loop: Callable[[Lease], None],
        streams: Streams,
        pausing: Pausing,
        sessions: Sessions,
    ) -> None:
        self._alias, self._held, self._ready, self._decisions = alias, held, ready, decisions
        self._made_room, self._to_loop = made_room, to_loop
        self._streams, self._pausing, self._sessions = streams, pausing, sessions
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"outbox-{alias}-worker-{number}", daemon=True)
            for number in range(workers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let no thread start another event; harmless when repeated."""
        self._stopping.set()
        self._ready.wake(len(self._threads))

    def join(self, give_up: Callable[[], bool]) -> bool:
        """Wait for the listeners that run; return whether all came to their end."""
        for thread in self._threads:
            while thread.is_alive() and not give_up():
                thread.join(0.02)
        return not any(thread.is_alive() for thread in self._threads)

    def fault(self, longest: float) -> str | None:
        """Say which threads have ended though nobody told them to; a listener may take its time."""
        ended = [each.name for each in self._threads if each.ident and not each.is_alive()]
        return f"{', '.join(ended)} ended" if ended and not self._stopping.is_set() else None

    def _run(self) -> None:
        hygiene, ahead = Hygiene(self._held.lease, self._sessions), 0.0

        def between(lease: Lease) -> bool:
            hygiene.after(lease)
            return self._held.is_current(lease) and not self._stopping.is_set()

        follower: Lease | None = None  # of the stream whose event was delivered just now
        while not self._stopping.is_set():
            lease = follower or self._ready.take(LOOK_UP)
            follower = None
            self._made_room()
            if lease is None:
                continue
            if is_async(lease):
                self._to_loop(lease)
            elif self._may_start(lease):
                decision = self._deliver(lease, hygiene, between)
                follower = self._streams.next(lease, decision)
                self._decisions.put((lease, decision))
                if decision.status is not Status.DONE:
                    hygiene.close_half_made()
                hygiene.after(lease)
                ahead += 0.0 if decision.written else lease.duration
                if ahead > RUN_AHEAD:
                    self._held.wait_settled(lease, self._stopping.is_set)
                    ahead = 0.0
        hygiene.close()

    def _may_start(self, lease: Lease) -> bool:
        if not self._held.is_current(lease):
            self._held.wait_current(lease, self._stopping.is_set)
        return not self._stopping.is_set() and self._held.start(lease)

    def _deliver(
        self, lease: Lease, hygiene: Hygiene, between: Callable[[Lease], bool]
    ) -> Decision:
        try:
            hygiene.before()
            # In a context of its own, so that a language, a time zone or any other context variable
            # that a listener sets is gone afterwards.
            return copy_context().run(
                deliver, lease, alias=self._alias, between=between, pauses=self._pausing.pauses
            )
        except BaseException:  # whatever it is, it does not cost the thread
            logger.exception("delivery failed event_id=%s", lease.event_id)
            return faulty()
