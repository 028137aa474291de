"""``Worker``: assembles the machines of one alias, starts them in order and stops them in order."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from .. import dialects, doorbell, hooks
from ..conf import current
from ..models import OutboxEvent
from ..signals import announce, worker_started, worker_stopped
from .active import Active
from .claimer import Claimer
from .dispatcher import Dispatcher
from .event_loop import EventLoop
from .health import Health
from .heartbeat import Heartbeat
from .listening import Listening
from .loops import Loop
from .pausing import Pausing
from .presence import Presence
from .purger import Purger
from .queues import Decisions, Held, Offers, Ready
from .sessions import Sessions
from .settler import Settler
from .statistics import Statistics
from .streams import Streams

logger = logging.getLogger("django_outbox")


PATIENCE = 1.0  # seconds that one part gets to end, beyond the drain
LATE = 3  # poll intervals after which a machine that is still at one step is in trouble
HANGS = (10, 120.0)  # leases, and seconds at least, after which only a new process helps


class Machine(Protocol):
    def start(self) -> None:
        """Start the threads."""

    def fault(self, longest: float) -> str | None:
        """Say why only a new process helps; no step should last more than ``longest`` seconds."""


class Worker:
    """Delivers the events of one database alias from threads of this process.

    Use it as a context manager, or ``start()`` and ``stop()``; both may be repeated. A stopped
    worker is not started again: make a new one. Keyword arguments stand for the settings of the
    same name, for this worker alone.

    Raises ``ImproperlyConfigured`` for an in-memory SQLite database, which no thread can reach, and
    ``RuntimeError`` if this process already has a worker for the alias.
    """

    def __init__(
        self,
        *,
        using: str | None = None,
        workers: int | None = None,
        poll_interval: float | None = None,
        drain_timeout: float | None = None,
        purge: bool = True,
        max_events: int | None = None,
    ) -> None:
        self.alias = using or router.db_for_write(OutboxEvent)
        given: dict[str, Any] = {
            "WORKERS": workers,
            "POLL_INTERVAL": poll_interval,
            "DRAIN_TIMEOUT": drain_timeout,
        }
        self.settings = replace(
            current(), **{name: value for name, value in given.items() if value is not None}
        )
        self.id = new_owner()
        self._purge, self._max_events = purge, max_events
        self._state, self._pid = "new", 0
        self._turn = threading.RLock()  # one start or stop at a time
        self._released = 0  # leases given back unstarted; owner: the settler's thread
        self._assemble()

    def _assemble(self) -> None:
        settings, alias = self.settings, self.alias
        self._held = Held(settings.LEASE)
        self._ready, self._decisions, pausing = Ready(), Decisions(), Pausing()
        self._offers = Offers(settings.HOT_QUEUE_CAPACITY, wake=self._wake, look=self.look)
        self._sessions = Sessions()
        parts: dict[str, Any] = {"alias": alias, "held": self._held}
        self._streams = Streams(
            me=self.id, settings=settings, ready=self._ready, expect=self._expect, **parts
        )
        self._active: Active | None = None
        if settings.MODE == "single_node":
            self._active = Active(
                alias=alias, me=self.id, lease=settings.LEASE, poll=settings.POLL_INTERVAL
            )
            self._holding = self._loop("active", self._active.step, close=self._active.release)
        self._claimer = Claimer(
            me=self.id, settings=settings, offers=self._offers, ready=self._ready,
            decisions=self._decisions, may_claim=self._active or (lambda: True),
            settled=lambda: self._settler.settled, streams=self._streams, pausing=pausing, **parts,
        )  # fmt: skip
        self._event_loop = EventLoop(
            slots=settings.ASYNC_CONCURRENCY, decisions=self._decisions, pausing=pausing, **parts
        )
        self._dispatcher = Dispatcher(
            workers=settings.WORKERS, ready=self._ready, decisions=self._decisions,
            made_room=self._made_room, to_loop=self._event_loop.put,
            streams=self._streams, pausing=pausing, sessions=self._sessions, **parts,
        )  # fmt: skip
        statistics = Statistics(alias=alias, me=self.id)
        self._settler = Settler(
            me=self.id, settings=settings, decisions=self._decisions, made_room=self._made_room,
            expect=self._expect, backlog=self._ready.__len__, streams=self._streams,
            statistics=statistics, **parts,
        )  # fmt: skip
        presence = Presence(me=self.id, mode=settings.MODE, streams=self._streams, **parts)
        heartbeat = Heartbeat(
            me=self.id, presence=presence, streams=self._streams, statistics=statistics,
            pace=self._claimer.pace, **parts,
        )  # fmt: skip
        self._give_threads(heartbeat, statistics)

    def _give_threads(self, heartbeat: Heartbeat, statistics: Statistics) -> None:
        settings = self.settings
        self._settling = self._loop("settler", self._settler.step, close=self._release_unstarted)
        self._beating = self._loop("heartbeat", heartbeat.step, close=heartbeat.close)
        self._claiming = self._loop("claimer", self._claimer.step)
        interval = settings.PURGE_INTERVAL if self._purge else None
        self._purger = Purger(alias=self.alias, interval=interval, statistics=statistics)
        self._purging = self._loop("purger", self._purger.step)
        self._hearing: Loop | None = None
        if (ear := doorbell.ear(self.alias)) is not None:
            listening = Listening(
                ear, interval=settings.DOORBELL_INTERVAL, look=self.look,
                look_again=self._claimer.news.look_again, tell=self._hears,
            )  # fmt: skip
            self._hearing = self._loop("doorbell", listening.step, close=listening.close)

    def _loop(
        self, name: str, step: Callable[[], float], close: Callable[[], None] = lambda: None
    ) -> Loop:
        return Loop(
            f"outbox-{self.alias}-{name}", step, alias=self.alias,
            lock_wait=self.settings.LOCK_WAIT, close=close, broke=self._sessions.broke,
        )  # fmt: skip

    # -- start and stop --------------------------------------------------------------------------

    def start(self) -> None:
        """Start all threads and return; harmless if they run, ``RuntimeError`` once stopped."""
        with self._turn:
            self._start()

    def _start(self) -> None:
        if self._state == "running":
            return
        if self._state == "stopped":
            raise RuntimeError("This worker was stopped. Make a new Worker and start that one.")
        if dialects.is_in_memory(connections[self.alias]):
            raise ImproperlyConfigured(
                f"The database {self.alias!r} is in memory, where no worker thread can reach it. "
                "Use a file, or deliver with drain() in this thread."
            )
        if hooks.slot.queues.setdefault(self.alias, self._offers) is not self._offers:
            raise RuntimeError(f"This process already has a worker for {self.alias!r}.")
        self._state, self._pid = "running", os.getpid()
        try:
            for part in self._machines():
                part.start()
            self._purging.start()
        except BaseException:
            self.stop(timeout=0)
            raise
        logger.info("worker started id=%s alias=%s", self.id, self.alias)
        announce(worker_started, sender=self.alias, worker_id=self.id, worker=self)

    def _machines(self) -> list[Machine]:
        """In the order of their start: whatever feeds another comes after it."""
        if self.settings.MODE == "writer_only":
            return []
        machines: list[Machine] = [
            self._event_loop, self._dispatcher, self._settling, self._beating,
        ]  # fmt: skip
        if self._active is not None:
            machines.append(self._holding)
        machines.append(self._claiming)
        if self._hearing is not None:
            machines.append(self._hearing)
        return machines

    def depths(self) -> dict[str, int]:
        """Return how many events are ``hot`` (offered), ``cold`` (wait for a thread) and ``held``.

        Those held are all that this worker has claimed and not settled, the cold among them.
        """
        cold = len(self._ready) + self._streams.followers
        return {"hot": len(self._offers), "cold": cold, "held": len(self._held)}

    @property
    def is_spent(self) -> bool:
        """Say whether it has delivered ``max_events``, and should make way for a fresh one."""
        return self._max_events is not None and self._settler.settled >= self._max_events

    def health(self) -> Health:
        """Say how the threads are, by what they show; the database is not asked."""
        if self._state != "running":
            is_new = self._state == "new"
            return Health(unready=("starting" if is_new else "draining",)).of(self.alias)
        settings = self.settings
        hangs = max(HANGS[0] * settings.LEASE, HANGS[1])
        late = LATE * settings.POLL_INTERVAL + 2 * settings.LOCK_WAIT
        machines = [*self._machines(), self._purging]
        asking = [self._claiming, self._beating, self._settling]
        if self._active is not None:
            asking.append(self._holding)
        if settings.MODE == "writer_only":
            asking = []
        return Health(
            dead=tuple(filter(None, (each.fault(hangs) for each in machines))),
            unready=tuple(filter(None, (each.trouble(late) for each in asking))),
        )

    def stop(
        self, timeout: float | None = None, *, hurry: Callable[[], bool] = lambda: False
    ) -> bool:
        """Claim no more, finish what runs within ``timeout`` seconds, settle, release the rest.

        Return whether nothing had to be abandoned. ``hurry`` may cut the wait short.
        """
        if self._pid not in (0, os.getpid()):
            self._state = "stopped"  # a fork of the running one holds nothing, but maybe its lock
            return True
        with self._turn:
            was, self._state = self._state, "stopped"
            return self._stop(timeout, hurry) if was == "running" else True

    def _stop(self, timeout: float | None, hurry: Callable[[], bool]) -> bool:
        until = time.monotonic() + (self.settings.DRAIN_TIMEOUT if timeout is None else timeout)

        def give_up() -> bool:
            return hurry() or time.monotonic() > until

        self._close_the_gate()
        finished = self._dispatcher.join(give_up)
        finished = self._event_loop.join(give_up) and finished
        settled = self._settle_the_rest(give_up)
        for loop in (self._beating, self._holding if self._active else None):
            if loop is not None:
                loop.stop()
                loop.join(PATIENCE)
        self._purging.join(PATIENCE)
        if self._hearing is not None:
            self._hearing.join(PATIENCE)
        logger.info(
            "worker stopped id=%s alias=%s released=%d", self.id, self.alias, self._released
        )
        announce(worker_stopped, sender=self.alias, worker_id=self.id)
        return finished and settled

    def _close_the_gate(self) -> None:
        self._offers.close()
        if hooks.slot.queues.get(self.alias) is self._offers:
            del hooks.slot.queues[self.alias]
        self._purger.stopping = True
        self._purging.stop()
        if self._hearing is not None:
            self._hearing.stop()
        self._claiming.stop()
        self._dispatcher.stop()
        self._event_loop.stop()
        self._claiming.join(PATIENCE)

    def _settle_the_rest(self, give_up: Callable[[], bool]) -> bool:
        while not self._settler.idle and not give_up():
            time.sleep(0.002)
        settled = self._settler.idle
        self._settling.stop()
        self._decisions.wake()
        return self._settling.join(PATIENCE) and settled

    def _release_unstarted(self) -> None:
        """Give back what nobody started; in the settler's thread, after its last settle.

        At the interpreter's exit no thread can be started, and a database that does not answer
        must not hold the one that stops us.
        """
        unstarted = self._held.unstarted()
        self._held.drop(unstarted)
        connection, ids = connections[self.alias], [each.event_id for each in unstarted]
        try:
            if ids:
                self._released = dialects.of(connection).release(connection, me=self.id, ids=ids)
            self._released += self._streams.release_all(connection)
            if self._released:
                doorbell.ring(connection)
        except Exception as error:  # noqa: BLE001 - stopping goes on
            logger.error("release failed; the leases end by themselves error=%s", error)

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- news ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Have the claimer look at the table now."""
        self._claimer.news.ring()
        self._wake()

    def _hears(self, sure: bool) -> None:
        self._claimer.news.sure = sure

    def _expect(self, delay: float) -> None:
        self._claimer.news.expect(delay)
        self._claiming.wake()

    def _wake(self) -> None:
        self._claiming.wake()

    def _made_room(self) -> None:
        if self._claimer.hungry:
            self._claiming.wake()


def new_owner() -> str:
    """Return a name that no other process start has: it is the fence of every settle."""
    return f"{socket.gethostname()[:80]}-{os.getpid()}-{secrets.token_hex(6)}"
