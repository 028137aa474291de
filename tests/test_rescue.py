"""Workers that are killed from outside: the innocent events that they held live."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.clocks import monotonic
from django_outbox.delivery.lease import Lease
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream, OutboxWorker
from django_outbox.signals import event_rescued
from django_outbox.worker.queues import Held
from django_outbox.worker.suspects import Trial
from tests.fleet import Fleet, wait_until
from tests.table import insert, keyed, listening, now, row, statuses, write
from tests.waiting import Gate

pytestmark = pytest.mark.django_db(transaction=True)


PROCESSES = 3


MAX_RESCUES = 5


OUTBOX = {
    "LEASE": 0.8,
    "DRAIN_TIMEOUT": 0.5,
    "WORKERS": 2,
    "POLL_INTERVAL": 0.2,
    "POLL_BATCH_SIZE": 50,
    "COLD_QUEUE_CAPACITY": 20,
    "MAX_RESCUES": MAX_RESCUES,
}


SUSPECT: dict[str, Any] = {
    "rescues": 2,
    "locked_by": "a lost worker",
}  # two workers were lost with it before


@pytest.fixture
def fleet(database_env: dict[str, str], tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(database_env, tmp_path, **OUTBOX)
    yield fleet
    fleet.kill_all()


def pending() -> int:
    return OutboxEvent.objects.pending().count()


def rescues() -> Counter[int]:
    return Counter(OutboxEvent.objects.values_list("rescues", flat=True))


def test_suspects_do_not_starve_the_others(fleet: Fleet) -> None:
    suspects = insert(6, due=-60, event_type="order.counted", payload='{"seconds": 0.2}', **SUSPECT)
    others = insert(300, due=-1, event_type="order.counted", payload='{"seconds": 0.005}')
    worker = fleet.start()
    wait_until(lambda: not pending(), what="an event pending")
    assert fleet.end(worker) == 0
    starts = [line for line in fleet.lines() if line.phase == "start"]
    assert {line.id for line in starts} == {*suspects, *others}
    assert statuses() == {"DONE": 306}
    turns = [line.id in suspects for line in starts]
    between = "".join("s" if turn else "." for turn in turns)
    assert "ss" not in between.rstrip("s"), between
    assert all(line.held == 0 for line in starts if line.id in suspects)


def suspect_waits() -> bool:
    """Return whether the worker's row says that an event is waiting to be run alone."""
    return any(
        '"suspect_waits": true' in info
        for info in OutboxWorker.objects.values_list("info", flat=True)
    )


@pytest.mark.parametrize("key", [None, "a"])
def test_neighbours_go_on_while_a_suspect_waits_beside_a_long_listener(
    settings: Any, key: str | None
) -> None:
    """Other events are delivered; the suspect is run alone once the long listener has ended."""
    settings.OUTBOX = {**OUTBOX, "LEASE": 1.5, "POLL_INTERVAL": 0.2, "MODE": "multi_node"}
    long, suspects, quick = Gate(), list[str](), list[str]()

    def run(event: outbox.Event) -> None:
        suspects.append(event.event_id)
        in_flight.append(
            OutboxEvent.objects.filter(status=Status.NEW)
            .exclude(locked_by=None)
            .exclude(pk=event.event_id)
            .count()
        )

    in_flight: list[int] = []
    with (
        listening(long, "order.long"),
        listening(run, "order.suspect"),
        listening(lambda event: quick.append(event.event_id)),
        outbox.Worker(workers=2) as worker,
    ):
        try:
            write(1, "order.long")
            wait_until(lambda: long.entered)
            suspect = put_suspect(key)
            wait_until(suspect_waits, what="the worker's row tells")
            wait_until(lambda: worker._claimer._trial._not_before > 0, what="a trial given up")
            for n in range(20):
                write(1)
                wait_until(lambda n=n: len(quick) > n, what="a neighbour")  # type: ignore[misc]
            assert suspects == []
        finally:
            long.open.set()
        wait_until(lambda: suspects == [suspect], what="the suspect, alone")
        wait_until(lambda: not pending())
        wait_until(lambda: not suspect_waits(), what="the row says so no more")
    assert in_flight == [0]
    assert row(suspect).status == Status.DONE


def put_suspect(key: str | None) -> str:
    if key is None:
        return insert(event_type="order.suspect", **SUSPECT)[0]
    (event_id,) = keyed(key, event_type="order.suspect", rescues=2)
    OutboxStream.objects.filter(key=key).update(locked_by="a lost worker")
    return event_id


