"""``atomic=True``: a listener, its changes and DONE commit together, or not at all."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections, transaction

import django_outbox as outbox
from django_outbox import signals
from django_outbox.models import OutboxEvent
from tests.reach.children import Child, Site
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
    lost: list[int] = []

    def listener(event: outbox.Event) -> None:
        leave(event)
        if connection.vendor == "sqlite":  # one writer at a time: no other could steal it now
            steal(event.event_id)
        else:
            in_thread(lambda: steal(event.event_id)).result(15)

    def note(count: int, **kwargs: Any) -> None:
        lost.append(count)

    signals.lease_lost.connect(note)
    try:
        with listening(listener, atomic=True), outbox.Worker():
            (event_id,) = write()
            wait_until(lambda: lost, what="a lost lease")
            owner = row(event_id).locked_by
    finally:
        signals.lease_lost.disconnect(note)
    assert sum(lost) == 1
    assert not Effect.objects.exists()
    assert statuses() == {"NEW": 1}
    if connection.vendor != "sqlite":
        assert owner == "thief"


def repeatable_read() -> dict[str, Any]:
    options = {**connections.settings["default"].get("OPTIONS", {})}
    if connection.vendor == "postgresql":
        from psycopg import IsolationLevel

        return {**options, "isolation_level": IsolationLevel.REPEATABLE_READ}
    return {**options, "isolation_level": "repeatable read"}


def test_a_renewed_lease_breaks_no_repeatable_read(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat changes the row after the listener's first query, which fixed its snapshot."""
    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time: no heartbeat renews beside a transaction that wrote")
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", repeatable_read())
    settings.OUTBOX = {"LEASE": 1.2, "DRAIN_TIMEOUT": 1}
    runs: list[str] = []

    def listener(event: outbox.Event) -> None:
        runs.append(event.event_id)
        leave(event)
        begun = in_thread(lambda: row(event.event_id).available_at).result(15)
        wait_until(
            lambda: in_thread(lambda: row(event.event_id).available_at).result(15) > begun,
            what="a renewal",
        )

    with listening(listener, atomic=True, retry=ONCE), outbox.Worker():
        (event_id,) = write()
        ended(DONE=1)
    assert runs == [event_id]
    assert Effect.objects.count() == 1


# -- kills -----------------------------------------------------------------------------------------


def test_exactly_once_in_the_same_database_whatever_is_killed(
    database_env: dict[str, str], tmp_path: Path
) -> None:
    """Workers are killed while they deliver, one by one, and another takes over each time."""
    count = 300 if connection.vendor == "sqlite" else 1000
    site, kills = Site(database_env, tmp_path), 4
    few = {"COLD_QUEUE_CAPACITY": 20, "POLL_BATCH_SIZE": 20, "WORKERS": 4, "ASYNC_CONCURRENCY": 1}
    brief = {"LEASE": 1.5, "DRAIN_TIMEOUT": 1, "MAX_RESCUES": 50, **few}
    ids = write(count, "reach.exact", payload={"seconds": 0.005})

    def done() -> int:
        return OutboxEvent.objects.done().count()

    with ExitStack() as stack:

        def start() -> Child:
            child: Child = stack.enter_context(site.worker(**brief))
            return child

        running = [start(), start()]
        for number in range(kills):
            enough = (number + 1) * count // (kills + 1)
            wait_until(lambda enough=enough: done() >= enough, within=60, what=f"{enough} done")
            victim = running.pop(0)
            victim.tell(signal.SIGKILL)
            victim.wait()
            running.append(start())
        wait_until(lambda: done() == count, within=60, what=f"{count} done")
        for each in running:
            each.says("worker started")  # only then is the signal handled
        assert [each.stop() for each in running] == [0, 0]
    assert OutboxEvent.objects.filter(rescues__gt=0).exists()  # the kills did interrupt deliveries
    effects = Counter(Effect.objects.values_list("event_id", flat=True))
    assert effects == Counter(ids)
    assert statuses() == {"DONE": count}
