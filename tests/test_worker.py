"""``Worker`` with real threads on a real database."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox import signals
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from django_outbox.worker.held import Held
from django_outbox.writing.on_commit import hot_queues
from tests.surroundings import gated, heard
from tests.table import in_thread, insert, lease_ends_in, listening, row, statuses, steal, write
from tests.waiting import MovedClock, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parent.parent
SOON = {"POLL_INTERVAL": 0.2, "PROBE_INTERVAL": 0.05, "LOCK_WAIT": 1}
AT_ONCE = outbox.Fixed(delay=0.01)


@pytest.fixture(autouse=True)
def soon(settings: Any) -> None:
    """Use short intervals, so that no test waits long for a timer."""
    settings.OUTBOX = SOON


def wait_for_statuses(within: float = 20, **expected: int) -> None:
    wait_until(lambda: statuses() == expected, within=within, what=f"statuses {expected}")


def engine_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("outbox-")]


# -- delivering ------------------------------------------------------------------------------------


def test_22_a_retry_is_on_time_and_not_at_the_poll(settings: Any) -> None:
    settings.OUTBOX = {"POLL_INTERVAL": 60, "PROBE_INTERVAL": 60}
    started: list[float] = []

    def listener(event: outbox.Event) -> None:
        started.append(time.monotonic())
        if len(started) == 1:
            raise ValueError("once")

    with listening(listener, retry=outbox.Fixed(delay=0.5)), outbox.Worker():
        write()
        wait_for_statuses(DONE=1)  # the poll is a minute away, which is later than this waits
    assert started[1] - started[0] > 0.2


def test_w7_229_at_most_workers_at_once() -> None:
    running, most, lock = [0], [0], threading.Lock()
    together = threading.Barrier(3)

    def listener(event: outbox.Event) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        together.wait(60)
        with lock:
            running[0] -= 1

    with listening(listener), outbox.Worker(workers=3):
        write(60)
        wait_for_statuses(DONE=60)
    assert most[0] == 3


# -- capacity --------------------------------------------------------------------------------------


def test_230_410_slow_listeners_stop_the_claims(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "COLD_QUEUE_CAPACITY": 5}
    insert(60, due=-1)
    with gated() as gate, outbox.Worker(workers=2) as worker:
        wait_until(lambda: len(gate.entered) == 2)
        assert OutboxEvent.objects.leased().count() <= 2 + 5
        wait_until(lambda: OutboxEvent.objects.leased().count() == 2, what="the rest given back")
        write(20)  # notifies, and fills the hot queue
        in_thread(lambda: write(20)).result(10)
        (gate_of_queue,) = worker._gates
        wait_until(lambda: not len(gate_of_queue.offers), what="the offers left to others")
        assert OutboxEvent.objects.leased().count() == 2
        gate.open.set()
        wait_for_statuses(DONE=100)
    assert len(gate.entered) == len(set(gate.entered)) == 100


# -- stop and start --------------------------------------------------------------------------------


def test_444_a_stuck_listener_does_not_hold_stop() -> None:
    with gated() as gate:
        worker = outbox.Worker(workers=2)
        worker.start()
        (stuck,) = write()
        wait_until(lambda: gate.entered)
        assert worker.stop(timeout=0.2) is False  # True if it waited for the listener
        assert row(stuck).locked_by is None  # not the lease of a lost worker
        assert lease_ends_in(stuck) > 0  # it may still run: no other worker claims it before


def test_stop_before_start_is_harmless() -> None:
    worker = outbox.Worker()
    assert worker.stop() is True
    with pytest.raises(RuntimeError, match="Make a new Worker"):
        worker.start()


def test_422_one_worker_per_alias_and_process() -> None:
    with outbox.Worker():
        second = outbox.Worker()
        with pytest.raises(RuntimeError, match="already has a worker"):
            second.start()
        assert second.stop() is True
        with listening(lambda event: None):
            write()
            wait_for_statuses(DONE=1)  # the first still works


def test_411_a_part_that_cannot_start_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = outbox.Worker()
    started: list[str] = []

    class Unstartable:
        def start(self) -> None:
            started.append("asked")
            raise OSError("no more threads")

    monkeypatch.setattr(worker, "_parts", [*worker._parts, Unstartable()])
    with pytest.raises(OSError, match="no more threads"):
        worker.start()
    assert started == ["asked"]
    wait_until(lambda: engine_threads() == [])
    assert "default" not in hot_queues.by_alias


# -- nothing leaks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "a"])
def test_what_is_due_again_before_its_lease_is_dropped_is_a_new_lease(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise dropping the old lease forgets the new one too, and the event waits for its end."""
    calls: list[str] = []
    claimed_again = threading.Event()
    add, settled = Held.add, Held.settled

    def note(held: Held, runs: Any) -> list[Any]:
        found = add(held, runs := [*runs])
        if runs and calls:
            claimed_again.set()
        return found

    def late(held: Held, part: Any) -> None:
        if len(calls) == 1:
            claimed_again.wait(2)
        settled(held, part)

    def fails_once(event: outbox.Event) -> None:
        calls.append(event.event_id)
        if len(calls) == 1:
            raise ConnectionError

    monkeypatch.setattr(Held, "add", note)
    monkeypatch.setattr(Held, "settled", late)
    with listening(fails_once, retry=outbox.Fixed(0)), outbox.Worker():
        write(key=key)
        wait_for_statuses(DONE=1)
    assert len(calls) == 2


def test_206_stop_and_start_may_be_repeated() -> None:
    worker = outbox.Worker()
    worker.start()
    worker.start()
    assert len([name for name in engine_threads() if "claimer" in name]) == 1
    assert worker.stop() is True
    assert worker.stop() is True
    assert engine_threads() == []
    with pytest.raises(RuntimeError, match="Make a new Worker"):
        worker.start()
    with outbox.Worker():
        write()  # without a listener it waits for the grace period
        wait_until(lambda: OutboxEvent.objects.exclude(last_error=None).exists())


def test_14_a_slow_listener_keeps_its_lease(settings: Any, clock: MovedClock) -> None:
    """The heartbeat renews a lease once a third of it is over, here by the worker's clock."""
    settings.OUTBOX = {**SOON, "LEASE": 12}
    with gated() as gate, outbox.Worker(workers=2):
        (event_id,) = write()
        wait_until(lambda: gate.entered)
        claimed = row(event_id)
        clock.advance(6)
        wait_until(lambda: row(event_id).available_at > claimed.available_at, what="a renewal")  # type: ignore[operator]
        assert row(event_id).locked_at == claimed.locked_at  # renewed, not claimed again
        gate.open.set()
        wait_for_statuses(DONE=1)
    assert gate.entered == [event_id]
    assert row(event_id).rescues == 0


def test_w16_a_lost_lease_is_counted_and_the_worker_carries_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with heard(signals.lease_lost) as lost, gated() as gate, outbox.Worker(workers=1):
        (stolen,) = write()
        wait_until(lambda: gate.entered)
        steal(stolen)
        gate.open.set()
        wait_until(lambda: lost)
        (other,) = write()
        wait_until(lambda: row(other).status == Status.DONE)
    assert [each["count"] for each in lost] == [1]
    after = row(stolen)
    assert (after.status, after.locked_by, after.done_at) == (Status.NEW, "thief", None)
    assert "lost leases" in caplog.text
