"""Runs ``async def`` listeners in an event loop, some of each queue at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from django.db import connections

from ..clocks import monotonic
from ..delivery.batch import Batch
from ..delivery.decide import deferred_after_error
from ..delivery.deliver import adeliver
from ..delivery.lease import Lease
from ..listeners.registry import Listener
from ..log import report_quietly
from ..queue_settings import DEFAULT_QUEUE
from .async_connections import DeliveryThread, Slots
from .batch_delivery import next_batch, settle_batch, settle_rest
from .blocked_loop import BlockedLoopWatch
from .gate import Gate
from .gates import Gates
from .held import Held
from .ready import Lane
from .runs import Runs
from .settle_log import log_failed
from .threads import thread_name

logger = logging.getLogger("django_outbox")

LEFT_TIME = 1.0  # seconds that tasks which listeners left get to end, once they are cancelled

# What the current task delivers; inherited by the tasks that a listener creates.
CURRENT_LEASE: ContextVar[Lease] = ContextVar("django_outbox_current_lease")


class EventLoop:
    """A worker's thread with an asyncio event loop, which starts with the first async listener.

    Other threads call the public methods.
    """

    def __init__(self, *, alias: str, stuck_after: float, held: Held) -> None:
        self._lock = held.lock
        self._loop: asyncio.AbstractEventLoop  # created by call(), closed by the thread
        self.running: dict[asyncio.Task[None], Lease] = {}  # for the loop's thread
        self._connections: list[Slots] = []  # of the queues
        self._tasks: WeakKeyDictionary[asyncio.Task[Any], Lease] = WeakKeyDictionary()
        self.stopping = False
        self._thread = threading.Thread(
            target=self._run, name=thread_name(alias, DEFAULT_QUEUE, "loop"), daemon=True
        )
        self._watch = BlockedLoopWatch(
            self._thread.name, stuck_after=stuck_after, lease_of=self._lease_of
        )

    def slots(self, number: int) -> Slots:
        """Return places for connections, which are closed when the loop ends."""
        self._connections.append(Slots(number))
        return self._connections[-1]

    def call(self, act: Callable[[], None]) -> None:
        """Have the loop call ``act``; start its thread if need be, but not during a stop."""
        if self._thread.ident is not None or self._start():
            self._loop.call_soon_threadsafe(act)

    def _start(self) -> bool:
        with self._lock:
            if self._thread.ident is None and not self.stopping:
                self._loop = asyncio.new_event_loop()
                self._loop.set_exception_handler(report_quietly)
                self._loop.set_task_factory(self._make_task)  # type: ignore[arg-type]
                self._thread.start()
            return self._thread.ident is not None

    def create(self, delivery: Coroutine[Any, Any, None], lease: Lease) -> asyncio.Task[None]:
        """Create the task that delivers a lease. In the loop's thread.

        In a context of its own: in that of another delivery it would use the thread of that one, or
        one that ``ASYNC_CONNECTIONS`` does not limit.
        """
        task = Context().run(self._loop.create_task, delivery, name=lease.id)
        self.running[task] = lease
        return task

    def stop(self) -> None:
        """Stop further listeners from starting."""
        with self._lock:
            self.stopping = True

    def join(self, give_up: Callable[[], bool]) -> bool:
        """Wait for running listeners until ``give_up()``, then cancel them.

        Return whether all ended by themselves.
        """
        if self._thread.ident is None:
            return True
        while self.running and not give_up():
            time.sleep(0.005)
        finished = not self.running
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(1)
        for slots in self._connections:
            slots.close()
        return finished

    def dead_reason(self, longest: float) -> str | None:
        """Return a reason if its thread has ended without being told to."""
        ended = self._thread.ident and not self._thread.is_alive() and not self.stopping
        return f"{self._thread.name} has ended" if ended else None

    def unready_reason(self, longest: float) -> str | None:
        """Return a reason if the loop has been blocked for ``STUCK_AFTER`` seconds."""
        return self._watch.unready_reason

    def watch(self) -> None:
        """Check whether the loop is blocked; the watchdog calls it a few times a second."""
        if self._thread.is_alive():
            self._watch.check(self._loop, self._thread)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._cancel_left_tasks()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            connections.close_all()

    def _cancel_left_tasks(self) -> None:
        """Cancel the tasks that listeners left running, as ``asyncio.run`` does.

        The garbage collector would end them in the context of whatever runs at that moment. asgiref
        would set their variables there, and a delivery would use the thread of another one.
        """
        if left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left, timeout=LEFT_TIME))

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        """Create a task; remember the lease that a listener's task works for."""
        task = asyncio.Task(coro, loop=loop, **options)
        if (lease := CURRENT_LEASE.get(None)) is not None:
            self._tasks[task] = lease
        return task

    def _lease_of(self, task: asyncio.Task[Any]) -> Lease | None:
        return self.running.get(task) or self._tasks.get(task)

    def _cancel(self) -> None:
        for task, lease in self.running.items():
            lease.cancelled = True
            task.cancel()
        ending = asyncio.gather(*self.running, return_exceptions=True)
        ending.add_done_callback(lambda _: self._loop.stop())