def test_a_slow_suspect_does_not_keep_the_others_for_longer_than_a_trial(settings: Any) -> None:
    settings.OUTBOX = {**OUTBOX, "LEASE": 1.5}
    slow, quick = Gate(), list[str]()
    insert(event_type="order.slow", **SUSPECT)
    with (
        listening(slow, "order.slow"),
        listening(lambda event: quick.append(event.event_id)),
        outbox.Worker(workers=2),
    ):
        try:
            wait_until(lambda: slow.entered)
            ids = write(10)
            wait_until(lambda: {*quick} == {*ids}, what="the neighbours")
        finally:
            slow.open.set()
        wait_until(lambda: not pending())
    assert len(slow.entered) == 1


def test_trials_become_rarer_while_a_suspect_cannot_be_run_alone() -> None:
    """All trials together take at most a twentieth of the time, and ever less."""
    held = Held(30)
    held.add([object_with_id("a")])
    trial, rests = Trial(lease=30, held=held), []
    for _ in range(8):
        trial.schedule(monotonic())
        trial.give_up()
        rests.append(round(trial._not_before - monotonic()))
        assert not trial.is_allowed(monotonic())
    assert rests == [100, 200, 400, 800, 1600, 3200, 3600, 3600]
    held.drop(held.unstarted())
    assert trial.is_allowed(monotonic())  # nothing is in flight


def object_with_id(event_id: str) -> Lease:
    return Lease(
        row=(),
        positions={},
        event_id=event_id,
        event_type="x",
        aggregate_type="y",
        owner="me",
        rescued=False,
        rescues=0,
        progress=None,
        deadline=monotonic() + 10,
    )


def test_little_is_in_hand_while_a_lost_workers_events_are_taken_over(settings: Any) -> None:
    """If this worker were lost too, each event it has leased would have to be tried alone."""
    settings.OUTBOX = {**OUTBOX, "COLD_QUEUE_CAPACITY": 1000, "POLL_BATCH_SIZE": 500}
    lost = insert(300, due=-2, locked_by="a lost worker")
    insert(300, due=-1)
    in_hand: list[int] = []

    def listener(event: outbox.Event) -> None:
        if event.event_id in lost and len(in_hand) < 60:
            in_hand.append(OutboxEvent.objects.leased().exclude(locked_by="a lost worker").count())

    with listening(listener), outbox.Worker(workers=2):
        wait_until(lambda: not pending(), what="an event pending")
    assert max(in_hand) <= 30  # one recovery batch, plus events that are running or being settled
    assert rescues() == {1: 300, 0: 300}


def test_a_lease_that_ends_while_a_worker_is_idle_is_noticed_at_once(settings: Any) -> None:
    settings.OUTBOX = {**OUTBOX, "POLL_INTERVAL": 1000, "PROBE_INTERVAL": 1000, "DOORBELL": None}
    with listening(lambda event: None), outbox.Worker() as worker:
        write()
        wait_until(lambda: not pending(), what="an event pending")  # and so its probation is over
        insert(due=0.5, locked_by="a lost worker")
        worker.poll()
        wait_until(lambda: not pending(), what="the lost worker's event")


class Calls:
    """A listener whose first two calls wait for their gates; the first then asks for a retry."""

    def __init__(self) -> None:
        self.begun, self.gates = list[int](), [threading.Event(), threading.Event()]

    def __call__(self, event: outbox.Event) -> None:
        number = len(self.begun)
        self.begun.append(number)
        if number < len(self.gates):
            self.gates[number].wait(60)
        if number == 0:
            raise outbox.RetryAfter(0)

    def end(self) -> None:
        for gate in self.gates:
            gate.set()


def test_an_event_claimed_back_from_a_lost_worker_is_not_called_next_to_the_call_that_runs(
    settings: Any,
) -> None:
    settings.OUTBOX = OUTBOX
    calls = Calls()
    with listening(calls), outbox.Worker(workers=2):
        try:
            (event_id,) = write()
            wait_until(lambda: calls.begun == [0])
            OutboxEvent.objects.update(locked_by="another", available_at=now())  # which died
            wait_until(lambda: row(event_id).rescues == 1)
            insert(3, event_type="nobody.listens")  # claims that would start it
            wait_until(lambda: OutboxEvent.objects.filter(locked_by=None).count() == 3)
            assert calls.begun == [0]
            calls.gates[0].set()
            wait_until(lambda: calls.begun == [0, 1], what="calls, the second after the first")
        finally:
            calls.end()
        wait_until(lambda: row(event_id).status == Status.DONE)
    assert calls.begun == [0, 1]
    assert (row(event_id).attempts, row(event_id).rescues) == (1, 0)


