"""The dashboard's queries on each database read no whole table."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection

from django_outbox.inspection import counts as outbox_counts
from django_outbox.inspection import workers
from django_outbox.inspection.queues import load_backlog
from django_outbox.inspection.workers import losses
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStatistics, OutboxStream
from tests.plans import analyze, large_steps, sent
from tests.table import PLACED, insert, keyed, multiply, now, stream_row
from tests.test_dashboard import nothing_is_cached

pytestmark = pytest.mark.django_db

__all__ = ["nothing_is_cached"]  # fixtures


@pytest.mark.django_db(transaction=True)  # MariaDB's ANALYZE commits
def test_41_every_look_uses_an_index(emptied: None) -> None:
    """There are 5,000 rows, half of them with a key, and 50 of each kind that a query selects."""
    clock = now()
    done = {"due": None, "status": Status.DONE, "done_at": clock}
    insert(2400, **done)
    insert(2400, key="old", seq=1, **done)
    insert(50, due=None, status=Status.DEAD, done_at=clock, last_error="ValueError: no")
    insert(50)
    for number in range(25):
        keyed(f"k{number}", 2, due=-5 if number % 2 else 600)
    multiply(stream_row("idle"), [f"idle{n}" for n in range(2000)])
    OutboxStatistics.objects.bulk_create(
        OutboxStatistics(
            started_at=clock - timedelta(minutes=back),
            owner=f"worker-{owner}",
            listener=PLACED,
            done=1,
        )
        for back in range(180)
        for owner in range(25)
    )
    for model in (OutboxEvent, OutboxStream, OutboxStatistics):
        analyze(model)
    lately = OutboxStatistics.objects.since(clock - timedelta(minutes=10))
    works: dict[str, Callable[[], object]] = {
        "backlog": lambda: load_backlog("default", clock, []),
        "blocked": lambda: [*OutboxStream.objects.blocked().order_by("due_at", "pk")[:5]],
        "types": lambda: lately.by_listener(9),
        "minutes": lambda: outbox_counts.minutes("default", clock - timedelta(minutes=10)),
    }
    found = large_steps(works)
    assert not [each for steps in found.values() for each in steps if "pause" not in str(each)]


def test_what_lost_workers_had_leased_is_found_among_what_fell_due_last() -> None:
    [lost] = insert(1, due=5, rescues=1, locked_by="w", locked_at=now())
    [keyed_lost, _] = keyed("k", 2, due=5)
    OutboxEvent.objects.filter(pk=keyed_lost).update(rescues=1)
    OutboxStream.objects.filter(stream__of_key="k").update(rescues=1)
    insert(20, due=-600)
    keyed("other", 2, due=-600)
    found = losses("default", now())
    assert [each.id for each in found] == sorted([lost, keyed_lost], reverse=True)


def test_a_search_for_what_was_lost_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no index has them, it is one statement that reads so many rows of each table."""
    monkeypatch.setattr(workers, "LATEST", 20)
    insert(30, due=-60)
    insert(1, due=-90, rescues=1)
    has_index = connection.features.supports_partial_indexes
    assert len(losses("default", now())) == has_index
    clock = now()
    assert len(sent(lambda: losses("default", clock))) == 1
