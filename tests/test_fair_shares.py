"""Fair shares: a worker leases what it will start soon and leaves the rest to idle workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import connection

import django_outbox as outbox
from django_outbox import hooks
from django_outbox.clocks import monotonic
from django_outbox.conf import Settings
from django_outbox.delivery.lease import Lease, columns_of, lease_from_row, row_run
from django_outbox.events import Event
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from django_outbox.sql.values import FULL, Branch, Claim
from django_outbox.worker.effects import perform
from django_outbox.worker.gate import BUSY_AFTER
from django_outbox.worker.gate import Gate as QueueGate
from django_outbox.worker.held import Held
from django_outbox.worker.leases import Releases
from django_outbox.worker.pauses import KnownPauses
from django_outbox.worker.polling import Wakeup
from django_outbox.worker.ready import Offer, Offers
from django_outbox.worker.runs import Runs
from tests.fleet import wait_until
from tests.surroundings import gated
from tests.table import in_thread, insert, keyed, listening, row, statuses, stream, write
from tests.unit.scripted import lease
from tests.waiting import Gate

pytestmark = pytest.mark.django_db(transaction=True)

SOON_AGAIN: dict[str, Any] = {"POLL_INTERVAL": 0.2, "PROBE_INTERVAL": 0.1, "DRAIN_TIMEOUT": 1}


def leased() -> int:
    return OutboxEvent.objects.filter(locked_by__isnull=False).count()


@contextmanager
def busy_worker(gate: Gate, threads: int = 2) -> Iterator[outbox.Worker]:
    """Run a worker whose threads have all been busy with a call for a while."""
    with outbox.Worker(workers=threads) as worker:
        try:
            write(threads, "order.gated")
            wait_until(lambda: len(gate.entered) == threads, what="a call on each thread")
            last_start = worker._held.load("default").last_start
            wait_until(lambda: monotonic() > last_start + 2 * BUSY_AFTER, what="busy")
            yield worker
        finally:
            gate.open.set()


def gate_of(settings: Settings, held: Held) -> QueueGate:
    """Return the gate of a worker with one queue."""
    return QueueGate(
        settings.queues["default"],
        settings=settings,
        alias="default",
        most_bytes=settings.PREFETCH_BYTES,
        held=held,
        known_pauses=KnownPauses(),
        wakeup=Wakeup(),
    )


# -- a busy worker ---------------------------------------------------------------------------------


def test_a_worker_whose_threads_are_all_busy_claims_nothing(settings: Any) -> None:
    settings.OUTBOX = SOON_AGAIN
    with gated("order.gated") as gate, listening(lambda event: None), busy_worker(gate) as worker:
        insert(20)
        write(20)  # offered to this process
        worker.poll()
        wait_until(
            lambda: not len(worker._gates.by_queue["default"].offers),
            what="the offers left to others",
        )
        assert leased() == 2
        gate.open.set()
        wait_until(lambda: statuses() == {"DONE": 42}, what="DONE")


def test_a_busy_worker_rings_for_what_was_offered_to_it(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[str] = []
    monkeypatch.setattr("django_outbox.doorbell.ring", lambda found: rung.append(found.alias))
    settings.OUTBOX = {**SOON_AGAIN, "POLL_INTERVAL": 60, "PROBE_INTERVAL": 60}
    with gated("order.gated") as gate, listening(lambda event: None), busy_worker(gate):
        rung.clear()
        write(5)
        wait_until(lambda: rung, what="a ring")
        assert leased() == 2
        gate.open.set()
        wait_until(lambda: statuses() == {"DONE": 7}, what="DONE, though nobody else runs")


def test_what_waits_too_long_is_released_with_its_old_due_time(settings: Any) -> None:
    """The worker claimed these events while its threads were free; then all threads became busy."""
    settings.OUTBOX = SOON_AGAIN
    ids = insert(8, due=-5, event_type="order.gated")
    due = {each: row(each).available_at for each in ids}
    with gated("order.gated") as gate, outbox.Worker(workers=2):
        wait_until(lambda: len(gate.entered) == 2)
        wait_until(lambda: leased() == 2, what="the others released")
        waiting = [row(each) for each in ids if each not in gate.entered]
        assert {each.event_id: each.available_at for each in waiting} == {
            each: due[each] for each in ids if each not in gate.entered
        }
        assert {
            (each.locked_by, each.locked_at, each.attempts, each.rescues) for each in waiting
        } == {(None, None, 0, 0)}
        gate.open.set()
        wait_until(lambda: statuses() == {"DONE": 8}, what="DONE")
    assert sorted(gate.entered) == sorted(ids)  # each once


def test_no_thread_starts_what_is_just_being_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two workers would run it at the same time."""
    (event_id,) = insert(due=-9)
    found = dialect_of(connection).claim(Claim(me="me", lease=30, branches=[Branch("default", 1)]))
    (leased_row,) = found.rows
    run = row_run(leased_row, deadline=monotonic() + 20, me="me")
    waiting = lease_from_row(leased_row, columns_of(FULL), run=run, me="me")
    waiting.claimed_at -= 10
    held = Held(30)
    held.add_rows([waiting])
    drop, starts = held.drop, list[Future[list[Lease]]]()

    def meanwhile(leases: Iterable[Lease]) -> None:
        starts.append(in_thread(lambda: held.start([waiting])))
        futures_wait(starts, timeout=0.5)
        drop(leases)

    monkeypatch.setattr(held, "drop", meanwhile)
    runs = Runs(me="me", settings=Settings(), held=held, pools=Mock(), wakeup=Wakeup())
    releases = Releases(alias="default", runs=runs)
    late = gate_of(Settings(), held).to_release(monotonic())
    assert perform(connection, releases.give_back(late)) == ([waiting], 0)
    assert starts[0].result(20) == []
    assert row(event_id).locked_by is None


