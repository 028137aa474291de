"""Looks at the table for people: what state events are in, at a cost that does not grow with it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from tests.plans import analyze, large_steps
from tests.table import insert, keyed, now

pytestmark = pytest.mark.django_db

NEW, DONE, RETRY, DEAD = Status


def dead(low: str | None = None, high: str | None = None, *, most: int = 100) -> list[str]:
    return dialect_of(connection).dead(span=(low, high), most=most)


def newest_first(ids: list[str]) -> list[str]:
    return sorted(ids, reverse=True)


def test_dead_events_are_found_with_and_without_a_key_newest_first() -> None:
    expected = newest_first(
        [
            *insert(3, due=None, status=DEAD),
            *keyed("k", 2, status=DEAD),
            *insert(2, due=None, status=DEAD),
        ]
    )
    insert(3, due=None, status=DONE)
    keyed("k", 3, status=DONE)
    insert(3)
    assert dead() == expected
    assert dead(most=4) == expected[:4]
    assert dead(expected[4], expected[2]) == expected[2:5]
    assert dead(high=expected[-1]) == expected[-1:]


def test_what_waits_tells_what_for() -> None:
    """A lease is neither a plan nor a retry."""
    insert(due=-5)
    insert(due=50, status=RETRY, locked_by="w1")
    insert(due=50, locked_by="w1")
    [later], [sooner] = insert(due=90), insert(due=60)
    [retried] = insert(due=60, status=RETRY)
    assert [each.pk for each in OutboxEvent.objects.scheduled()] == [sooner, later]
    assert [each.pk for each in OutboxEvent.objects.retrying()] == [retried]


def test_the_first_events_that_wait_in_streams() -> None:
    first, second, _ = keyed("a", 3)
    failed, behind = [*keyed("b", status=RETRY), *keyed("b")]
    keyed("b", status=DEAD)
    keyed("c", 2)
    found = dialect_of(connection).waiting(streams=[":a", ":b"], most=2)
    assert {first, second, failed, behind} == {*found}


@pytest.fixture
def large_table() -> None:
    """5,000 finished events, with and without a key, and a few of each other kind."""
    insert(2500, due=None, status=DONE, done_at=now())
    keyed("k", 20, status=DEAD)
    insert(20, due=None, status=DEAD, done_at=now())
    clock = now()
    for n in range(25):
        keyed(f"k{n}", 100, due=None, status=DONE, done_at=clock)
    OutboxStream.objects.filter(stream__of_key="k").update(due_at=clock + timedelta(hours=1))
    for due in (-60, 60):
        insert(10, due=due, status=RETRY)
        insert(10, due=due)
    analyze(OutboxEvent)
    analyze(OutboxStream)


@pytest.mark.django_db(transaction=True)  # MariaDB's ANALYZE commits
def test_looks_read_no_whole_table(large_table: None) -> None:
    """Whatever is rare is found by an index: dead, due, leased, scheduled, retrying, waiting."""
    events = OutboxEvent.objects
    dialect = dialect_of(connection)
    works: dict[str, Callable[[], Any]] = {
        "dead": dead,
        "dead of a time": lambda: dead("01", "02"),
        "due": lambda: [*events.due()[:50]],
        "of ids": lambda: [*events.with_ids([*events.due().values_list("pk", flat=True)[:20]])],
        "leased": lambda: [*events.leased()[:50]],
        "scheduled": lambda: [*events.scheduled()[:50]],
        "retrying": lambda: [*events.retrying()[:50]],
        "waiting": lambda: dialect.waiting(streams=[":k", ":k1"], most=20),
    }
    found = large_steps(works)
    if connection.vendor == "mysql":
        # Of keyed events the index is read whole, not the table: that is what it costs there.
        found = {name: [step for step in steps if not step["key"]] for name, steps in found.items()}
    assert not {name: steps for name, steps in found.items() if steps}
