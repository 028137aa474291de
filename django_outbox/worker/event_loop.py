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
from ..delivery.delivery import Delivery
from ..delivery.drivers import adrive
from ..delivery.lease import Lease
from ..log import report_quietly
from ..queue_settings import DEFAULT_QUEUE
from .async_connections import DeliveryThread, Slots
from .blocked_loop import BlockedLoopWatch
from .deliveries import Deliveries
from .gate import Gate
from .held import Held
from .ready import Lane
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

    def note(self, lease: Lease) -> None:
        """Note what the current task, and those that its listener creates, work for."""
        CURRENT_LEASE.set(lease)
        task = asyncio.current_task(self._loop)
        assert task is not None
        self.running[task] = lease

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

    def __init__(self, *, loop: EventLoop, gate: Gate, deliveries: Deliveries) -> None:
        self._loop, self._gate, self._deliveries = loop, gate, deliveries
        self._held, self._free = deliveries.held, gate.settings.ASYNC_CONCURRENCY
        self._connections = loop.slots(gate.settings.ASYNC_CONNECTIONS)
        self._waiting = gate.ready.awaited

    def put(self, found: Lease | Lane) -> None:
        """Queue a lease, or the next batch of a lane, which grows until it has a place."""
        self._waiting.append(found)
        self._loop.call(self._fill)

    def _fill(self) -> None:
        while self._waiting and self._free > 0 and not self._loop.stopping:
            found = self._waiting.popleft()
            leases = [found] if isinstance(found, Lease) else self._deliveries.take(found)
            if leases:  # a full lane is queued a second time
                task = self._loop.create(self._deliver(leases), leases[0])
                task.add_done_callback(self._finished)
                self._free -= 1
        self._gate.made_room()  # what waits here takes room from the next claim

    def _finished(self, task: asyncio.Task[None]) -> None:
        lease = self._loop.running.pop(task)
        self._free += 1
        if not task.cancelled() and (error := task.exception()) is not None:
            log_failed(lease, error)
        self._fill()

    async def _deliver(self, leases: list[Lease]) -> None:
        for each in leases:
            if self._gate.closed:
                self._gate.turn_away(each)
            if not each.turned_away:
                await self._wait_current(each)
        if self._loop.stopping or not (started := self._held.start(leases)):
            return
        delivery = self._deliveries.of(started)
        self._loop.note(delivery.lead)
        try:
            async with DeliveryThread(
                self._connections, delivery.lead, alias=self._deliveries.alias
            ) as thread:
                await self._perform(delivery, thread)
        except asyncio.CancelledError:
            if delivery.left:
                self._hand_back(delivery)
                raise
        except BaseException:  # while the interpreter exits, no thread can be used
            if delivery.left:
                raise
        finally:
            self._deliveries.end(delivery)

    async def _perform(self, delivery: Delivery, thread: DeliveryThread) -> None:
        async def tidy() -> bool:
            await thread.close_connections()
            return self._held.is_current(delivery.lead) and not self._loop.stopping

        def pass_on() -> None:
            self._deliveries.put(self._deliveries.pass_on(delivery))

        await adrive(delivery.steps(), tidy=tidy, pass_on=pass_on)

    def _hand_back(self, delivery: Delivery) -> None:
        """Let the events of a cancelled delivery be released that are not decided."""
        lease = delivery.lead
        logger.warning(
            "listener cancelled, event handed back "
            "event_id=%s event_type=%s listener=%r seconds=%.1f",
            *lease.named,
            monotonic() - lease.started_at,
        )
        delivery.leave()

    async def _wait_current(self, lease: Lease) -> None:
        """Wait until the lease is renewed, if need be, or lost."""
        while not self._loop.stopping and not self._held.is_current(lease):
            if not self._held.has(lease):
                return
            await asyncio.sleep(0.05)
