"""``async def`` listeners: many at once on one event loop, each with its own transactions."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests.table import listening, row, statuses, write
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


class Crowd:
    """An async listener whose calls wait until ``wanted`` of them have been in flight at once."""

    def __init__(self, wanted: int) -> None:
        self.seen: list[str] = []
        self.inside = self.most = 0
        self._wanted = wanted

    async def __call__(self, event: outbox.Event) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        while self.most < self._wanted:  # noqa: ASYNC110 - a thread may end the wait
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        self.inside -= 1
        self.seen.append(event.event_id)


def all_done(count: int, *, within: float = 30) -> None:
    wait_until(lambda: statuses() == {"DONE": count}, within=within, what=f"{count} DONE")


# -- many at once ----------------------------------------------------------------------------------


def test_445_five_hundred_wait_at_once_in_one_worker_with_four_threads(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 4, "ASYNC_CONCURRENCY": 500}
    crowd = Crowd(500)
    with listening(crowd), outbox.Worker():
        ids = write(500)
        all_done(500)
    assert Counter(crowd.seen) == Counter(ids)


def test_the_slots_are_a_bound(settings: Any) -> None:
    settings.OUTBOX = {"ASYNC_CONCURRENCY": 3}
    crowd = Crowd(3)
    with listening(crowd), outbox.Worker():
        write(40)
        all_done(40)
    assert crowd.most == 3


def test_all_queues_share_a_loop_and_each_has_its_own_bound(settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"hooks": {"ASYNC_CONCURRENCY": 2}, "idle": {}}}
    local, hooks, loops = Crowd(3), Crowd(2), set[object]()

    async def hook(event: outbox.Event) -> None:
        loops.add(asyncio.get_running_loop())
        await hooks(event)

    async def here(event: outbox.Event) -> None:
        loops.add(asyncio.get_running_loop())
        await local(event)

    with listening(here), listening(hook, "hook.sent", queue="hooks"), outbox.Worker():
        write(3)
        write(20, "hook.sent")
        all_done(23)
    assert (len(loops), hooks.most) == (1, 2)


def test_g15_many_threads_and_a_loop_in_one_process_run_each_event_once(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 32, "ASYNC_CONCURRENCY": 100, "COLD_QUEUE_CAPACITY": 500}
    seen: list[str] = []
    threads: set[str] = set()

    def shipped(event: outbox.Event) -> None:
        threads.add(threading.current_thread().name)
        Effect.objects.create(event_id=event.event_id, pid=0, phase="end")
        seen.append(event.event_id)

    async def paid(event: outbox.Event) -> None:
        await Effect.objects.acreate(event_id=event.event_id, pid=0, phase="end")
        seen.append(event.event_id)

    crowd = Crowd(1)
    with (
        listening(crowd),
        listening(shipped, "order.shipped"),
        listening(paid, "order.paid"),
        outbox.Worker(),
    ):
        ids = write(60) + write(90, event_type="order.shipped")
        for number in range(40):  # events with keys, for threads and for the loop
            ids += write(event_type="order.paid", key=f"order:{number % 10}")
            ids += write(event_type="order.shipped", key=f"order:{number % 10}")
        all_done(230, within=60)
    assert Counter(seen + crowd.seen) == Counter(ids)  # none twice, none left out
    assert len(threads) > 8
    ends = [*Effect.objects.order_by("pk").values_list("event_id", flat=True)]
    for number in range(10):
        stream = OutboxEvent.objects.filter(key=f"order:{number}").order_by("seq")
        places = [ends.index(each.event_id) for each in stream]
        assert places == sorted(places)
        assert len(places) == 8


# -- errors outside Exception ----------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 10])
@pytest.mark.parametrize("error", [asyncio.CancelledError, asyncio.TimeoutError, SystemExit])
def test_w6_what_a_listener_raises_is_a_failure_and_ends_nothing(
    settings: Any, error: type[BaseException], timeout: float | None
) -> None:
    settings.OUTBOX = {}

    async def listener(event: outbox.Event) -> None:
        await asyncio.sleep(0)
        if event.payload["n"] == 0:
            raise error("of the listener")

    policy = outbox.Fixed(0.02, max_attempts=2)
    with listening(listener, timeout=timeout, retry=policy), outbox.Worker():
        bad, good = write(2)
        wait_until(lambda: statuses() == {"DEAD": 1, "DONE": 1}, what="one dead, one done")
        (after,) = write(payload={"n": 1})
        wait_until(lambda: statuses() == {"DEAD": 1, "DONE": 2}, what="the next one done")
    assert row(bad).attempts == 2
    assert error.__name__ in str(row(bad).last_error)
    assert {row(each).attempts for each in (good, after)} == {0}
