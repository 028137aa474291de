"""Atomic listeners past their timeouts."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from django.db import connection

import django_outbox as outbox
from django_outbox import signals
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.surroundings import heard
from tests.table import listening, now, row, write
from tests.test_timeouts import effects, ended, hanging, leave, soon
from tests.waiting import MovedClock, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


__all__ = ["soon"]  # fixtures

NOT_SQLITE = pytest.mark.skipif(
    "connection.vendor == 'sqlite'", reason="an open SQLite transaction keeps every writer out"
)


def test_a_written_off_atomic_listener_that_wakes_undoes_what_it_wrote(clock: MovedClock) -> None:
    """On SQLite its retry must wait for it: an open transaction keeps every other writer out."""
    with (
        hanging(clock, first=leave, then=leave, atomic=True) as listener,
        outbox.Worker(workers=1) as worker,
    ):
        (event_id,) = write()
        wait_until(lambda: worker._executors[0]._hanging() == 1)
        if connection.vendor != "sqlite":
            ended(DONE=1)
            assert effects() == ["1"]
        listener.wake()
        wait_until(lambda: listener.first_thread_has_ended)
        ended(DONE=1)
    assert {*listener.ended} == {0, 1}
    assert effects() == ["1"]
    assert (row(event_id).status, row(event_id).attempts) == (Status.DONE, 1)


@NOT_SQLITE
def test_a_written_off_atomic_listener_that_wakes_while_its_retry_runs_undoes_what_it_wrote(
    clock: MovedClock,
) -> None:
    running, go_on = threading.Event(), threading.Event()

    def second_waits(event: outbox.Event) -> None:
        if event.attempts:
            running.set()
            assert go_on.wait(60)
        leave(event)

    with ExitStack() as stack:
        listener = stack.enter_context(hanging(clock, then=second_waits, atomic=True, timeout=3))
        stack.enter_context(outbox.Worker(workers=1))
        try:
            (event_id,) = write()
            assert running.wait(20)
            listener.wake()
            wait_until(lambda: listener.first_thread_has_ended)
            assert effects() == []
        finally:
            go_on.set()
        ended(DONE=1)
    assert effects() == ["1"]
    assert row(event_id).attempts == 1


@NOT_SQLITE
def test_of_two_calls_by_the_same_worker_one_commits() -> None:
    """The worker has leased the event anew while the first call ran; the other is refused."""
    running, go_on, again, finish = (threading.Event() for _ in range(4))
    calls: list[int] = []

    def hang_first(event: outbox.Event) -> None:
        calls.append(event.attempts)
        if len(calls) == 1:
            running.set()
            assert go_on.wait(60)
        else:
            again.set()
            assert finish.wait(60)
        leave(event)

    with ExitStack() as stack:
        stack.enter_context(listening(hang_first, atomic=True))
        lost = stack.enter_context(heard(signals.lease_lost))
        stack.enter_context(outbox.Worker(workers=2))
        try:
            (event_id,) = write()
            assert running.wait(20)
            OutboxEvent.objects.filter(pk=event_id).update(
                attempts=1, status=Status.RETRY, locked_by=None, available_at=now()
            )
            assert again.wait(20)
            assert str(row(event_id).locked_by)
            go_on.set()
            wait_until(effects, what="the first call's commit")
            finish.set()
            wait_until(lambda: lost, what="a refusal")
        finally:
            go_on.set()
            finish.set()
        ended(DONE=1)
    assert len(effects()) == 1
