"""``ASYNC_CONNECTIONS``: how many async deliveries may have database connections at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, connections

import django_outbox as outbox
from django_outbox.worker.async_deliveries import DeliveryThread, Slots
from tests.table import history, in_thread, listening, row, sessions, statuses, write
from tests.testapp.models import Effect
from tests.waiting import MovedClock, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

ORM, PLAIN = "order.paid", "order.shipped"
TIMEOUT = 60.0  # seconds


class Gauge:
    """Counts the listeners that have queried the database and are still running."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.most_sessions = inf  # that may be open while a listener runs

    @contextmanager
    def connected(self) -> Iterator[None]:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            yield
        finally:
            self.now -= 1

    async def __call__(self, event: outbox.Event) -> None:
        """Query, then keep the connection for a while, as when calling another service."""
        await sync_to_async(self.connect)()
        with self.connected():
            await asyncio.sleep(0.02)

    def connect(self) -> None:
        """Connect, and wait for the server to end those sessions whose clients have closed them."""
        connection.ensure_connection()
        if connection.vendor != "sqlite":  # it keeps the files of closed connections open
            wait_until(lambda: sessions() <= self.most_sessions, what="sessions within the bound")


class Holder:
    """An async listener that queries the database and then waits for ``go_on``."""

    def __init__(self) -> None:
        self.holding, self.go_on = threading.Event(), threading.Event()

    async def __call__(self, event: outbox.Event) -> None:
        await Effect.objects.acount()
        self.holding.set()
        while not self.go_on.is_set():  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(0.01)


def all_done(count: int, *, within: float = 60) -> None:
    wait_until(lambda: statuses() == {"DONE": count}, within=within, what=f"{count} DONE")


def none_failed(ids: list[str]) -> None:
    assert [each.error for event_id in ids for each in history(event_id)] == []
    assert {row(each).attempts for each in ids} == {0}


def delivery_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if "-async_" in each.name]


# -- the bound -------------------------------------------------------------------------------------


def test_without_the_setting_it_is_twice_the_workers(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 2}
    gauge = Gauge()
    with listening(gauge), outbox.Worker():
        write(60)
        all_done(60)
    assert gauge.most == 4
    gauge = Gauge()
    with listening(gauge), outbox.Worker(workers=1):  # overrides the setting
        write(60)
        all_done(120)
    assert gauge.most == 2


def test_those_without_a_database_are_not_throttled(settings: Any) -> None:
    """Work that they pass to a thread is not throttled either."""
    settings.OUTBOX = {"ASYNC_CONNECTIONS": 1, "ASYNC_CONCURRENCY": 100}
    holder, inside, threads = Holder(), [], []

    async def plain(event: outbox.Event) -> None:
        await sync_to_async(threads.append)(event.event_id)
        inside.append(event.event_id)
        while not holder.go_on.is_set():  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(0.01)

    with listening(holder, ORM), listening(plain, PLAIN), outbox.Worker():
        try:
            write(20, event_type=ORM)
            assert holder.holding.wait(15)
            write(80, event_type=PLAIN)
            wait_until(lambda: len(inside) == 80, what="80 at once beside 20 that wait")
            assert statuses() == {"NEW": 100}
        finally:
            holder.go_on.set()
        all_done(100)
    assert len(threads) == 80


def test_who_waits_longest_is_served_first() -> None:
    slots, order = Slots(1), []
    lease: Any = SimpleNamespace(connection_wait=0.0, connection_wait_since=0.0)
    threads = [DeliveryThread(slots, lease, alias="default") for _ in range(6)]
    for thread in threads:
        thread.slot_given = threading.Event()
    assert slots.acquire(threads[0])

    def wait_in_line(number: int) -> None:
        slots.acquire(threads[number])
        order.append(number)
        slots.release(threads[number])

    waiting = []
    for number in range(1, 6):
        waiting.append(in_thread(lambda number=number: wait_in_line(number)))  # type: ignore[misc]
        wait_until(lambda: len(slots._waiting) == number)  # noqa: B023 - evaluated here
    slots.refuse(threads[3])
    with pytest.raises(OperationalError):
        waiting[2].result(10)
    slots.release(threads[0])
    for number in (0, 1, 3, 4):
        waiting[number].result(10)
    assert order == [1, 2, 4, 5]


# -- nothing is left behind ------------------------------------------------------------------------


def test_a_listener_that_is_cancelled_while_it_waits_leaves_no_slot_behind(settings: Any) -> None:
    settings.OUTBOX = {"ASYNC_CONNECTIONS": 2}
    holder, gauge, gave_up = Holder(), Gauge(), []

    async def impatient(event: outbox.Event) -> None:
        try:
            await asyncio.wait_for(Effect.objects.acount(), 0.02)
        except asyncio.TimeoutError:
            gave_up.append(event.event_id)

    with listening(holder, ORM), listening(impatient, PLAIN), listening(gauge), outbox.Worker():
        try:
            write(2, event_type=ORM)
            wait_until(lambda: holder.holding.is_set() and len(delivery_threads()) == 2)
            write(50, event_type=PLAIN)
            wait_until(
                lambda: statuses() == {"NEW": 2, "DONE": 50}, what="an end of those that gave up"
            )
            assert len(gave_up) == 50
            wait_until(lambda: len(delivery_threads()) == 2, what="an end of their threads")
        finally:
            holder.go_on.set()
        all_done(52)
        ids = write(20)
        all_done(72)
    none_failed(ids)
    assert gauge.most == 2


