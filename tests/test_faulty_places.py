"""Each place where the engine touches the database fails in turn, and nothing stalls."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxAttempt, OutboxEvent
from tests.faulty import ERRORS, Fault, failing
from tests.table import listening, statuses, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

# What the engine executes: a pattern of its SQL. Statements that no delivery depends on may fail
# each time.
ESSENTIAL = {
    "claim of events": r"locked_by = .*outbox_event|outbox_event.* locked_by = .*RETURNING",
    "claim of streams": r"outbox_stream.*(SET|UPDATE).*locked_by = %s",
    "settle of done": r"SET status = 1",
    "settle of the rest": r"last_error = COALESCE",
    "release of streams": r"UPDATE.*outbox_stream.*locked_by = NULL",
    "pauses": r"SELECT.*outbox_pause",
}
OTHER = {
    "history": r"INSERT INTO \S*outbox_attempt",
    "statistics": r"outbox_statistics",
    "row of the worker": r"outbox_worker",
    "leases of the purge": r"outbox_lease",
    "inbox": r"outbox_inbox",
}
LOST = "the answer is lost"
KINDS = ["OperationalError", "UnicodeEncodeError", "unprintable", LOST]


def lost() -> Exception:
    return OperationalError(2013, "Lost connection to server during query")


def check(*, attempts: bool) -> None:
    dead = OutboxEvent.objects.filter(status=Status.DEAD)
    assert {*dead.values_list("attempts", flat=True)} == {2}
    if attempts:
        entries = OutboxAttempt.objects.exclude(kind="lost").order_by("event_id", "id")
        found = [*entries.values_list("kind", "number")]
        assert found == [("failed", 1), ("dead", 2)] * dead.count()


def fail(event: outbox.Event) -> None:
    raise ValueError


def run(fault: Fault, *, by_drain: bool) -> None:
    """Deliver events that are done, that fail, and that have a key."""
    with (
        failing(fault),
        listening(lambda event: None),
        listening(fail, "order.bad", retry=outbox.Fixed(0, max_attempts=2)),
    ):
        write(6)
        write(4, "order.bad")
        write(3, key="a")
        write(1, "order.bad", key="b")
        until = {"DONE": 9, "DEAD": 5}
        if by_drain:
            for _ in range(4):
                outbox.drain()
            assert statuses() == until
            return
        with outbox.Worker() as worker:
            wait_until(lambda: statuses() == until, what=f"{until}")
            write(6)
            wait_until(lambda: statuses() == {"DONE": 15, "DEAD": 5})
            wait_until(lambda: not worker.depths()["held"])
            assert worker.lost_threads == ()


@pytest.fixture(autouse=True)
def quick(settings: Any) -> None:
    settings.OUTBOX = {
        "WORKERS": 2,
        "PROBE_INTERVAL": 0.05,
        "POLL_INTERVAL": 0.2,
        "LEASE": 3,
        "PURGE_INTERVAL": 0.2,
    }


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("place", ESSENTIAL)
def test_what_fails_a_few_times_is_done_later(place: str, how: str) -> None:
    error = lost if how == LOST else ERRORS[how]
    fault = Fault(ESSENTIAL[place], error, times=3, after=how == LOST)
    run(fault, by_drain=False)
    assert fault.count
    check(attempts=True)


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("place", OTHER)
def test_what_always_fails_keeps_no_event(place: str, how: str) -> None:
    error = lost if how == LOST else ERRORS[how]
    fault = Fault(OTHER[place], error, after=how == LOST)
    run(fault, by_drain=False)
    assert fault.count
    check(attempts=place != "history")


@pytest.mark.parametrize("how", KINDS)
def test_a_thread_of_housekeeping_that_always_fails_keeps_no_event(how: str) -> None:
    fault = Fault("", lost if how == LOST else ERRORS[how], after=how == LOST, thread="purger")
    run(fault, by_drain=False)
    assert fault.count
    check(attempts=True)


@pytest.mark.parametrize("how", ["OperationalError", "RuntimeError", LOST])
@pytest.mark.parametrize("place", ["settle of done", "settle of the rest", "history"])
def test_a_drain_goes_on_too(place: str, how: str) -> None:
    error = lost if how == LOST else ERRORS[how]
    fault = Fault({**ESSENTIAL, **OTHER}[place], error, times=3, after=how == LOST)
    run(fault, by_drain=True)
    assert fault.count
    check(attempts=place != "history")
