"""Delivers ``async def`` listeners: so many of a queue at once, and so many with connections."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db import OperationalError, connections

from ..clocks import monotonic
from ..delivery.delivery import Delivery
from ..delivery.drivers import adrive
from ..delivery.lease import Lease
from .connection_cleanup import abandon, tidy
from .deliveries import Deliveries
from .event_loop import DeliveryTask, EventLoop
from .gate import Gate
from .ready import Lane
from .settler import log_failed

logger = logging.getLogger("django_outbox")


class AsyncDeliveries:
    """Delivers events of a queue on the worker's event loop, ``ASYNC_CONCURRENCY`` at a time.

    Any thread may call ``put``; all else belongs to the loop's thread.
    """

    def __init__(self, *, loop: EventLoop, gate: Gate, deliveries: Deliveries) -> None:
        self._loop, self._gate, self._deliveries = loop, gate, deliveries
        self._held, self._free = deliveries.held, gate.settings.ASYNC_CONCURRENCY
        self._connections = Slots(gate.settings.ASYNC_CONNECTIONS)
        loop.at_end.callback(self._connections.close)
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

    def _finished(self, task: DeliveryTask) -> None:
        self._loop.running.remove(task)
        self._free += 1
        if not task.cancelled() and (error := task.exception()) is not None:
            log_failed(task.lease, error)
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
                lease = delivery.lead
                logger.warning(
                    "listener cancelled, event handed back "
                    "event_id=%s event_type=%s listener=%r seconds=%.1f",
                    *lease.named,
                    monotonic() - lease.started_at,
                )
                delivery.leave()
                raise
        except BaseException:  # while the interpreter exits, no thread can be used
            if delivery.left:
                raise
        finally:
            self._deliveries.end(delivery)

    async def _perform(self, delivery: Delivery, thread: DeliveryThread) -> None:
        async def tidy() -> bool:
            await thread.close_connections(last=False)
            return self._held.is_current(delivery.lead) and not self._loop.stopping

        def pass_on() -> None:
            self._deliveries.put(self._deliveries.pass_on(delivery))

        await adrive(delivery.steps(), tidy=tidy, pass_on=pass_on)

    async def _wait_current(self, lease: Lease) -> None:
        """Wait until the lease is renewed, if need be, or lost."""
        while not self._loop.stopping and not self._held.is_current(lease):
            if not self._held.has(lease):
                return
            await asyncio.sleep(0.05)


class Slots:
    """Lets as many deliveries connect as there are slots; the others wait, first come first served.

    A delivery needs one slot for all its databases. With a slot per database, two deliveries that
    had one each could wait for each other forever.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: deque[DeliveryThread] = deque()
        self._closed = False
        self._lock = threading.Lock()  # guards these, and ``has_slot`` of each DeliveryThread

    def acquire(self, thread: DeliveryThread) -> bool:
        """Wait for a slot; return False if the thread has one already. Call it in that thread.

        Raises ``OperationalError`` if the delivery ends before a slot is free.
        """
        with self._lock:
            if thread.has_slot:
                return False
            self._check_open(thread)
            if self._free:
                self._free -= 1
                thread.has_slot = True
                return True
            thread.slot_given.clear()
            self._waiting.append(thread)
            thread.lease.connection_wait_since = monotonic()
        thread.slot_given.wait()
        with self._lock:
            lease = thread.lease
            lease.connection_wait += monotonic() - lease.connection_wait_since
            lease.connection_wait_since = 0.0
            if not thread.has_slot:
                self._check_open(thread)
        return True

    def release(self, thread: DeliveryThread) -> None:
        """Pass the thread's slot, if it has one, to the next thread that waits."""
        with self._lock:
            if not thread.has_slot:
                return
            thread.has_slot = False
            if self._waiting:
                following = self._waiting.popleft()
                following.has_slot = True
                following.slot_given.set()
            else:
                self._free += 1

    def refuse(self, thread: DeliveryThread) -> None:
        """End the thread's wait, and refuse it a slot while its ``refused`` is set."""
        with self._lock:
            thread.refused = True
            if thread in self._waiting:
                self._waiting.remove(thread)
                thread.slot_given.set()

    def close(self) -> None:
        """End the wait of all threads: the event loop that would end it may be blocked."""
        with self._lock:
            self._closed = True
            for thread in self._waiting:
                thread.slot_given.set()
            self._waiting.clear()

    def _check_open(self, thread: DeliveryThread) -> None:
        if thread.refused or self._closed:
            raise OperationalError(
                "The delivery ended before one of its worker's ASYNC_CONNECTIONS was free."
            )


class DeliveryThread(Executor):
    """The thread in which Django runs the synchronous part of one async delivery, made on demand.

    Before its first connection it waits for a slot, which it keeps until its connections are closed
    after the listener. Only ``Slots`` sets ``has_slot``, under its lock.
    """

    def __init__(self, slots: Slots, lease: Lease, *, alias: str) -> None:
        self.lease = lease
        self.has_slot = self.refused = False
        self._slots, self._alias = slots, alias
        self._pool: ThreadPoolExecutor | None = None
        self._context = ThreadSensitiveContext()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._pool is None:
            self.slot_given = threading.Event()
            self._pool = ThreadPoolExecutor(
                1, f"outbox-{self._alias}-async", initializer=self._guard_connections
            )
        try:
            return self._pool.submit(fn, *args, **kwargs)
        except RuntimeError:  # it could not be started, so there is nothing in it to close
            self._pool = None
            raise

    async def __aenter__(self) -> DeliveryThread:
        await self._context.__aenter__()  # type: ignore[no-untyped-call]
        SyncToAsync.context_to_thread_executor[self._context] = self
        return self

    async def __aexit__(self, *raised: object) -> None:
        try:
            await self.close_connections(last=True)
        finally:
            # asgiref starts a thread to join each executor that it finds here.
            SyncToAsync.context_to_thread_executor.pop(self._context, None)
            await self._context.__aexit__(*raised)  # type: ignore[no-untyped-call]
            if self._pool is not None:
                self._pool.shutdown(wait=False)

    async def close_connections(self, *, last: bool) -> None:
        """Close the connections that a listener opened; unless it is the last, another follows."""
        if self._pool is None:
            return
        # Calls that the listener left in the thread must end, instead of waiting for a slot.
        self._slots.refuse(self)
        closing = self._pool.submit(self._close_here, last)
        await asyncio.shield(asyncio.wrap_future(closing))  # a cancellation must not prevent it
        self.refused = last  # without the lock: a call at this moment may see either value

    # -- in the thread -----------------------------------------------------------------------------

    def _guard_connections(self) -> None:
        for connection in connections.all():
            setattr(connection, CONNECT, partial(self._connect, getattr(connection, CONNECT)))

    def _connect(self, connect: Callable[[Any], Any], parameters: Any) -> Any:
        is_new = self._slots.acquire(self)
        try:
            return connect(parameters)
        except BaseException:
            if is_new:
                self._slots.release(self)
            raise

    def _close_here(self, last: bool) -> None:
        for connection in connections.all(initialized_only=True):
            try:
                tidy(connection, self.lease)
                connection.close()
            except Exception:  # noqa: BLE001 - too broken to be closed in order
                abandon(connection)
            if last:
                vars(connection).pop(CONNECT, None)  # else only the garbage collector frees it
        self._slots.release(self)


CONNECT = "get_new_connection"  # the method by which every backend of Django connects