def test_a_stop_ends_the_wait_and_releases_what_waited(settings: Any) -> None:
    settings.OUTBOX = {"ASYNC_CONNECTIONS": 1, "DRAIN_TIMEOUT": 0.3}
    holder = Holder()
    with listening(holder):
        worker = outbox.Worker()
        worker.start()
        ids = write(10)
        wait_until(lambda: len(delivery_threads()) == 10, what="nine that wait")
        assert in_thread(worker.stop).result(30) is False  # the first of them never ends
    assert statuses() == {"NEW": 10}
    none_failed(ids)
    assert {row(each).locked_by for each in ids} == {None}


def test_a_stop_under_a_blocked_loop_ends_the_wait(settings: Any) -> None:
    """The loop cannot end the wait, and the interpreter's exit waits for these threads."""
    settings.OUTBOX = {"ASYNC_CONNECTIONS": 1, "DRAIN_TIMEOUT": 0.2}
    holder, go_on = Holder(), threading.Event()

    async def block(event: outbox.Event) -> None:
        go_on.wait(60)

    with listening(holder, ORM), listening(block, PLAIN):
        worker = outbox.Worker()
        worker.start()
        try:
            write(5, event_type=ORM)
            wait_until(lambda: len(delivery_threads()) == 5, what="four that wait")
            write(event_type=PLAIN)
            wait_until(lambda: worker._event_loop._watch._ran_at is None, what="a block")
            assert in_thread(worker.stop).result(30) is False  # the loop stays blocked
            slots = worker._executors[0].to_loop.__self__._connections
            assert not slots._waiting
        finally:
            go_on.set()


def test_a_stop_cancels_the_tasks_that_a_listener_left() -> None:
    """The garbage collector would end them in the context of whatever runs at that moment."""
    left: list[asyncio.Task[Any]] = []
    blocked, go_on = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        go_on.wait(15)

    async def leaver(event: outbox.Event) -> None:
        left.append(asyncio.create_task(asyncio.sleep(60)))
        left.append(asyncio.create_task(sync_to_async(block, thread_sensitive=False)()))

    try:
        with listening(leaver), outbox.Worker():
            write()
            assert blocked.wait(15)
            all_done(1)
        assert [each.cancelled() for each in left] == [True, True]
    finally:
        go_on.set()


# -- timeouts --------------------------------------------------------------------------------------


def test_the_wait_for_a_connection_does_not_count_for_the_timeout(
    settings: Any, clock: MovedClock
) -> None:
    settings.OUTBOX = {"ASYNC_CONNECTIONS": 1, "LEASE": 3600}
    holder = Holder()

    async def listener(event: outbox.Event) -> None:
        await Effect.objects.acount()
        clock.advance(TIMEOUT / 10)

    worker = outbox.Worker()
    with listening(holder, ORM), listening(listener, timeout=TIMEOUT), worker:
        try:
            write(event_type=ORM)
            assert holder.holding.wait(30)
            ids = write(3)
            waiting = worker._executors[0].to_loop.__self__._connections._waiting
            wait_until(lambda: len(waiting) == 3, what="three that wait")
            clock.advance(2 * TIMEOUT)
        finally:
            holder.go_on.set()
        all_done(4)
    none_failed(ids)


# -- the fallback ----------------------------------------------------------------------------------


def test_a_failed_connect_gives_its_slot_back(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener continues without a connection, and others must not wait for it."""
    settings.OUTBOX = {"ASYNC_CONNECTIONS": 1}
    refused: list[threading.Thread] = []
    failed: list[str] = []
    go_on = threading.Event()
    backend = type(connections["default"])
    connect = backend.get_new_connection

    def get_new_connection(self: Any, parameters: Any) -> Any:
        if threading.current_thread() in refused:
            raise OperationalError("refused")
        return connect(self, parameters)

    monkeypatch.setattr(backend, "get_new_connection", get_new_connection)

    def fail() -> None:
        refused.append(threading.current_thread())
        with pytest.raises(OperationalError, match="refused"):
            connection.ensure_connection()
        failed.append("refused")

    async def unlucky(event: outbox.Event) -> None:
        await sync_to_async(fail)()
        while not go_on.is_set():  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(0.01)

    gauge = Gauge()
    with listening(unlucky, PLAIN), listening(gauge), outbox.Worker():
        try:
            write(event_type=PLAIN)
            wait_until(lambda: failed == ["refused"], what="the refusal")
            write(5)
            wait_until(lambda: statuses() == {"NEW": 1, "DONE": 5}, what="five DONE")
        finally:
            go_on.set()
        all_done(6)


def test_a_connection_that_the_listener_closes_and_opens_again_keeps_its_slot(
    settings: Any,
) -> None:
    settings.OUTBOX = {"ASYNC_CONNECTIONS": 1}
    inside = []

    def close() -> None:
        connection.close()

    gauge = Gauge()

    async def listener(event: outbox.Event) -> None:
        await Effect.objects.acount()
        with gauge.connected():
            await sync_to_async(close)()
            await asyncio.sleep(0.01)
            inside.append(await Effect.objects.acount())

    with listening(listener), outbox.Worker():
        ids = write(20)
        all_done(20)
    none_failed(ids)
    assert len(inside) == 20
    assert gauge.most == 1
