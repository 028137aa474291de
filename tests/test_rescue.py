"""Workers that are killed from outside: the innocent events that they held live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream, OutboxWorker
from django_outbox.signals import event_rescued
from django_outbox.worker import claimer
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
    settings: Any, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """Other events are delivered; the suspect is run alone once the long listener has ended."""
    monkeypatch.setattr(claimer, "RETRY_WAITS", (0.5, 0.5))
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
        outbox.Worker(workers=2),
    ):
        try:
            write(1, "order.long")
            wait_until(lambda: long.entered)
            suspect = put_suspect(key)
            wait_until(suspect_waits, what="the worker's row tells")
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
    (event_id,) = keyed(key, event_type="order.suspect")
    OutboxStream.objects.filter(stream__of_key=key).update(**SUSPECT)
    return event_id


def test_a_slow_suspect_does_not_keep_the_others_waiting(settings: Any) -> None:
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
