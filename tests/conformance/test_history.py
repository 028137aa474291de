"""History of events: failures, lost workers and replays, whatever became of the event since."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction

import django_outbox as outbox
from django_outbox.conf import current
from django_outbox.listeners import registry
from django_outbox.listeners.history import LENGTH, entries
from django_outbox.listeners.outcomes import Decision, Status
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from django_outbox.worker import settler
from tests.surroundings import deliver
from tests.table import (
    claimed,
    events_of,
    histories,
    history,
    insert,
    keyed,
    listening,
    now,
    row,
    statuses,
    steal,
    write,
)

pytestmark = pytest.mark.django_db(transaction=True)

TWICE = outbox.Fixed(delay=0, max_attempts=2)


@pytest.fixture(autouse=True)
def quick(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 2, "PROBE_INTERVAL": 0.05, "POLL_INTERVAL": 0.2}


def kinds(event_id: str) -> list[tuple[str, int]]:
    return [(each.kind, each.number) for each in history(event_id)]


def fail(event: Any) -> None:
    raise ValueError(f"no {event.event_type}")


@pytest.mark.parametrize("by_drain", [False, True], ids=["worker", "drain"])
@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
def test_each_failure_has_an_entry(key: str | None, by_drain: bool) -> None:
    before = now()
    with listening(fail, retry=TWICE, name="booking"):
        (event_id,) = write(key=key)
        deliver(until={"DEAD": 1}, by_drain=by_drain)
    assert kinds(event_id) == [("failed", 1), ("dead", 2)]
    for entry in history(event_id):
        assert before <= entry.at <= now()
        assert entry.listener == "order.placed booking"
        assert entry.by
        assert entry.milliseconds is not None
        assert 0 <= entry.milliseconds < 20_000
        assert entry.error == "ValueError: no order.placed"


def test_what_is_delivered_has_none() -> None:
    with listening(lambda event: None), listening(lambda event: outbox.Defer(3600), "order.late"):
        write(3)
        write(2, "order.late")
        deliver(until={"DONE": 3, "NEW": 2}, by_drain=False)
    assert histories() == []


def test_each_listener_of_a_shared_event_has_its_own() -> None:
    def second(event: outbox.Event) -> None:
        if not event.attempts:
            raise KeyError("first time")

    with listening(fail, retry=TWICE, name="a"), listening(second, retry=TWICE, name="b"):
        (event_id,) = write()
        deliver(until={"DEAD": 1, "DONE": 1}, by_drain=False)
    found = {
        each.listener: [
            (entry.listener, entry.kind, entry.number) for entry in entries(each.history)
        ]
        for each in OutboxEvent.objects.of_event(event_id)
    }
    a, b = "order.placed a", "order.placed b"
    assert found == {a: [(a, "failed", 1), (a, "dead", 2)], b: [(b, "failed", 1)]}


def test_each_event_of_a_batch_has_its_own() -> None:
    def refuse_one(events: list[outbox.Event]) -> list[Any]:
        return [ValueError("not this") if each.payload["n"] == 1 else None for each in events]

    with listening(refuse_one, batch=3, retry=TWICE):
        ids = write(3)
        deliver(until={"DONE": 2, "DEAD": 1}, by_drain=False)
    assert [kinds(each) for each in ids] == [[], [("failed", 1), ("dead", 2)], []]


def test_a_failure_before_a_successful_fallback_is_kept() -> None:
    def call(event: outbox.Event) -> None:
        raise outbox.Unrecoverable("never")

    with listening(call):
        registry.fallback(call, lambda event, failure: None)
        (event_id,) = write()
        deliver(until={"DONE": 1}, by_drain=False)
    assert kinds(event_id) == [("failed", 1)]


@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
def test_a_lost_worker_is_named(key: str | None, settings: Any) -> None:
    if key is None:
        [event_id] = insert(1, locked_by="w-lost", locked_at=now())
    else:
        [event_id] = keyed(key)
        OutboxStream.objects.filter(stream__of_key=key).update(locked_by="w-lost", locked_at=now())
    with listening(lambda event: None):
        deliver(until={"DONE": 1}, by_drain=False)
    assert [(each.kind, each.number, each.by) for each in history(event_id)] == [
        ("lost", 1, "w-lost")
    ]


def test_an_event_that_too_many_workers_were_lost_with(settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "MAX_RESCUES": 2}
    [event_id] = insert(1, locked_by="w2", locked_at=now(), rescues=1)
    with listening(lambda event: None):
        deliver(until={"DEAD": 1}, by_drain=False)
    lost, dead = history(event_id)
    assert (lost.kind, lost.number, lost.by) == ("lost", 2, "w2")
    assert (dead.kind, dead.listener, dead.milliseconds) == ("dead", "", None)
    assert dead.error == "lost 2 workers"


def test_events_are_rescued_although_their_history_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise DatabaseError("no room")

    monkeypatch.setattr(type(dialect_of(connection)), "note_lost", refuse)
    insert(2, locked_by="lost", locked_at=now())
    with listening(lambda event: None):
        deliver(until={"DONE": 2}, by_drain=False)
    assert "rescues missing in the history count=2" in caplog.text


@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
def test_a_replay_keeps_the_history_and_names_who_replayed(key: str | None) -> None:
    with listening(fail, retry=TWICE):
        (event_id,) = write(key=key)
        deliver(until={"DEAD": 1}, by_drain=True)
    assert OutboxEvent.objects.dead().replay(by="ada") == 1
    with listening(lambda event: None):
        deliver(until={"DONE": 1}, by_drain=True)
    assert kinds(event_id) == [("failed", 1), ("dead", 2), ("replayed", 0)]
    assert history(event_id)[-1].by == "ada"


def test_a_replay_that_is_undone_leaves_no_entry() -> None:
    [event_id] = insert(1, due=None, status=3, done_at=now())
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        OutboxEvent.objects.dead().replay()
        raise ZeroDivisionError
    assert kinds(event_id) == []
    assert row(event_id).status == Status.DEAD


# -- what a settle that is refused leaves ----------------------------------------------------------


def test_some_of_one_settle_are_refused() -> None:
    """All in one group commit."""
    ids = insert(5)
    leases = events_of(claimed().rows)
    assert len(leases) == 5
    decision = Decision(
        status=Status.RETRY, delay=60.0, spent=1, error="ValueError: x", outcome="retry"
    )
    for each in leases:
        each.note_failure(decision, listener="l", seconds=0.01)
    steal(ids[2])
    batch = [(each, decision) for each in leases]
    assert settler.write(batch, connection=connection, me="me", settings=current()) == 1
    assert [len(kinds(each)) for each in ids] == [1, 1, 0, 1, 1]
    assert statuses() == {"RETRY": 4, "NEW": 1}


# -- what is kept ----------------------------------------------------------------------------------


def test_the_newest_ten_are_kept() -> None:
    with listening(fail, retry=outbox.Fixed(delay=0, max_attempts=LENGTH + 3)):
        (event_id,) = write()
        deliver(until={"DEAD": 1}, by_drain=False)
        first = LENGTH + 3 - 9
        assert [number for _, number in kinds(event_id)] == [*range(first, LENGTH + 4)]
        assert OutboxEvent.objects.dead().replay(by="ada") == 1
        deliver(until={"DEAD": 1}, by_drain=False)
    assert [number for _, number in kinds(event_id)] == [*range(first, LENGTH + 4)]


def test_the_first_line_of_an_error_is_kept_in_ascii() -> None:
    def fail_at_length(event: outbox.Event) -> None:
        raise ValueError("größer " + "x" * 5000 + "\nline two")

    with listening(fail_at_length, retry=TWICE):
        (event_id,) = write()
        deliver(until={"DEAD": 1}, by_drain=True)
    first, second = history(event_id)
    assert first.error == second.error == ("ValueError: größer " + "x" * 5000)[:300]
    assert (row(event_id).history or "").isascii()


@pytest.mark.parametrize("damaged", ["", "[", "{}", '[{"at": 1}]', "null", '["x"]'])
def test_a_damaged_history_begins_anew(damaged: str) -> None:
    [event_id] = insert(1, history=damaged)
    with listening(fail, retry=TWICE):
        deliver(until={"DEAD": 1}, by_drain=True)
    assert kinds(event_id) == [("failed", 1), ("dead", 2)]


@pytest.mark.parametrize("size", [None, 2], ids=["alone", "in a batch"])
def test_what_an_atomic_listener_answers_is_committed_with_it(size: int | None) -> None:
    """Its decision is written in its own transaction, and so is the history."""
    options: dict[str, Any] = {} if size is None else {"batch": size}

    def give_up(given: Any) -> Any:
        return outbox.Dead("over 17") if size is None else [outbox.Dead("over 17")] * len(given)

    with listening(give_up, atomic=True, **options):
        ids = write(2)
        deliver(until={"DEAD": 2}, by_drain=True)
    for event_id in ids:
        [entry] = history(event_id)
        assert (entry.kind, entry.number, entry.listener) == ("dead", 1, "order.placed")
        assert entry.milliseconds is not None
        assert (entry.error, row(event_id).cause) == ("over 17", "over #")


def test_the_cause_is_written_with_the_error_and_cleared_by_a_replay() -> None:
    with listening(fail_at_17, retry=TWICE):
        (event_id,) = write()
        outbox.drain()
        assert row(event_id).cause == "ValueError: order # is unknown"
        deliver(until={"DEAD": 1}, by_drain=True)
    assert row(event_id).cause == "ValueError: order # is unknown"
    OutboxEvent.objects.dead().replay()
    assert row(event_id).cause is None


def fail_at_17(event: outbox.Event) -> None:
    raise ValueError("order 17 is unknown")
