"""``atomic=True``: a listener, its changes and DONE commit together, or not at all."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from django.db import connection, transaction

import django_outbox as outbox
from django_outbox import signals
from django_outbox.models import OutboxEvent
from tests.surroundings import heard
from tests.table import in_thread, listening, row, statuses, steal, write
from tests.test_atomic import ONCE, TWICE, ended, leave
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


# -- together --------------------------------------------------------------------------------------


def test_26_effects_and_done_commit_together(settings: Any) -> None:
    """Other sessions see both or neither: a single statement queries both."""
    settings.OUTBOX = {}
    changed, go_on = threading.Event(), threading.Event()

    def listener(event: outbox.Event) -> None:
        leave(event)
        changed.set()
        go_on.wait(30)

    def seen() -> tuple[int, int]:
        rows = OutboxEvent.objects.filter(status=1).values("event_id")
        effects = Effect.objects.values("event_id")
        found = [*rows.union(effects, all=True)]
        counts = Counter(each["event_id"] for each in found)
        return len(counts), len(found)

    with listening(listener, atomic=True), outbox.Worker():
        try:
            write()
            assert changed.wait(15)
            assert seen() == (0, 0)
        finally:
            go_on.set()
        assert wait_until(lambda: seen() if seen() != (0, 0) else None) == (1, 2)
    assert statuses() == {"DONE": 1}


def test_26_a_failing_listener_leaves_nothing(settings: Any) -> None:
    settings.OUTBOX = {}

    def listener(event: outbox.Event) -> None:
        leave(event)
        raise LookupError("after the change")

    with listening(listener, atomic=True, retry=TWICE), outbox.Worker():
        (event_id,) = write()
        ended(DEAD=1)
    assert not Effect.objects.exists()
    assert row(event_id).attempts == 2
    assert "after the change" in str(row(event_id).last_error)


def test_a_failed_statement_is_a_failure_and_spoils_nothing_else(settings: Any) -> None:
    """The listener swallows its own database error, but the broken transaction cannot commit."""
    settings.OUTBOX = {}

    def listener(event: outbox.Event) -> None:
        leave(event)
        if event.payload["n"] == 0:
            try:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT nothing FROM nowhere")
            except Exception:  # noqa: BLE001 - what a careless listener does
                transaction.set_rollback(True)

    with listening(listener, atomic=True, retry=ONCE), outbox.Worker(workers=1):
        bad, good = write(2)
        wait_until(lambda: not OutboxEvent.objects.pending().exists(), what="both ended")
    assert row(good).status == 1
    assert row(bad).status == 3
    assert [*Effect.objects.values_list("event_id", flat=True)] == [good]


# -- the fence -------------------------------------------------------------------------------------


def test_26_a_lease_that_was_lost_undoes_everything(settings: Any) -> None:
    settings.OUTBOX = {}

    def listener(event: outbox.Event) -> None:
        leave(event)
        if connection.vendor == "sqlite":  # one writer at a time: no other could steal it now
            steal(event.event_id)
        else:
            in_thread(lambda: steal(event.event_id)).result(15)

    with heard(signals.lease_lost) as lost, listening(listener, atomic=True), outbox.Worker():
        (event_id,) = write()
        wait_until(lambda: lost, what="a lost lease")
        owner = row(event_id).locked_by
    assert [each["count"] for each in lost] == [1]
    assert not Effect.objects.exists()
    assert statuses() == {"NEW": 1}
    if connection.vendor != "sqlite":
        assert owner == "thief"
