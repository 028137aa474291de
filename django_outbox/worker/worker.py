"""``Worker``: delivers the events of one database; starts and stops the threads that do it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from math import inf
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from .. import doorbell
from ..conf import current
from ..models import OutboxEvent
from ..signals import announce, worker_started, worker_stopped
from ..sql import is_in_memory
from ..writing.on_commit import hot_queues
from .async_deliveries import AsyncDeliveries
from .deliveries import Deliveries
from .effects import Steps, act, in_turn
from .engine import Engine, new_owner, served
from .event_loop import EventLoop
from .executor import Executor
from .gate import Gate
from .threads import DoorbellListener, Health, Loop, reasons

logger = logging.getLogger("django_outbox")


JOIN_TIMEOUT = 1.0  # seconds that each part gets to end, in addition to the drain timeout
UNREADY_AFTER = 3  # poll intervals that one step of a part may last before the worker is unready
DEAD_AFTER = (10, 120.0)  # leases, or seconds if longer, that a step may last; then restart
Part = Executor | Loop
WATCH_INTERVAL = 0.25  # seconds between two looks for calls that exceed their timeouts


class Worker:
    """Delivers the events of one database alias from threads of this process.

    Use it as a context manager, or call ``start()`` and ``stop()``; calling one twice is harmless.
    A stopped worker cannot be started again: make a new one. Keyword arguments override the
    settings of the same name for this worker only. ``queues`` are the queues that it serves;
    None: all. It raises ``ValueError`` for one that ``OUTBOX["QUEUES"]`` does not have.

    ``start()`` raises ``ImproperlyConfigured`` for an in-memory SQLite database, which other
    threads cannot reach. It raises ``RuntimeError`` if this process has a worker for the alias.
    """

    def __init__(
        self,
        *,
        using: str | None = None,
        workers: int | None = None,
        poll_interval: float | None = None,
        drain_timeout: float | None = None,
        queues: Collection[str] | None = None,
        purge: bool = True,
        max_events: int | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "WORKERS": workers,
            "POLL_INTERVAL": poll_interval,
            "DRAIN_TIMEOUT": drain_timeout,
        }
        self.settings = settings = replace(
            current(), **{name: value for name, value in given.items() if value is not None}
        )
        self.alias, self.id = using or router.db_for_write(OutboxEvent), new_owner()
        self._engine = engine = Engine(
            self.alias,
            self.id,
            settings,
            queues=served(queues, settings),
            purge=purge,
            max_events=max_events,
        )
        self._gates, self._held, self._settler = engine.gates, engine.held, engine.settler
        self._state, self._pid = "new", 0
        self._start_stop_lock = threading.RLock()  # one start or stop at a time
        self._make_threads()

    def _make_threads(self) -> None:
        """Make what has threads; ``_parts``: in start order, each after those that it feeds."""
        engine, settings, loop = self._engine, self.settings, self._loop
        self._event_loop = EventLoop(
            alias=self.alias, stuck_after=settings.STUCK_AFTER, held=self._held
        )
        self._executors = [self._executor(gate) for gate in self._gates]
        self._settler_loop = loop("settler", engine.settler.step)
        beat, claimer, keeper = engine.heartbeat, engine.claimer, engine.housekeeper
        self._heartbeat_loop = loop("heartbeat", beat.step, close=beat.close)
        self._claimer_loop = loop(
            "claimer", claimer.step, close=claimer.close, woken=engine.wakeup.woken
        )
        # Those that a stop ends first, without waiting, and those that it needs to its end.
        self._side_loops = [loop("housekeeper", keeper.step, close=keeper.close)]
        self._late_loops = [loop("watchdog", self._watch)]
        self._delivering: list[Part] = [  # without their progress no event is delivered
            *self._executors,
            self._settler_loop,
            self._heartbeat_loop,
        ]
        if (active := engine.active) is not None:
            self._late_loops.append(loop("active", active.step, close=active.leader.release))
            self._delivering.append(self._late_loops[-1])
        self._delivering.append(self._claimer_loop)
        if (ear := doorbell.ear(self.alias)) is not None:
            listener = DoorbellListener(
                ear,
                interval=settings.DOORBELL_INTERVAL,
                wakeup=engine.wakeup,
                sessions=engine.sessions,
            )
            self._side_loops.append(loop("doorbell", listener.step, close=listener.close))
        self._parts: list[Part] = [self._late_loops[0], *self._delivering, *self._side_loops[::-1]]
        if settings.MODE == "writer_only":
            self._delivering, self._parts = [], [*self._side_loops[:1]]

    def _executor(self, gate: Gate) -> Executor:
        deliveries = Deliveries(alias=self.alias, queue=gate, runs=self._engine.runs)
        return Executor(
            gate=gate,
            deliveries=deliveries,
            stuck_after=self.settings.STUCK_AFTER,
            sessions=self._engine.sessions,
            to_loop=AsyncDeliveries(loop=self._event_loop, gate=gate, deliveries=deliveries).put,
        )

    def _loop(self, name: str, step: Callable[[], Steps[float]], **given: Any) -> Loop:
        return Loop(
            f"outbox-{self.alias}-{name}",
            step,
            alias=self.alias,
            sessions=self._engine.sessions,
            **given,
        )

    def _watch(self) -> Steps[float]:
        """Look for calls that exceed their timeouts; return the seconds to wait."""
        yield from in_turn(*(act(each.watch) for each in self._calling))
        return WATCH_INTERVAL

    @property
    def _calling(self) -> list[Executor | EventLoop]:
        """What calls listeners: the threads of each queue, then the event loop."""
        return [*self._executors, self._event_loop]

    # -- start and stop --------------------------------------------------------------------------

    def start(self) -> None:
        """Start all threads and return; raise ``RuntimeError`` if the worker was stopped.

        If ``OUTBOX["ENABLED"]`` is False, log that and start nothing.
        """
        with self._start_stop_lock:
            if self._state != "running":
                self._start()

    def _start(self) -> None:
        if self._state != "new":
            raise RuntimeError("This worker was stopped. Make a new Worker and start that one.")
        if not self.settings.ENABLED:
            logger.warning('OUTBOX["ENABLED"] is False: nothing is delivered alias=%s', self.alias)
            return
        if is_in_memory(connections[self.alias]):
            raise ImproperlyConfigured(
                f"The database {self.alias!r} is in memory, where no worker thread can reach it. "
                "Use a file, or deliver with drain() in this thread."
            )
        if hot_queues.by_alias.setdefault(self.alias, self._gates) is not self._gates:
            raise RuntimeError(f"This process already has a worker for {self.alias!r}.")
        self._state, self._pid = "running", os.getpid()
        try:
            for part in self._parts:
                part.start()
        except BaseException:
            self.stop(timeout=0)
            raise
        logger.info("worker started id=%s alias=%s", self.id, self.alias)
        announce(worker_started, sender=self.alias, worker_id=self.id, worker=self)

    def stop(self, timeout: float | None = None) -> bool:
        """Stop claiming, wait for running listeners, then hand back what has not ended.

        Wait for at most ``timeout`` seconds (default: ``DRAIN_TIMEOUT``). Return whether nothing
        had to be handed back. No thread can be interrupted, so a listener may run on: its event
        becomes due when its lease ends, and its result is refused.
        """
        until = time.monotonic() + (self.settings.DRAIN_TIMEOUT if timeout is None else timeout)
        finished = self.finish(lambda: time.monotonic() > until)
        self.hand_back()
        return finished

    def finish(self, give_up: Callable[[], bool]) -> bool:
        """Stop claiming, release unstarted events, settle what ends before ``give_up()`` is true.

        Return whether everything ended. Leases of what still runs are renewed until ``hand_back``.
        """
        if self._pid not in (0, os.getpid()):
            self._state = "stopped"  # a forked copy has no leases, but its lock may be locked
            return True
        with self._start_stop_lock:
            if self._state != "running":
                self._state = "stopped" if self._state == "new" else self._state
                return True
            self._state = "finished"
            logger.info("worker draining id=%s alias=%s", self.id, self.alias)
            self._stop_accepting()
            joined = [part.join(give_up) for part in self._calling]
            settled = self._settle_the_rest(give_up)
            for loop in self._late_loops:
                loop.stop()
            for loop in (*self._late_loops, *self._side_loops):
                loop.join(JOIN_TIMEOUT)
        announce(worker_stopped, sender=self.alias, worker_id=self.id)
        return all(joined) and settled

    def hand_back(self, after: float | None = None) -> None:
        """Give back the leases of events that still run after ``finish``.

        They become due ``after`` seconds from now; None: when their leases end. Their listeners run
        on, but can no longer settle them. To exit before they are due, exit right after this call.
        """
        with self._start_stop_lock:
            if self._state != "finished":
                return
            self._state = "stopped"
            self._engine.heartbeat.hand_back_in(after)
            self._heartbeat_loop.stop()
            self._heartbeat_loop.join(JOIN_TIMEOUT + 2 * self.settings.LOCK_WAIT)
            logger.info(
                "worker stopped id=%s alias=%s released=%d handed_back=%d",
                self.id,
                self.alias,
                self._engine.heartbeat.released,
                self._engine.heartbeat.handed_back,
            )

    def _stop_accepting(self) -> None:
        self._gates.close()
        if hot_queues.by_alias.get(self.alias) is self._gates:
            del hot_queues.by_alias[self.alias]
        for part in (*self._side_loops, self._claimer_loop, *self._calling):
            part.stop()
        self._claimer_loop.join(JOIN_TIMEOUT)
        self._engine.heartbeat.begin_stop()
        self._heartbeat_loop.wake()

    def _settle_the_rest(self, give_up: Callable[[], bool]) -> bool:
        while not self._settler.is_idle and not give_up():
            time.sleep(0.002)
        settled = self._settler.is_idle
        self._settler_loop.stop()
        self._gates.decisions.wake()
        return self._settler_loop.join(JOIN_TIMEOUT) and settled

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    # -- what it tells ---------------------------------------------------------------------------

    @property
    def is_spent(self) -> bool:
        """Return whether it has delivered ``max_events`` and should be replaced."""
        return self._engine.is_spent

    def poll(self) -> None:
        """Have the claimer poll the table now."""
        self._engine.wakeup.poll()

    def depths(self) -> dict[str, int]:
        """Return how many events are ``hot`` (offered), ``cold`` (not begun) and ``held``.

        ``held`` counts all events that are claimed and not settled, including the cold ones.
        """
        hot = sum(len(each.offers) for each in self._gates)
        cold = sum(len(each.ready) + self._held.load(each.name).followers for each in self._gates)
        return {"hot": hot, "cold": cold, "held": len(self._held)}

    @property
    def lost_threads(self) -> tuple[str, ...]:
        """Return why only a new process helps: a thread ended, or too many hang."""
        return reasons(each.dead_reason(inf) for each in self._all)

    def health(self) -> Health:
        """Return the health of the threads, as they report it, without a database query."""
        if self._state != "running":
            state = "starting" if self._state == "new" else "draining"
            dead = reasons(each.dead_reason(0.0) for each in self._executors)
            return Health(dead=dead, unready=(state,)).prefixed(self.alias)
        settings = self.settings
        dead_after = max(DEAD_AFTER[0] * settings.LEASE, DEAD_AFTER[1])
        unready_after = UNREADY_AFTER * settings.POLL_INTERVAL + 2 * settings.LOCK_WAIT
        delivering = [*self._delivering, self._event_loop]
        return Health(
            dead=reasons(each.dead_reason(dead_after) for each in self._all),
            unready=reasons(each.unready_reason(unready_after) for each in delivering),
        )

    @property
    def _all(self) -> list[Part | EventLoop]:
        return [*self._parts, self._event_loop]  # which starts with the first async listener