class AsyncDeliveries:
    """Delivers events of a queue on the worker's event loop, ``ASYNC_CONCURRENCY`` at a time.

    Any thread may call ``put``; all else belongs to the loop's thread.
    """

    def __init__(
        self, *, alias: str, loop: EventLoop, gate: Gate, gates: Gates, held: Held, runs: Runs
    ) -> None:
        self._alias, self._held, self._gate, self._gates = alias, held, gate, gates
        self._loop, self._runs = loop, runs
        self._free = gate.settings.ASYNC_CONCURRENCY
        self._connections = loop.slots(gate.settings.ASYNC_CONNECTIONS)
        self._waiting = gate.ready.awaited

    def put(self, found: Lease | Lane) -> None:
        """Queue a lease, or the next batch of a lane, which grows until it has a place."""
        self._waiting.append(found)
        self._loop.call(self._fill)

    def _fill(self) -> None:
        while self._waiting and self._free > 0 and not self._loop.stopping:
            found = self._waiting.popleft()
            if isinstance(found, Lease):
                lease, delivery = found, self._deliver(found)
            elif leases := next_batch(found, self._gate, self._runs):
                lease, delivery = leases[0], self._deliver_batch(found.listener, leases)
            else:  # a full lane is queued a second time
                continue
            self._loop.create(delivery, lease).add_done_callback(self._finished)
            self._free -= 1
        self._gate.made_room()  # what waits here takes room from the next claim

    def _finished(self, task: asyncio.Task[None]) -> None:
        lease = self._loop.running.pop(task)
        self._free += 1
        if not task.cancelled() and (error := task.exception()) is not None:
            log_failed(lease, error)
            self._gates.settle(lease, deferred_after_error())
        self._fill()

    async def _deliver(self, lease: Lease) -> None:
        if not await self._may_start(lease):
            return
        CURRENT_LEASE.set(lease)
        decision = None
        try:
            async with DeliveryThread(self._connections, lease, alias=self._alias) as thread:

                async def between(lease: Lease) -> bool:
                    await thread.close_connections()
                    return self._held.is_current(lease) and not self._loop.stopping

                decision = await adeliver(
                    lease,
                    alias=self._alias,
                    between=between,
                    pauses=self._gate.pauses,
                    report=self._gate.report,
                )
        except asyncio.CancelledError:
            if decision is None:
                self._report_cancelled(lease)
                lease.started_at = 0.0  # it has ended, so its lease can be released
                raise
        except RuntimeError:  # while the interpreter exits, no thread can be used
            if decision is None:
                raise
        self._gates.settle(lease, decision)

    def _report_cancelled(self, lease: Lease) -> None:
        logger.warning(
            "listener cancelled, event handed back "
            "event_id=%s event_type=%s listener=%r seconds=%.1f",
            *lease.named,
            monotonic() - lease.started_at,
        )

    async def _deliver_batch(self, listener: Listener, leases: list[Lease]) -> None:
        started: list[Lease] = []
        held_up: set[str] = set()  # streams
        for lease in leases:
            if lease.stream not in held_up and await self._may_start(lease):
                started.append(lease)
                continue
            if lease.stream is not None:
                held_up.add(lease.stream)
        if not started:
            return
        CURRENT_LEASE.set(started[0])
        batches: list[Batch] = []  # the batch, once it is there
        try:
            await self._await_batch(listener, started, batches)
        except asyncio.CancelledError:
            self._hand_back(started, batches)
            raise
        except Exception:  # noqa: BLE001 - it is logged
            log_failed(started[0])
        for batch in batches:
            settle_rest(batch, self._gates, self._runs, deferred_after_error())
            started = [each.lease for each in batch.fallbacks]  # left after an error
        for lease in started:
            self._gates.settle(lease, deferred_after_error())

    async def _await_batch(
        self, listener: Listener, leases: list[Lease], batches: list[Batch]
    ) -> None:
        lead = leases[0]
        async with DeliveryThread(self._connections, lead, alias=self._alias) as thread:

            async def between(lease: Lease) -> bool:
                await thread.close_connections()
                return self._held.is_current(lease) and not self._loop.stopping

            batch = Batch(
                listener,
                leases,
                alias=self._alias,
                between=between,
                is_current=self._held.is_current,
                pauses=self._gate.pauses,
                report=self._gate.report,
            )
            batches.append(batch)
            await batch.arun()
            await self._fall_back(batch, between)

    def _hand_back(self, leases: list[Lease], batches: list[Batch]) -> None:
        """Let the events of a cancelled batch be released that are not decided."""
        left = leases
        for batch in batches:
            left = batch.undecided() + [each.lease for each in batch.fallbacks]
            settle_batch(batch, self._gates, self._runs)
        if left:
            self._report_cancelled(leases[0])
        for lease in left:  # none of these runs any more
            lease.started_at = 0.0

    async def _fall_back(self, batch: Batch, between: Callable[[Lease], Any]) -> None:
        """Settle a batch, and await its fallbacks one by one."""
        settle_batch(batch, self._gates, self._runs)
        while batch.fallbacks:
            await between(batch.lead)
            lease = batch.fallbacks[0].lease
            decision = await batch.fallbacks[0].arun()
            batch.fallbacks[0].lease.drop_event()
            del batch.fallbacks[0]
            batch.gone.add(lease.id)
            self._gates.settle(lease, decision)

    async def _may_start(self, lease: Lease) -> bool:
        if not self._gate.may_start(lease):
            return False  # the claimer releases it
        return await self._wait_current(lease) and self._held.start(lease)

    async def _wait_current(self, lease: Lease) -> bool:
        while not self._loop.stopping and not self._held.is_current(lease):
            if not self._held.has(lease):
                return False
            await asyncio.sleep(0.05)
        return not self._loop.stopping
