"""Runs of the purge: who has its lease, what a run leaves to the next, and the daily scan."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection

from django_outbox import Worker, signals
from django_outbox.conf import Settings
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxLease
from django_outbox.models.retention import ages
from django_outbox.sql import dialect_of
from django_outbox.worker import housekeeper
from django_outbox.worker.housekeeper import Progress
from tests.surroundings import heard
from tests.table import insert, multiply, now, purging, rest_of
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


DAY = 86400.0


WEEK = 7 * DAY  # RETENTION_DONE


DONE: dict[str, Any] = {"status": Status.DONE, "due": None}


def finished(count: int = 1, *, made: float = WEEK + 60, **columns: Any) -> list[str]:
    """Insert events made that many seconds ago, which ended one second after they were made."""
    ended = now() - timedelta(seconds=made - 1)
    return insert(count, **{**DONE, "done_at": ended, "made": made, **columns})


def own_ids(count: int, *, days: float = 8) -> list[str]:
    """Insert events that ended that many days ago, with ids chosen by their writer."""
    given = {"event_type": "x", "payload": "{}", "status": Status.DONE}
    at = now() - timedelta(days=days)
    names = [str(uuid.UUID(int=(n + 1) * (2**128 // (count + 1)))) for n in range(count)]
    first = OutboxEvent(
        id=names[0], event_id=names[0], occurred_at=at, created_at=at, done_at=at, **given
    )
    multiply(first, names[1:])
    return names


def left() -> set[str]:
    return {*OutboxEvent.objects.values_list("pk", flat=True)}


def progress() -> Progress:
    return Progress.of(OutboxLease.objects.get().state)


def later(**fields: timedelta) -> None:
    """Shift times that the lease notes into the past."""
    noted = progress()
    for name, by in fields.items():
        setattr(noted, name, getattr(noted, name) - by)
    OutboxLease.objects.update(state=noted.text())


def an_hour_passes() -> None:
    later(ran_at=timedelta(hours=1), rest_until=timedelta(hours=1))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the runs that start."""
    begun: list[str] = []
    real = housekeeper.purge_events

    def counted(alias: str, **given: Any) -> Iterator[int]:
        begun.append(alias)
        return real(alias, **given)

    monkeypatch.setattr(housekeeper, "purge_events", counted)
    return begun


def test_a_worker_that_joins_leaves_the_run_of_this_interval(runs: list[str]) -> None:
    rest_of(purging(3600, me="first"))
    finished(3)
    assert 3500 < purging(3600, me="second").run() < 4000
    assert (len(left()), len(runs)) == (3, 1)
    an_hour_passes()
    rest_of(purging(3600, me="second"))
    assert (len(left()), len(runs)) == (0, 2)


def test_a_shorter_interval_holds_at_once(runs: list[str]) -> None:
    rest_of(purging(1e6, me="first"))
    later(ran_at=timedelta(seconds=60), rest_until=timedelta(hours=1))
    rest_of(purging(60, me="second"))
    assert len(runs) == 2


def test_a_clock_that_was_fast_does_not_keep_the_purge_from_running(runs: list[str]) -> None:
    rest_of(purging(3600))
    year = timedelta(days=365)
    later(ran_at=-year, rest_until=-year, scanned_at=-year)
    rest_of(purging(3600, me="second"))
    assert len(runs) == 2
    assert progress().scanned_at < now()  # type: ignore[operator]


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """Cut each run short after a batch of ten."""
    settings.OUTBOX = {"PURGE_BATCH_SIZE": 10}
    monkeypatch.setattr(housekeeper, "MAX_RUN", 0.0)


def end_lease() -> None:
    OutboxLease.objects.update(locked_until=now() - timedelta(seconds=1))


def test_what_a_dead_worker_purged_another_takes_over(cut: None) -> None:
    finished(40)
    dead, heir = purging(3600, me="dead"), purging(3600, me="heir")
    dead.run()
    assert (len(left()), OutboxLease.objects.get().locked_by) == (30, "dead")
    assert 25 < heir.run() <= 33  # until the lease ends
    assert len(left()) == 30
    end_lease()
    heir.run()
    assert (len(left()), OutboxLease.objects.get().locked_by) == (20, "heir")


def test_who_has_lost_the_lease_leaves_the_purge_to_its_new_holder(cut: None) -> None:
    finished(40)
    slow, heir = purging(3600, me="slow", lease=30), purging(3600, me="heir")
    slow.run()
    end_lease()
    heir.run()
    slow._leader._renewed_at -= 20  # due for renewal
    slow.run()  # notices the loss
    assert not slow._leader.holds
    before = left()
    assert slow.run() > 25
    slow.end()
    assert (left(), OutboxLease.objects.get().locked_by) == (before, "heir")


def test_the_lease_is_renewed_between_batches(cut: None) -> None:
    finished(20)
    each = purging(3600, lease=30)
    each.run()
    until = OutboxLease.objects.get().locked_until
    each._leader._renewed_at -= 20
    each.run()
    assert OutboxLease.objects.get().locked_until > until  # type: ignore[operator]


def test_a_stop_gives_the_lease_back(cut: None) -> None:
    finished(40)
    each = purging(3600, me="first")
    each.run()
    each.end()
    assert OutboxLease.objects.get().locked_by is None
    purging(3600, me="second").run()
    assert len(left()) == 20


