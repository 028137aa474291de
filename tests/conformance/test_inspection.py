"""Looks at the table for people: what state events are in, at a cost that does not grow with it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from django_outbox.admin.list_filters import STATES
from django_outbox.inspection.queues import load_backlog
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream
from django_outbox.models.queryset import by_death
from tests.plans import analyze, large_steps
from tests.table import PLACED, insert, keyed, now

pytestmark = pytest.mark.django_db

NEW, DONE, RETRY, DEAD = Status


def dead(**filters: Any) -> list[str]:
    """Return the ids of the dead, as the admin lists them."""
    found = by_death(OutboxEvent.objects.filter(**filters)).order_by("-pk")
    return [*found.values_list("pk", flat=True)[:100]]


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
    assert dead(pk__range=(expected[4], expected[2])) == expected[2:5]
    assert len(dead(key="k")) == 2


def test_the_dead_events_that_block_others(settings: Any) -> None:
    settings.OUTBOX = {"ON_DEAD": "block"}
    for key, statuses in {
        "blocked": [DEAD, NEW, NEW],
        "retried": [DEAD, RETRY],
        "done": [DEAD, DONE],
        "first": [NEW, DEAD],
        "runs": [DEAD, NEW],
    }.items():
        for status in statuses:
            keyed(key, status=status, done_at=now())
    OutboxStream.objects.exclude(key="runs").update(due_at=None)
    insert(2, due=None, status=DEAD, done_at=now())
    found = load_backlog("default", now(), []).holds
    assert {each.name: each.by for each in found} == {
        key: f"event {OutboxEvent.objects.get(key=key, status=DEAD).event_id}"
        for key in ("blocked", "retried")
    }


@pytest.fixture
def large_table(emptied: None) -> None:
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
def test_looks_read_no_whole_table(large_table: None, settings: Any) -> None:
    """Whatever is rare is found by an index: dead, due, leased, waiting, blocking."""
    settings.OUTBOX = {"ON_DEAD": "block"}
    OutboxPause.objects.pause("event_type", PLACED)
    events = OutboxEvent.objects
    works: dict[str, Callable[[], Any]] = {
        "dead": dead,
        "dead of a time": lambda: dead(pk__range=("01", "02")),
        "dead of a type": lambda: dead(event_type="order.lost"),
        "due": lambda: [*events.due()[:50]],
        "of ids": lambda: [*events.with_ids([*events.due().values_list("pk", flat=True)[:20]])],
        "leased": lambda: [*events.leased()[:50]],
        "held": lambda: load_backlog("default", now(), []).holds,
        "blocked": lambda: [*STATES["blocked"].of(events.all())[:50]],
        "paused": lambda: [*STATES["paused"].of(events.all())[:50]],
    }
    found = large_steps(works)
    if connection.vendor == "mysql":
        # Of keyed events the index is read whole, not the table: that is what it costs there.
        found = {name: [step for step in steps if not step["key"]] for name, steps in found.items()}
    large = [step for steps in found.values() for step in steps]
    assert not [step for step in large if "outbox_event" in str(step)]  # others have few rows
    assert large_steps({"scan": lambda: [*events.filter(tenant_id="north")]})  # it would be seen
