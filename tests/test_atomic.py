"""What an atomic listener answers, and how its transaction begins and ends, on SQLite."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

import django_outbox as outbox
from django_outbox.delivery import decide
from django_outbox.sql import dialect_of
from tests.table import listening, row, statuses, write
from tests.testapp.models import Effect, Order
from tests.waiting import MovedClock, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


ONCE = outbox.Fixed(0.02, max_attempts=1)


TWICE = outbox.Fixed(0.02, max_attempts=2)


def leave(event: outbox.Event) -> None:
    Effect.objects.create(event_id=event.event_id, pid=0, phase="once")


def ended(**expected: int) -> None:
    wait_until(lambda: statuses() == expected, what=f"{expected}")


def test_a_transaction_that_cannot_begin_costs_no_attempt(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is away before the listener is called: the event comes again, uncounted."""
    settings.OUTBOX = {}
    monkeypatch.setattr(decide, "ERROR_DELAY", 0.02)
    dialect = type(dialect_of(connection))
    read_committed, away = dialect.read_committed, [True, True]

    def begin(self: Any) -> Any:
        if away:
            away.pop()
            raise OperationalError("the server is away")
        return read_committed(self)

    monkeypatch.setattr(dialect, "read_committed", begin)
    with listening(leave, atomic=True, retry=ONCE), outbox.Worker():
        (event_id,) = write()
        ended(DONE=1)
    assert not away
    assert (Effect.objects.count(), row(event_id).attempts) == (1, 0)


@pytest.mark.parametrize(
    ("answer", "status"), [(None, "DONE"), (outbox.Done(), "DONE"), (outbox.Dead("no"), "DEAD")]
)
def test_an_answer_commits_with_what_was_changed(settings: Any, answer: Any, status: str) -> None:
    settings.OUTBOX = {}

    def listener(event: outbox.Event) -> Any:
        leave(event)
        return answer

    with listening(listener, atomic=True), outbox.Worker():
        write()
        ended(**{status: 1})
    assert Effect.objects.count() == 1


def test_defer_commits_and_comes_again(settings: Any) -> None:
    settings.OUTBOX = {}

    def listener(event: outbox.Event) -> Any:
        leave(event)
        return outbox.Defer(0.02) if Effect.objects.count() < 3 else None

    with listening(listener, atomic=True), outbox.Worker():
        (event_id,) = write()
        ended(DONE=1)
    assert Effect.objects.count() == 3
    assert row(event_id).attempts == 0


@pytest.mark.parametrize("fails", [True, False])
def test_g9_events_written_inside_share_its_fate(settings: Any, fails: bool) -> None:
    settings.OUTBOX = {}
    followed: list[str] = []

    def listener(event: outbox.Event) -> None:
        outbox.write("order.followed", {"of": event.event_id})
        if fails:
            raise LookupError

    with (
        listening(listener, atomic=True, retry=TWICE),
        listening(lambda event: followed.append(event.payload["of"]), "order.followed"),
        outbox.Worker(),
    ):
        (event_id,) = write()
        ended(**({"DEAD": 1} if fails else {"DONE": 2}))
    assert followed == ([] if fails else [event_id])


def test_478_without_it_a_listener_needs_a_transaction_of_its_own(settings: Any) -> None:
    settings.OUTBOX = {}

    def listener(event: outbox.Event) -> None:
        outbox.write("order.followed")

    with listening(listener, retry=ONCE), outbox.Worker():
        (event_id,) = write()
        ended(DEAD=1)
    assert "NoActiveTransaction" in str(row(event_id).last_error)


def test_w13_a_timeout_undoes_an_awaited_atomic_listener_and_counts(
    settings: Any, clock: MovedClock
) -> None:
    settings.OUTBOX = {"DRAIN_TIMEOUT": 0.5}
    go_on = threading.Event()

    async def listener(event: outbox.Event) -> None:
        await Effect.objects.acreate(event_id=event.event_id, pid=0, phase="once")
        if not event.attempts:
            clock.advance(6)
        while not event.attempts and not go_on.is_set():  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(0.01)

    with listening(listener, atomic=True, timeout=5, retry=TWICE), outbox.Worker():
        try:
            (event_id,) = write()
            ended(DONE=1)
        finally:
            go_on.set()
    assert row(event_id).attempts == 1
    assert Effect.objects.count() == 1


def test_what_runs_after_the_commit_is_told_only_then(settings: Any) -> None:
    settings.OUTBOX = {}
    seen: list[int] = []

    def listener(event: outbox.Event) -> None:
        Order.objects.create(sku="B-7")
        transaction.on_commit(lambda: seen.append(row(event.event_id).status))

    with listening(listener, atomic=True), outbox.Worker():
        write()
        ended(DONE=1)
        wait_until(lambda: seen)
    assert seen == [1]
