"""An orderly stop: events that still run are handed back, the rest are released at once."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from django_outbox.process import main, supervisor
from django_outbox.process.main import is_late
from django_outbox.process.supervisor import Signals
from django_outbox.sql import dialect_of
from django_outbox.sql.values import STREAMS, Branch, Claim
from django_outbox.worker.effects import perform
from tests.table import (
    end_stream_leases,
    in_thread,
    insert,
    keyed,
    lease_ends_in,
    listening,
    row,
    statuses,
    stream,
    stream_due_in,
)
from tests.waiting import MovedClock, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

NO_SESSIONS = pytest.mark.skipif(
    "connection.vendor == 'sqlite'", reason="an open SQLite transaction keeps every writer out"
)
SOON = {"POLL_INTERVAL": 0.2, "PROBE_INTERVAL": 0.05, "LOCK_WAIT": 1, "LEASE": 30}


@pytest.fixture(autouse=True)
def soon(settings: Any) -> None:
    settings.OUTBOX = SOON


class Gate:
    """A listener that blocks until it is opened, then calls ``then``."""

    def __init__(self, then: Callable[[outbox.Event], Any] = lambda event: None) -> None:
        self.entered: list[str] = []
        self.left: list[str] = []
        self._then, self._open = then, threading.Event()

    def __call__(self, event: outbox.Event) -> Any:
        self.entered.append(event.event_id)
        try:
            assert self._open.wait(60)
            return self._then(event)
        finally:
            self.left.append(event.event_id)

    def open(self) -> None:
        self._open.set()


@contextmanager
def gated(*gates: Gate, **options: Any) -> Iterator[Gate]:
    """Register gates; open them at the end, so that no thread stays blocked in one."""
    with ExitStack() as stack:
        for gate in gates:
            stack.enter_context(listening(gate, **options))
            stack.callback(gate.open)
        yield gates[0]


@contextmanager
def worker(**settings: Any) -> Iterator[outbox.Worker]:
    with override_settings(OUTBOX={**SOON, **settings}), outbox.Worker(purge=False) as running:
        yield running


def at_once() -> bool:
    return True


def facts(event_id: str) -> tuple[Any, ...]:
    """Return the owner, when it claimed, the attempts, rescues and status."""
    found = row(event_id)
    return found.locked_by, found.locked_at, found.attempts, found.rescues, found.status


def threads_have_ended() -> bool:
    return not any(each.name.startswith("outbox-") for each in threading.enumerate())


def lose(*keys: str) -> None:
    """Let a worker claim every stream, then end the leases of these keys, as if it were lost."""
    wanted = Claim(table=STREAMS, me="a lost worker", lease=30, branches=[Branch("default", 100)])
    dialect_of(connection).claim(wanted)
    end_stream_leases(*keys)


# -- rows ------------------------------------------------------------------------------------------


def put(key: str | None) -> str:
    """Insert an event, or a stream of three; return the first id."""
    return (keyed(key, 3) if key else insert(attempts=2, rescues=1))[0]


def lease_of(event_id: str, key: str | None) -> tuple[str | None, float]:
    """Return the owner of an event or of its stream, and the seconds until it is due."""
    if key:
        return stream(key).locked_by, stream_due_in(key)
    return row(event_id).locked_by, lease_ends_in(event_id)


@pytest.mark.parametrize("key", [None, "a"])
def test_in_a_process_that_lives_on_the_owner_goes_and_the_lease_end_stays(key: str | None) -> None:
    with gated(Gate()) as gate, worker() as running:
        event_id = put(key)
        wait_until(lambda: gate.entered)
        assert running.stop(timeout=0.1) is False
        owner, left = lease_of(event_id, key)
        assert (owner, 20 < left <= 30) == (None, True)  # the thread may run on until then
        assert facts(event_id) == (None, None, *((0, 0) if key else (2, 1)), Status.NEW)
    assert gate.entered == [event_id]


@pytest.mark.parametrize("key", [None, "a"])
def test_where_the_process_ends_it_is_due_that_much_later(key: str | None) -> None:
    with gated(Gate()) as gate, worker() as running:
        event_id = put(key)
        wait_until(lambda: gate.entered)
        assert running.finish(at_once) is False
        assert lease_of(event_id, key)[0] == running.id  # renewed until the last statement
        running.hand_back(1.0)
        owner, left = lease_of(event_id, key)
        assert (owner, left <= 1.0) == (None, True)
        assert facts(event_id) == (None, None, *((0, 0) if key else (2, 1)), Status.NEW)


def test_each_one_handed_back_is_a_warning_that_names_it(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "django_outbox"),
        gated(Gate(), name="shipping") as gate,
        worker() as running,
    ):
        first, second = insert(2)
        wait_until(lambda: len(gate.entered) == 2)
        running.stop(timeout=0.1)
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    for event_id in (first, second):
        (line,) = [each for each in told if event_id in each]
        assert line.startswith(
            f"listener still runs, event handed back event_id={event_id} event_type=order.placed "
            "listener='order.placed shipping' seconds="
        )
        assert float(line.rpartition("=")[2]) >= 0.1
    (end,) = [each.getMessage() for each in caplog.records if "worker stopped" in each.message]
    assert end.endswith("released=0 handed_back=2")


def test_j12_the_unstarted_is_released_at_once_and_not_after_the_drain() -> None:
    with gated(Gate()) as gate, worker(WORKERS=1) as running:
        first, *rest = insert(3, due=-1)
        wait_until(lambda: gate.entered and OutboxEvent.objects.leased().count() == 3)
        stopping = in_thread(lambda: running.finish(lambda: False))
        wait_until(lambda: OutboxEvent.objects.due().count() == 2, what="the release")
        assert not stopping.done()
        assert row(first).locked_by == running.id
        gate.open()
        assert stopping.result(20) is True
        assert {row(each).locked_by for each in rest} == {None}
    assert gate.entered == [first]


def test_412_a_drain_longer_than_a_lease_renews_what_runs(clock: MovedClock) -> None:
    with gated(Gate()) as gate, worker(LEASE=6, WORKERS=1, DRAIN_TIMEOUT=60) as running:
        (event_id,) = insert()
        wait_until(lambda: gate.entered)
        stopping = in_thread(running.stop)
        wait_until(lambda: running._state == "finished")
        for _ in range(3):
            end = row(event_id).available_at
            clock.advance(3)  # more than the third of a lease after which it is renewed
            wait_until(lambda end=end: row(event_id).available_at > end, what="a renewal")  # type: ignore[misc]
            assert lease_ends_in(event_id) > 0
            assert row(event_id).locked_by == running.id
        gate.open()
        assert stopping.result(20) is True
    assert facts(event_id) == (None, None, 0, 0, Status.DONE)


# -- streams -------------------------------------------------------------------------------------


@pytest.fixture
def crowded() -> Iterator[tuple[outbox.Worker, list[str]]]:
    """Yield a worker whose thread is busy, and the heads of two lost streams that wait for it."""
    (busy,) = insert(due=-5)
    heads = [keyed(key)[0] for key in "ab"]
    lose("a", "b")
    with gated(Gate()) as gate, worker(WORKERS=1) as running:
        wait_until(lambda: [row(each).rescues for each in heads] == [1, 1], what="counts")
        assert gate.entered == [busy]
        yield running, heads
        assert gate.entered == [busy]


def test_a_stop_counts_no_lost_worker_and_clears_no_count(
    crowded: tuple[outbox.Worker, list[str]],
) -> None:
    running, _ = crowded
    finishing = in_thread(lambda: running.finish(at_once))
    assert finishing.result(20) is False
    running.hand_back(1.0)
    assert [stream(key).rescues for key in "ab"] == [1, 1]
    assert [stream(key).locked_by for key in "ab"] == [None, None]
    assert max(map(stream_due_in, "ab")) <= 0


# -- async -----------------------------------------------------------------------------------------


def test_what_ends_by_its_cancellation_is_due_now(caplog: pytest.LogCaptureFixture) -> None:
    entered: list[str] = []

    async def endless(event: outbox.Event) -> None:
        entered.append(event.event_id)
        await asyncio.Event().wait()

    with listening(endless), worker() as running:
        (event_id,) = insert()
        (head,) = keyed("a")
        wait_until(lambda: len(entered) == 2)
        assert running.finish(at_once) is False
        running.hand_back(30.0)
        assert facts(event_id) == (None, None, 0, 0, Status.NEW)
        assert lease_ends_in(event_id) <= 0
        assert facts(head) == (None, None, 0, 0, Status.NEW)
        assert stream_due_in("a") <= 0
    told = [each for each in caplog.messages if each.startswith("listener cancelled, event handed")]
    assert {each.split("event_id=")[1].split()[0] for each in told} == {event_id, head}
    assert all(re.search(r"listener='order\.placed' seconds=\d+\.\d", each) for each in told)


def test_a_call_past_its_timeout_has_failed_although_a_stop_cancels_it(clock: MovedClock) -> None:
    """A blocked loop cannot end it in time; handed back, it would be tried again without end."""
    entered, go_on = threading.Event(), threading.Event()

    async def blocking(event: outbox.Event) -> None:
        entered.set()
        go_on.wait(20)
        await asyncio.Event().wait()

    with listening(blocking, timeout=5.0, retry=outbox.Fixed(60)), worker() as running:
        (event_id,) = insert()
        assert entered.wait(15)
        clock.advance(6)
        finishing = in_thread(lambda: running.finish(at_once))
        wait_until(lambda: "_cancel" in repr(running._event_loop._loop._ready))
        go_on.set()
        finishing.result(20)
        running.hand_back(30.0)
        assert (row(event_id).status, row(event_id).attempts) == (Status.RETRY, 1)


def test_what_resists_its_cancellation_is_handed_back(caplog: pytest.LogCaptureFixture) -> None:
    entered, go_on = threading.Event(), threading.Event()

    async def stubborn(event: outbox.Event) -> None:
        entered.set()
        while not go_on.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    with listening(stubborn), worker() as running:
        try:
            (event_id,) = insert()
            assert entered.wait(15)
            assert running.finish(at_once) is False
            running.hand_back(1.0)
            assert facts(event_id) == (None, None, 0, 0, Status.NEW)
            assert lease_ends_in(event_id) <= 1
        finally:
            go_on.set()
        wait_until(threads_have_ended)
        assert row(event_id).status == Status.NEW
    assert any(f"event handed back event_id={event_id}" in each for each in caplog.messages)


# -- how long a stop waits -----------------------------------------------------------------------


def test_a_spent_worker_claims_no_more() -> None:
    with listening(lambda event: None), outbox.Worker(max_events=1, purge=False) as running:
        insert()
        wait_until(lambda: running.is_spent)
        insert()
        assert perform(connection, running._engine.claimer.step()) > 0  # without a poll
    assert statuses() == {"DONE": 1, "NEW": 1}


def test_the_limit_of_a_stop_counts_from_the_first_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    for module in (main, supervisor):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    told = Signals()
    now += 60
    assert not is_late(told, 30, inf)
    told.receive()
    now += 29
    assert not is_late(told, 30, inf)  # the time counts from the signal
    now += 2
    assert is_late(told, 30, inf)
    assert not is_late(told, 3600, inf)
    told.receive()
    assert is_late(told, 3600, inf)
