"""Workers that are killed from outside: the innocent events that they held live."""

from __future__ import annotations

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
from tests.surroundings import heard
from tests.table import insert, keyed, listening, row, write
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
    OutboxStream.objects.filter(stream__of_key=key).update(locked_by="a lost worker")
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
        id=event_id,
        event_id=event_id,
        event_type="x",
        aggregate_type="y",
        owner="me",
        locked_at=None,
        rescued=False,
        rescues=0,
        deadline=monotonic() + 10,
    )


def test_239_little_is_in_hand_while_a_lost_workers_events_are_taken_over(settings: Any) -> None:
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


def test_a_rescue_is_announced_and_logged_once(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = OUTBOX
    insert(3)
    (event_id,) = insert(locked_by="a lost worker", rescues=0)
    with heard(event_rescued) as told, listening(lambda event: None), outbox.Worker():
        wait_until(lambda: not pending(), what="an event pending")
    assert [(each["event"].event_id, each["rescues"]) for each in told] == [(event_id, 1)]
    logged = [each.getMessage() for each in caplog.records if "rescued" in each.message]
    assert logged == [
        f"rescued event_id={event_id} event_type=order.placed listener='order.placed' rescues=1"
    ]
    assert row(event_id).rescues == 1
