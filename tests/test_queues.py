"""Queues in a worker: pools of threads, routing, dedicated workers, rates, stray events."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

import django_outbox as outbox
from django_outbox import clocks, testing
from django_outbox.listeners.queues import UNROUTED, routes_of
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream
from django_outbox.worker.effects import perform
from django_outbox.worker.polling import TokenBucket
from tests.table import insert, keyed, listening, row, statuses, stream, write
from tests.waiting import Gate, MovedClock, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

TWO = {"QUEUES": {"hooks": {"WORKERS": 2}}, "WORKERS": 2, "PROBE_INTERVAL": 0.05}


@pytest.fixture(autouse=True)
def two_queues(settings: Any) -> None:
    settings.OUTBOX = TWO


@contextmanager
def both(
    local: Callable[..., Any],
    hook: Callable[..., Any],
    event_type: str = "order.placed",
    **options: Any,
) -> Iterator[None]:
    """Register a listener of ``default`` and one of ``hooks`` for the same events."""
    with (
        listening(local, event_type, name="local"),
        listening(hook, event_type, name="hook", queue="hooks", **options),
    ):
        yield


class Seen:
    """A listener that notes the events it gets, and its threads."""

    def __init__(self, other: Seen | None = None) -> None:
        """Note them where ``other`` does, if it is given."""
        self.ids: list[str] = other.ids if other else []
        self.threads: set[str] = set()

    def __call__(self, event: outbox.Event) -> None:
        self.ids.append(event.event_id)
        self.threads.add(threading.current_thread().name)


def queues() -> Counter[str]:
    """Count the rows that are not finished by queue."""
    return Counter(OutboxEvent.objects.pending().values_list("queue", flat=True))


# -- routing ---------------------------------------------------------------------------------------


def test_rows_of_default_come_first_then_the_others_in_the_order_of_the_setting(
    settings: Any,
) -> None:
    settings.OUTBOX = {"QUEUES": {"b": {}, "a": {}}}
    with (
        listening(Seen(), "x", name="1", queue="a"),
        listening(Seen(), "x", name="2", queue="b"),
        listening(Seen(), "x", name="3"),
        listening(Seen(), "x", name="4", queue="gone"),
        listening(Seen(), "y", name="5", queue="a"),
    ):
        found = [(each.title, each.queue) for each in routes_of("order", "x")]
        assert found == [("x 3", "default"), ("x 4", "default"), ("x 2", "b"), ("x 1", "a")]
        assert [each.queue for each in routes_of("order", "y")] == ["a"]
        assert routes_of("order", "nobody") == (UNROUTED,)


@pytest.mark.parametrize("name", ["", "a b", "ä", 7, "x" * 65])
def test_a_queue_that_no_setting_can_have_is_refused_at_once(name: Any) -> None:
    with pytest.raises(ValueError, match="queue is"):
        outbox.listener("x", queue=name)


# -- pools -----------------------------------------------------------------------------------------


def test_a_queue_of_hung_listeners_does_not_hold_up_the_others() -> None:
    gate, seen = Gate(), Seen()
    with listening(seen), listening(gate, "hook.sent", queue="hooks"), outbox.Worker():
        insert(3000, event_type="hook.sent", queue="hooks")
        try:
            wait_until(lambda: len(gate.entered) == 2)
            for _ in range(30):
                (event_id,) = write()
                wait_until(lambda: event_id in seen.ids)  # noqa: B023
            insert(1500)
            wait_until(lambda: len(seen.ids) == 1530)
            assert len(gate.entered) == 2
        finally:
            OutboxEvent.objects.filter(event_type="hook.sent", locked_by=None).delete()
            gate.open.set()
    wait_until(lambda: statuses().keys() <= {"DONE", "NEW"})


# -- events with listeners in two queues -----------------------------------------------------------


def test_a_listener_that_hangs_does_not_hold_up_that_of_another_queue() -> None:
    gate, local = Gate(), Seen()
    with both(local, gate), outbox.Worker():
        ids = write(12)
        try:
            wait_until(lambda: len(local.ids) == 12 and len(gate.entered) == 2)
            wait_until(lambda: statuses() == {"DONE": 12, "NEW": 12})
            assert queues() == {"hooks": 12}
        finally:
            gate.open.set()
        wait_until(lambda: statuses() == {"DONE": 24})
    assert Counter(local.ids) == Counter(gate.entered) == Counter(ids)


def test_a_retry_is_that_of_one_listener_and_stays_in_its_queue() -> None:
    calls = []

    def fail(event: outbox.Event) -> None:
        calls.append(event.attempts)
        raise outbox.RetryAfter(60)

    local = Seen()
    with both(local, fail), outbox.Worker():
        (event_id,) = write()
        wait_until(lambda: statuses() == {"DONE": 1, "RETRY": 1})
    rows = OutboxEvent.objects.of_event(event_id).values_list("listener", "queue", "attempts")
    assert {*rows} == {("order.placed local", "default", 0), ("order.placed hook", "hooks", 1)}
    assert (local.ids, calls) == ([event_id], [0])


# -- dedicated workers -----------------------------------------------------------------------------


def test_a_dedicated_worker_leaves_other_queues_alone() -> None:
    local, hook = Seen(), Seen()
    with listening(local), listening(hook, "hook.sent", queue="hooks"):
        with outbox.Worker(queues=["hooks"]):
            write(5)
            write(5, "hook.sent")
            wait_until(lambda: len(hook.ids) == 5)
            wait_until(lambda: statuses() == {"DONE": 5, "NEW": 5})
        assert local.ids == []
        with outbox.Worker(queues=["default"]):
            wait_until(lambda: statuses() == {"DONE": 10})


@pytest.mark.parametrize("given", [["gone"], [], "hooks"])
def test_a_worker_refuses_queues_that_are_not_configured(given: Any) -> None:
    with pytest.raises(ValueError, match="expected some of default, hooks"):
        outbox.Worker(queues=given)
    with pytest.raises(ValueError, match="expected some of default, hooks"):
        outbox.drain(queues=given)


# -- rows in a wrong queue -------------------------------------------------------------------------


def test_a_dedicated_worker_passes_on_rows_of_other_queues_with_their_attempts() -> None:
    with listening(Seen(), "hook.sent", queue="hooks"), outbox.Worker(queues=["default"]):
        ids = insert(20, event_type="hook.sent", attempts=3, status=2)
        wait_until(lambda: queues() == {"hooks": 20})
        wait_until(lambda: not OutboxEvent.objects.leased().exists())
    assert {(row(each).attempts, row(each).status) for each in ids} == {(3, 2)}


def test_two_releases_that_disagree_about_a_queue_pass_a_row_on_once() -> None:
    seen = Seen()
    insert(20, event_type="hook.sent")
    with listening(seen, "hook.sent", queue="hooks"), outbox.Worker(queues=["default"]):
        wait_until(lambda: queues() == {"hooks": 20})
        wait_until(lambda: not OutboxEvent.objects.leased().exists())
    assert seen.ids == []
    with listening(seen, "hook.sent"), outbox.Worker(queues=["hooks"]):
        wait_until(lambda: statuses() == {"DONE": 20})
    assert {*OutboxEvent.objects.values_list("queue", flat=True)} == {"hooks"}


def test_rows_of_a_queue_that_is_not_configured_are_delivered_by_default(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django_outbox.worker import housekeeper

    monkeypatch.setattr(housekeeper, "SEARCH_INTERVAL", 0.1)
    seen = Seen()
    with listening(seen), outbox.Worker():
        insert(600, queue="gone")
        keyed("a", 3)
        OutboxStream.objects.filter(stream__of_key="a").update(queue="also-gone")
        wait_until(lambda: statuses() == {"DONE": 603})
    assert len({*seen.ids}) == 603
    assert "queue not configured, its events are delivered by default queue=gone" in caplog.text


# -- pauses of queues ------------------------------------------------------------------------------


POLLS = 3


def several_polls(seen: Seen) -> None:
    """Wait until the worker has polled several times: each finds an event of ``default``."""
    for _ in range(POLLS):
        (event_id,) = insert()
        wait_until(lambda event_id=event_id: event_id in seen.ids)  # type: ignore[misc]


def pause(name: str = "hooks") -> None:
    OutboxPause.objects.pause("queue", name)


def test_nothing_is_claimed_from_a_paused_queue_and_no_row_is_touched() -> None:
    hook, seen = Seen(), Seen()
    pause()
    ids = insert(20, event_type="hook.sent", queue="hooks")
    before = [*OutboxEvent.objects.order_by("pk").values()]
    with listening(hook, "hook.sent", queue="hooks"), listening(seen):
        with outbox.Worker():
            several_polls(seen)
        after = OutboxEvent.objects.filter(pk__in=ids).order_by("pk")
        assert ([*after.values()], hook.ids) == (before, [])
        assert outbox.drain() == 0
        with outbox.Worker():
            OutboxPause.objects.all().resume()
            wait_until(lambda: len(hook.ids) == 20)


def test_what_a_worker_has_ready_is_released_when_its_queue_is_paused() -> None:
    gate = Gate()
    with listening(gate, "hook.sent", queue="hooks"), outbox.Worker():
        ids = write(6, "hook.sent")
        try:
            wait_until(lambda: len(gate.entered) == 2)
            pause()
            wait_until(lambda: OutboxEvent.objects.leased().count() == 2, what="released")
        finally:
            gate.open.set()
        wait_until(lambda: statuses() == {"DONE": 2, "NEW": 4})
        with listening(seen := Seen()):
            several_polls(seen)
        assert len(gate.entered) == 2
        OutboxPause.objects.all().resume()
        wait_until(lambda: statuses() == {"DONE": 6 + POLLS})
    assert Counter(gate.entered) == Counter(ids)
    assert {*OutboxEvent.objects.values_list("attempts", "rescues")} == {(0, 0)}


def test_one_listener_does_not_wait_for_the_paused_queue_of_another() -> None:
    """Also if the writer did not know them."""
    local, hook = Seen(), Seen()
    pause()
    with both(local, hook):
        ids = [*insert(300), *write(400)]
        with outbox.Worker():
            wait_until(lambda: len(local.ids) == 700)
            wait_until(lambda: queues() == {"hooks": 700})
        assert (Counter(local.ids), hook.ids) == (Counter(ids), [])
        assert outbox.drain() == 0
        OutboxPause.objects.all().resume()
        assert outbox.drain() == 700
    assert Counter(hook.ids) == Counter(ids)


@pytest.mark.parametrize("key", [None, "a"])
def test_a_drain_delivers_nothing_of_a_paused_queue_that_it_routes_to(key: str | None) -> None:
    hook = Seen()
    pause()
    with listening(hook, "hook.sent", queue="hooks"), listening(Seen()):
        insert(5, event_type="hook.sent") if key is None else keyed(key, 5, event_type="hook.sent")
        write(3)
        assert (outbox.drain(), hook.ids, queues()) == (3, [], {"hooks": 5})
        OutboxPause.objects.all().resume()
        assert outbox.drain() == 5


# -- rates -----------------------------------------------------------------------------------------


def test_a_rate_limits_the_calls_of_a_queue(settings: Any, clock: MovedClock) -> None:
    """A minute for each event: real time adds none."""
    settings.OUTBOX = {**TWO, "QUEUES": {"hooks": {"WORKERS": 2, "RATE": "1/m"}}, "LEASE": 3600}
    hook, seen = Seen(), Seen()
    insert(50, event_type="hook.sent", queue="hooks")
    with listening(hook, "hook.sent", queue="hooks"), listening(seen), outbox.Worker():
        write(20)
        wait_until(lambda: len(seen.ids) == 20)
        assert hook.ids == []  # a new worker begins with less than one event
        # Its share of the rate begins to count when it knows how many other workers there are.
        wait_until(lambda: clock.advance(0.5) or hook.ids, what="the first event")  # type: ignore[func-returns-value]
        several_polls(seen)
        first = len(hook.ids)
        assert first <= 2
        for count in range(first + 1, first + 5):
            clock.advance(60)
            wait_until(lambda count=count: len(hook.ids) >= count)  # type: ignore[misc]
            several_polls(seen)
            assert len(hook.ids) == count
    assert OutboxEvent.objects.leased().count() == 0


def test_a_workers_share_of_a_rate_gathers_for_a_second(clock: MovedClock) -> None:
    limit = TokenBucket(50)
    clock.advance(10)
    assert limit.available() == 0  # the other workers are not known yet
    limit.set_workers(2)
    assert limit.available() == 0
    clock.advance(10)
    assert limit.available() == 25
    limit.spend(25)
    assert limit.available() < 25
    clock.advance(0.5)
    assert 12 <= limit.available() <= 25
    limit.spend(40)
    assert limit.available() < 0


# -- upgrades --------------------------------------------------------------------------------------


@pytest.mark.parametrize("doorbell", [None, "auto"])
def test_an_idle_worker_with_sixteen_queues_asks_no_more_often(
    settings: Any, monkeypatch: pytest.MonkeyPatch, doorbell: Any
) -> None:
    """In a minute by a clock that only runs while the claimer rests."""
    execute, sent, clock = CursorWrapper.execute, list[str](), [clocks.monotonic()]

    def note(self: Any, sql: str, params: Any = None) -> Any:
        sent.append(sql)
        return execute(self, sql, params)

    for name, module in {**sys.modules}.items():
        if name.startswith("django_outbox.") and hasattr(module, "monotonic"):
            monkeypatch.setattr(module, "monotonic", lambda: clock[0])

    def asked(count: int) -> int:
        names = [f"q{n}" for n in range(count - 1)]
        settings.OUTBOX = {
            "QUEUES": {name: {"WORKERS": 1} for name in names},
            "DOORBELL": doorbell,
            "POLL_INTERVAL": 0.2,
            "PROBE_INTERVAL": 0.2,
        }
        worker = outbox.Worker()
        claimer = worker._engine.claimer
        assert len([*worker._gates]) == count
        began = clock[0]
        while clock[0] < began + 60:
            clock[0] += perform(connection, claimer.step())
            if clock[0] < began + 10:
                sent.clear()  # it begins
        return len(sent)

    with monkeypatch.context() as patch:
        patch.setattr(CursorWrapper, "execute", note)
        one, sixteen = asked(1), asked(16)
    assert one > 50 / 0.24  # at least one statement for each rest of 0.16 to 0.24 seconds
    assert sixteen < 1.1 * one


def test_a_test_drains_one_queue() -> None:
    insert(3, queue="hooks", event_type="hook.sent")
    [other] = insert(1)
    with listening(Seen(), "hook.sent", queue="hooks"):
        assert testing.drain(queues=["hooks"]) == 3
    assert [*OutboxEvent.objects.due().values_list("pk", flat=True)] == [other]


def test_dedicated_workers_pass_a_stream_on() -> None:
    local, hook = Seen(), Seen()
    with listening(local), listening(hook, "hook.sent", queue="hooks"):
        with transaction.atomic():
            outbox.write("order.placed", key="a")
            outbox.write("hook.sent", key="a")
        with outbox.Worker(queues=["default"]):
            wait_until(lambda: stream("a").queue == "hooks" and stream("a").locked_by is None)
        assert (len(local.ids), hook.ids) == (1, [])
        with outbox.Worker(queues=["hooks"]):
            wait_until(lambda: statuses() == {"DONE": 2})


def test_a_backlog_in_a_wrong_queue_is_moved_and_does_not_fill_the_worker() -> None:
    gate, seen = Gate(), Seen()
    with listening(gate, "hook.sent", queue="hooks"), listening(seen), outbox.Worker() as worker:
        insert(2000, event_type="hook.sent")
        try:
            wait_until(lambda: queues()["hooks"] > 1900, what="the backlog moved")
            assert worker.depths()["held"] < 100
            write(5)
            wait_until(lambda: len(seen.ids) == 5)
        finally:
            OutboxEvent.objects.filter(event_type="hook.sent", locked_by=None).delete()
            gate.open.set()
    assert OutboxEvent.objects.filter(rescues__gt=0).count() == 0


def test_a_dedicated_worker_routes_events_to_the_queues_of_others() -> None:
    local, hook = Seen(), Seen()
    with both(local, hook):
        with outbox.Worker(queues=["default"]):
            ids = insert(10)
            wait_until(lambda: len(local.ids) == 10)
            wait_until(lambda: queues() == {"hooks": 10})
            assert hook.ids == []
        with outbox.Worker(queues=["hooks"]):
            wait_until(lambda: statuses() == {"DONE": 20})
    assert Counter(local.ids) == Counter(hook.ids) == Counter(ids)


def test_a_drain_passes_events_on_as_they_were_due(settings: Any) -> None:
    """The next drain finds them at once; a worker would pass them on up to a second later."""
    settings.OUTBOX = TWO
    seen = list[str]()
    with listening(lambda event: seen.append(event.event_id), queue="hooks"):
        ids = insert(due=-90)
        assert outbox.drain(queues=["default"]) == 0
        assert outbox.drain(queues=["hooks"]) == 1
    assert seen == ids