def test_a_call_on_a_lost_lease_does_not_release_the_event_that_this_worker_runs_anew(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = OUTBOX
    calls = Calls()
    with listening(calls), outbox.Worker(workers=2):
        try:
            (event_id,) = write()
            wait_until(lambda: calls.begun == [0])
            # Another worker had it, counted a failure, leased it again and died.
            OutboxEvent.objects.update(locked_by="another", available_at=now(), attempts=1)
            wait_until(lambda: calls.begun == [0, 1], what="calls, one of them anew")
            calls.gates[0].set()
            wait_until(lambda: "settles refused" in caplog.text)
            assert calls.begun == [0, 1]
            assert row(event_id).locked_by
        finally:
            calls.end()
        wait_until(lambda: not pending())
    assert calls.begun == [0, 1]
    assert row(event_id).status == Status.DONE


@pytest.fixture
def told() -> Iterator[list[tuple[str, int]]]:
    """Collect (event id, rescues) of each ``event_rescued`` signal."""
    found: list[tuple[str, int]] = []

    def receive(event: outbox.Event, rescues: int, **facts: Any) -> None:
        found.append((event.event_id, rescues))

    event_rescued.connect(receive)
    yield found
    event_rescued.disconnect(receive)


def test_a_rescue_is_announced_and_logged_once(
    told: list[tuple[str, int]], settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = OUTBOX
    insert(3)
    (event_id,) = insert(locked_by="a lost worker", rescues=0)
    with listening(lambda event: None), outbox.Worker():
        wait_until(lambda: not pending(), what="an event pending")
    assert told == [(event_id, 1)]
    logged = [each.getMessage() for each in caplog.records if "rescued" in each.message]
    assert logged == [f"rescued event_id={event_id} event_type=order.placed rescues=1"]
    assert row(event_id).rescues == 1


@pytest.mark.parametrize("answer", ["retry", "defer"])
def test_any_outcome_of_a_listener_clears_the_rescues(
    told: list[tuple[str, int]], settings: Any, answer: str
) -> None:
    """The process survived the listener, so this event did not cause the earlier losses."""
    settings.OUTBOX = OUTBOX
    (event_id,) = insert(**{**SUSPECT, "rescues": 3})

    def respond(event: outbox.Event) -> outbox.Defer:
        if answer == "retry":
            raise outbox.RetryAfter(3600)
        return outbox.Defer(3600)

    with listening(respond), outbox.Worker():
        wait_until(lambda: row(event_id).locked_by is None, what="the lease")
    after = row(event_id)
    assert told == [(event_id, 4)]
    assert after.rescues == 0
    expected = (Status.RETRY, 1) if answer == "retry" else (Status.NEW, 0)
    assert (after.status, after.attempts) == expected


def test_one_lost_worker_too_many_is_dead_without_another_run(
    told: list[tuple[str, int]], settings: Any
) -> None:
    settings.OUTBOX = OUTBOX
    (event_id,) = insert(**{**SUSPECT, "rescues": MAX_RESCUES - 1})
    runs: list[str] = []

    def run(event: outbox.Event) -> None:
        runs.append(event.event_id)

    with listening(run), outbox.Worker():
        wait_until(lambda: not pending(), what="an event pending")
    assert (row(event_id).status, row(event_id).attempts) == (Status.DEAD, 0)
    assert row(event_id).last_error == f"lost {MAX_RESCUES} workers"
    assert told == [(event_id, MAX_RESCUES)]
    assert not runs


def test_a_healthy_suspect_is_delivered_alone_and_its_neighbours_go_on(fleet: Fleet) -> None:
    before = insert(60, due=-2, event_type="order.counted")
    (suspect,) = insert(due=-1, event_type="order.counted", **SUSPECT)
    after = insert(60, due=0, event_type="order.counted")
    worker = fleet.start()
    wait_until(lambda: not pending(), what="an event pending")
    assert fleet.end(worker) == 0
    held = {line.id: line.held for line in fleet.lines() if line.phase == "start"}
    assert statuses() == {"DONE": 121}
    assert {*held} == {*before, suspect, *after}
    assert held[suspect] == 0
    assert max(held[event_id] or 0 for event_id in after) > 0, "nobody ever had a neighbour"
    assert (row(suspect).rescues, row(suspect).attempts) == (3, 0)


def test_two_workers_do_not_take_a_suspect_each_beside_what_they_hold(fleet: Fleet) -> None:
    suspects = insert(4, event_type="order.counted", payload='{"seconds": 0.3}', **SUSPECT)
    insert(200, event_type="order.counted", payload='{"seconds": 0.01}')
    workers = fleet.start_several(2)
    wait_until(lambda: not pending(), what="an event pending")
    assert fleet.end(workers) == 0
    starts = [line for line in fleet.lines() if line.phase == "start"]
    assert Counter(line.id for line in starts).most_common(1)[0][1] == 1
    assert [line.held for line in starts if line.id in suspects] == [0] * 4
