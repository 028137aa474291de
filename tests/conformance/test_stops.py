"""An orderly stop: events that still run are handed back, the rest are released at once."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import connection

import django_outbox as outbox
from django_outbox.conf import Settings
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from django_outbox.sql.values import EVENTS
from django_outbox.worker.effects import perform
from django_outbox.worker.held import Held
from django_outbox.worker.leases import Releases
from django_outbox.worker.polling import Wakeup
from django_outbox.worker.runs import Runs
from tests.table import (
    claimed,
    elsewhere,
    events_of,
    in_thread,
    insert,
    keyed,
    row,
    stream,
    stream_due_in,
)
from tests.test_stops import (
    NO_SESSIONS,
    Gate,
    at_once,
    crowded,
    gated,
    soon,
    threads_have_ended,
    worker,
)
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

__all__ = ["crowded", "soon"]  # fixtures


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("key", [None, "a"])
def test_nothing_that_runs_on_changes_its_event_any_more(
    atomic: bool, shared: bool, key: str | None
) -> None:
    if atomic and connection.vendor == "sqlite":
        pytest.skip("an atomic listener keeps every writer out, who hands back included")

    def leave(event: outbox.Event) -> None:
        Effect.objects.create(event_id=event.event_id, pid=0, phase="end")

    gates = [Gate(leave), Gate(leave)] if shared else [Gate(leave)]
    with ExitStack() as stack:
        for n, gate in enumerate(gates):
            stack.enter_context(gated(gate, name=f"n{n}" if shared else "", atomic=atomic))
        running = stack.enter_context(worker(WORKERS=1))
        (event_id,) = keyed(key) if key else insert()
        wait_until(lambda: gates[0].entered)
        running.stop(timeout=0.1)
        before = row(event_id).__dict__ | {"_state": 0}
        for gate in gates:
            gate.open()
        wait_until(threads_have_ended, what="the end of the thread")
        assert gates[0].left
        assert not any(gate.entered for gate in gates[1:])
        assert row(event_id).__dict__ | {"_state": 0} == before
        assert Effect.objects.exists() is not atomic  # its transaction is rolled back


@NO_SESSIONS
def test_a_row_that_somebody_has_locked_is_passed_over() -> None:
    with gated(Gate()) as gate, worker() as running:
        locked, free = insert(2)
        wait_until(lambda: len(gate.entered) == 2)
        running.finish(at_once)
        with elsewhere(lambda: OutboxEvent.objects.select_for_update().get(pk=locked)):
            in_thread(lambda: running.hand_back(1.0)).result(30)
            assert row(free).locked_by is None
            assert row(locked).locked_by == running.id


@NO_SESSIONS
def test_a_row_that_is_locked_for_a_moment_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []
    dialect = type(dialect_of(connection))
    release = dialect.release

    def note(*args: Any, **given: Any) -> int:
        try:
            return release(*args, **given)
        finally:
            tries.append("made")

    monkeypatch.setattr(dialect, "release", note)
    with gated(Gate()) as gate, worker() as running:
        (event_id,) = insert()
        wait_until(lambda: gate.entered)
        running.finish(at_once)
        with elsewhere(lambda: OutboxEvent.objects.select_for_update().get(pk=event_id)):
            handing = in_thread(lambda: running.hand_back(1.0))
            wait_until(lambda: tries, what="the first try")
        handing.result(30)
        assert row(event_id).locked_by is None


@NO_SESSIONS
def test_a_stream_that_was_locked_at_first_is_released_later() -> None:
    with gated(Gate()) as gate, worker() as running:
        keyed("a", 2)
        wait_until(lambda: gate.entered)
        with elsewhere(lambda: OutboxStream.objects.select_for_update().get(key="a")):
            gate.open()
            assert in_thread(lambda: running.finish(lambda: False)).result(20) is True
            assert stream("a").locked_by == running.id
        running.hand_back(1.0)
        assert stream("a").locked_by is None
        assert stream_due_in("a") <= 0


@NO_SESSIONS
def test_an_idle_stream_that_is_locked_is_not_forgotten(
    crowded: tuple[outbox.Worker, list[str]],
) -> None:
    running, _ = crowded
    with elsewhere(lambda: OutboxStream.objects.select_for_update().get(key="a")):
        release = running._engine.releases.release_streams
        given = in_thread(lambda: perform(connection, release())).result(10)
        assert (given, stream("a").locked_by) == (1, running.id)
    running.finish(at_once)
    running.hand_back(1.0)
    assert stream("a").locked_by is None
    assert stream_due_in("a") <= 0


@NO_SESSIONS
def test_a_row_that_is_locked_when_it_is_given_back_stays_held_until_it_is_free() -> None:
    """Forgotten, it would stay leased until its lease ends, by a worker that does not run it."""
    locked, free = insert(2, due=-9)
    held = Held(30)
    runs = Runs(me="me", settings=Settings(), held=held, pools=Mock(), wakeup=Wakeup())
    releases = Releases(alias="default", runs=runs)
    held.add_rows(events_of(claimed().rows))

    def given_back() -> list[str]:
        rows, _ = perform(connection, releases.give_back(held.of(EVENTS)))
        return [each.id for each in rows]

    with elsewhere(lambda: OutboxEvent.objects.select_for_update().get(pk=locked)):
        assert given_back() == [free]
        assert held.get(locked) is not None
    assert given_back() == [locked]
    assert [row(each).locked_by for each in (locked, free)] == [None, None]