def test_a_lease_that_cannot_be_given_back_does_not_hold_the_stop_up(
    cut: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finished(400)
    monkeypatch.setattr(type(dialect_of(connection)), "note_lease", lambda *given, **more: 1 / 0)
    with caplog.at_level(logging.WARNING, "django_outbox"), Worker():
        wait_until(lambda: OutboxLease.objects.exclude(locked_by=None).exists())
    assert "housekeeper not closed error=division by zero" in caplog.text


def test_the_command_needs_no_lease_and_changes_none(cut: None) -> None:
    finished(40)
    purging(3600, me="holder").run()
    before = OutboxLease.objects.values().get()
    call_command("outbox_purge", verbosity=0)
    assert not left()
    assert OutboxLease.objects.values().get() == before


@pytest.mark.parametrize("state", ["", "{", "[]", '{"ran_at": 5}', '{"scan": ["gone", "x"]}', None])
def test_a_note_that_cannot_be_read_begins_anew(state: str | None, runs: list[str]) -> None:
    OutboxLease.objects.create(name="purge", state=state)
    finished(3)
    rest_of(purging(3600))
    assert not left()
    assert json.loads(OutboxLease.objects.get().state or "")["ran_at"]


def test_an_event_that_ended_within_the_hour_is_found_by_the_next_run() -> None:
    """The previous run passed its id before it was old enough."""
    rest_of(purging(3600, me="first"))
    an_hour_passes()
    ended = now() - timedelta(seconds=WEEK + 5)
    insert(**DONE, made=WEEK + 2 * 3600 - 60, done_at=ended)
    rest_of(purging(3600, me="second"))
    assert not left()


def test_writer_only_purges_by_the_age_of_ids_too(settings: Any) -> None:
    settings.OUTBOX = {"MODE": "writer_only", "RETENTION_DONE": DAY, "RETENTION_DEAD": 60}
    rest_of(purging(3600, me="first"))
    an_hour_passes()
    (young,) = insert(made=DAY - 30, created_at=now() - timedelta(seconds=DAY - 30))
    insert(made=DAY + 30, created_at=now() - timedelta(seconds=DAY + 30), unique_key="u")
    rest_of(purging(3600, me="second"))
    assert left() == {young}


def test_an_event_that_ended_long_after_it_was_written_is_found_by_the_scan() -> None:
    rest_of(purging(3600, me="first"))
    insert(**DONE, made=30 * DAY, done_at=now() - timedelta(days=8))
    an_hour_passes()
    rest_of(purging(3600, me="second"))
    assert len(left()) == 1
    later(scanned_at=timedelta(days=1))
    rest_of(purging(3600, me="third"))
    assert not left()


def test_there_is_one_scan_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    real = housekeeper.scan_events

    def counted(alias: str, **given: Any) -> Any:
        begun.append(given["after"])
        return real(alias, **given)

    monkeypatch.setitem(housekeeper.SCANS, "events", counted)
    rest_of(purging(3600))
    later(scanned_at=timedelta(hours=23))
    for me in "ab":
        an_hour_passes()
        rest_of(purging(3600, me=me))
    assert begun.count("") == 1
    later(scanned_at=timedelta(hours=1))
    rest_of(purging(3600, me="c"))
    assert begun.count("") == 2


def test_the_scan_keeps_to_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeper, "SCAN_RATE", 20)
    own_ids(50)
    each = purging(3600)
    each.run()  # the hourly run, which finds ids lower than those of a week ago
    rows, rests = len(left()), []
    while each._leader.holds:
        rests.append(each.run())
    assert not left()
    assert max(rests[:-1]) <= 1.0  # the length of a batch, at most
    assert sum(rests[:-1]) == pytest.approx(rows / 20)


def test_the_scan_goes_on_where_another_worker_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeper, "SCAN_RATE", 10)
    rest_of(purging(3600, me="before"))
    ids = sorted(own_ids(30))
    later(scanned_at=timedelta(days=1))
    first = purging(3600, me="first")
    first.run()
    assert left() == {*ids[10:]}
    first.end()
    assert progress().scan == ("events", ids[9])
    (found,) = insert(**DONE, made=WEEK * 4, done_at=now() - timedelta(days=8))  # already scanned
    assert found < ids[9]
    rest_of(purging(3600, me="second"))
    assert left() == {found}


def test_what_the_scan_deletes_is_announced() -> None:
    rest_of(purging(3600, me="before"))
    own_ids(30)
    later(scanned_at=timedelta(days=1))
    with heard(signals.events_purged) as told:
        rest_of(purging(3600))
    assert [each["count"] for each in told] == [30]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {WEEK}),
        ({"RETENTION_DONE": None}, set()),
        ({"RETENTION_DONE": None, "RETENTION_DEAD": 5}, {5}),
        ({"RETENTION_DONE": 0}, {0, WEEK}),
        ({"RETENTION_DONE": 1, "RETENTION_UNIQUE": None, "RETENTION_DEAD": 3}, {1, 3}),
        ({"MODE": "writer_only", "RETENTION_DONE": 1, "RETENTION_DEAD": 3}, {1}),
        ({"MODE": "writer_only", "RETENTION_DONE": None, "RETENTION_DEAD": 3}, set()),
    ],
    ids=str,
)
def test_the_ages_at_which_events_go(given: dict[str, Any], found: set[float]) -> None:
    assert ages(Settings(**given)) == found
