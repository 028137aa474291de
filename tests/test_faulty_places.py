"""Each place where a drain touches the database fails in turn, and nothing stalls."""

from __future__ import annotations

import pytest
from django.db import OperationalError

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.faulty import ERRORS, Fault, failing
from tests.table import histories, listening, statuses, write

pytestmark = pytest.mark.django_db(transaction=True)

# What a drain executes: a pattern of its SQL. Simulated histories have this of workers.
PLACES = {"settle of done": r"SET status = 1", "settle of the rest": r"last_error = COALESCE"}
LOST = "the answer is lost"


def lost() -> Exception:
    return OperationalError(2013, "Lost connection to server during query")


def check() -> None:
    dead = OutboxEvent.objects.filter(status=Status.DEAD)
    assert {*dead.values_list("attempts", flat=True)} == {2}
    found = [(each.kind, each.number) for each in histories()]
    assert found == [("failed", 1), ("dead", 2)] * dead.count()


def fail(event: outbox.Event) -> None:
    raise ValueError


@pytest.mark.parametrize("how", ["OperationalError", "RuntimeError", LOST])
@pytest.mark.parametrize("place", PLACES)
def test_a_drain_goes_on_whatever_fails(place: str, how: str) -> None:
    """It delivers events that are done, that fail, and that have a key."""
    error = lost if how == LOST else ERRORS[how]
    fault = Fault(PLACES[place], error, times=3, after=how == LOST)
    with (
        failing(fault),
        listening(lambda event: None),
        listening(fail, "order.bad", retry=outbox.Fixed(0, max_attempts=2)),
    ):
        write(6)
        write(4, "order.bad")
        write(3, key="a")
        write(1, "order.bad", key="b")
        for _ in range(4):
            outbox.drain()
    assert statuses() == {"DONE": 9, "DEAD": 5}
    assert fault.count
    check()