def test_a_stream_whose_head_waits_too_long_is_left_to_others(settings: Any) -> None:
    settings.OUTBOX = SOON_AGAIN
    with gated("order.gated") as gate:
        for key in "abcd":
            keyed(key, 2, event_type="order.gated")
        with outbox.Worker(workers=2):
            wait_until(lambda: len(gate.entered) == 2)
            idle = [key for key in "abcd" if row_of(key).event_id not in gate.entered]
            wait_until(lambda: all(stream(key).locked_by is None for key in idle), what="released")
            wait_until(lambda: OutboxStream.objects.due().count() == 2, what="due again")
            gate.open.set()
            wait_until(lambda: statuses() == {"DONE": 8}, what="DONE")
    assert len(gate.entered) == 8


def row_of(key: str) -> OutboxEvent:
    """Return the first event of a key."""
    return OutboxEvent.objects.filter(key=key).order_by("seq")[0]


# -- memory ----------------------------------------------------------------------------------------


def test_payloads_in_memory_stay_within_prefetch_bytes(settings: Any) -> None:
    size, budget = 2_000, 60_000
    settings.OUTBOX = {**SOON_AGAIN, "PREFETCH_BYTES": budget}
    insert(200, payload='"' + size * "x" + '"')
    seen: list[int] = []

    def note(event: outbox.Event) -> None:
        seen.append(worker._held.load("default").payload_bytes)

    with listening(note):
        worker = outbox.Worker(workers=4)
        with worker:
            wait_until(lambda: statuses() == {"DONE": 200}, what="DONE")
    assert len(seen) == 200
    assert size <= max(seen) <= budget + size
    assert worker._held.load("default").payload_bytes == 0


def test_offers_are_bounded_by_their_payloads_too() -> None:
    woken: list[None] = []
    wakeup = Wakeup()
    wakeup.wake = lambda: woken.append(None)
    offers = Offers(100, most_bytes=2500, lock=nullcontext(), wakeup=wakeup)
    event = Event(event_type="x", payload="y" * 998).as_delivered(
        '"' + "y" * 998 + '"', hooks.JSON.loads
    )
    offer = Offer(event.event_id, None, event)
    assert [offers.offer(offer) for _ in range(5)] == [True, True, True, False, False]
    assert len(offers.take(2)) == 2
    assert [offers.offer(offer), offers.offer(offer), offers.offer(offer)] == [True, True, False]
    assert len(woken) == 5


def test_a_busy_thread_is_told_from_an_idle_one() -> None:
    gate = gate_of(Settings(), held := Held(30))
    held.load("default").last_start = monotonic() - 2 * BUSY_AFTER
    assert gate.room(monotonic())  # nothing is in flight
    held.add_rows([lease()])
    assert not gate.room(monotonic())
    taker = in_thread(lambda: gate.ready.take(30))
    wait_until(lambda: gate.ready.idle == 1, what="an idle thread")
    assert gate.room(monotonic())
    gate.ready.wake()
    assert taker.result(30) is None
    assert gate.ready.idle == 0
