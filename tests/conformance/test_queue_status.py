"""The counts of queues on each database."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection

from django_outbox.conf import index_name
from django_outbox.inspection import queues as inspected
from django_outbox.inspection.queues import queue_names
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from tests.plans import analyze, explain, statements
from tests.table import insert, keyed, now
from tests.test_queue_status import queues, two_queues
from tests.test_stream_queryset import put

pytestmark = pytest.mark.django_db(transaction=True)


__all__ = ["two_queues"]  # fixtures


# --- what is due ----------------------------------------------------------------------------------


def test_due_events_and_streams_are_counted_by_queue() -> None:
    insert(3, due=-90, queue="hooks")
    insert(2, due=60, queue="hooks")
    insert(1, due=60, queue="hooks", locked_by="w1", locked_at=now())
    insert(1, due=-5)
    put("due", due_at=now() - timedelta(seconds=120), queue="hooks")
    put("waits", due_at=now() + timedelta(seconds=60), queue="hooks")
    put("idle", queue="hooks")
    found = queues()
    assert {name: each["due"] for name, each in found.items()} == {"default": 1, "hooks": 4}
    assert 120 <= found["hooks"]["oldest_due_age"] < 180
    assert 5 <= found["default"]["oldest_due_age"] < 65


def test_a_queue_that_is_not_configured_is_listed_while_rows_wait_in_it() -> None:
    insert(2, queue="gone", due=60)
    insert(1, queue="gone.too", due=-5)
    put("k", due_at=now() + timedelta(seconds=60), queue="zz")
    found = queues()
    assert [*found] == ["default", "hooks", "gone", "gone.too", "zz"]
    assert (found["gone"]["due"], found["gone"]["unserved"]) == (0, True)
    assert found["gone.too"]["due"] == 1
    configured = [each["configured"] for each in found.values()]
    assert configured == [True, True, False, False, False]
    OutboxEvent.objects.all().delete()
    OutboxStream.objects.all().delete()
    assert [*queues()] == ["default", "hooks"]


def test_the_list_of_queues_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspected, "MAX_QUEUES", 4)
    for number in range(9):
        insert(1, queue=f"q{number}")
    assert queue_names("default") == ["default", "hooks", "q0", "q1"]
    insert(1, queue="a")
    insert(1, queue="e")
    assert queue_names("default") == ["default", "hooks", "a", "e"]


# --- what it costs --------------------------------------------------------------------------------


def test_due_rows_are_counted_by_the_index_of_queues() -> None:
    insert(3000, due=60)
    insert(1000, due=None, status=1, done_at=now())
    insert(20, queue="hooks")
    keyed("k", 3)
    for model in (OutboxEvent, OutboxStream):
        analyze(model)
    dialect = dialect_of(connection)
    sent = statements(lambda: dialect.queue_backlogs(queues=["default", "hooks"], most=1000))
    [(sql, params)] = sent
    plan = str(explain(sql, params))
    assert plan.count(index_name("outbox_event_queue")) >= 2
    assert "SCAN outbox_" not in plan
    if connection.vendor == "postgresql":
        assert "Seq Scan on outbox_event" not in plan
