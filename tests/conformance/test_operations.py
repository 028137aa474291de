"""The log of operations: what people do is in it, whichever way they do it."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxOperation, OutboxPause, OutboxStream
from django_outbox.models.operation import KEPT
from tests.cases import cases
from tests.table import insert, keyed, now, undone

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


def dead(count: int = 1, **columns: Any) -> list[str]:
    return insert(count, due=None, status=Status.DEAD, done_at=now(), **columns)


def waiting(count: int = 1) -> list[str]:
    return insert(count, due=3600)


def log() -> list[tuple[str, str, int]]:
    return [*OutboxOperation.objects.order_by("pk").values_list("kind", "by", "done")]


def pause() -> None:
    OutboxPause.objects.pause("event_type", "order.placed", by="ada")


ACTS = {
    "replay": (dead, lambda rows: rows.replay(by="ada")),
    "discard": (dead, lambda rows: rows.discard(by="ada")),
    "run_now": (waiting, lambda rows: rows.run_now(by="ada")),
    "skip": (lambda count: keyed("k", count), lambda rows: rows.skip(by="ada")),
    "cancel": (waiting, lambda rows: rows.cancel(by="ada")),
}


@cases("kind", ACTS)
@undone()
def test_each_verb_adds_one_row_for_all_its_batches(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_outbox.models.replay.BATCH_SIZE", 2)
    make, act = ACTS[kind]
    ids = make(5)
    assert act(OutboxEvent.objects.filter(pk__in=ids)) == 5
    assert log() == [(kind, "ada", 5)]
    row = OutboxOperation.objects.get()
    assert all(each in row.about for each in ids)
    assert row.state == "done"
    assert row.started_at <= row.ended_at <= now()
    assert act(OutboxEvent.objects.filter(pk__in=ids).none()) == 0
    assert len(log()) == 1


def test_batches_of_one_replay_share_a_row() -> None:
    dead(5)
    assert [*OutboxEvent.objects.dead().replay_batches(size=2, by="ada")] == [2, 2, 1]
    assert log() == [("replay", "ada", 5)]


def test_what_is_rolled_back_is_not_in_the_log() -> None:
    dead(3)
    batches = OutboxEvent.objects.dead().replay_batches(size=2, by="ada")
    with pytest.raises(LookupError), transaction.atomic():
        next(batches)
        raise LookupError
    assert log() == []
    assert [*batches] == [1]
    assert log() == [("replay", "ada", 1)]


def test_business_code_that_cancels_adds_nothing() -> None:
    (event,) = waiting()
    assert outbox.cancel(event_id=event) == 1
    assert log() == []


def test_a_pause_and_its_end() -> None:
    pause()
    pause()
    insert(3, queue=f"paused:{OutboxPause.objects.get().pk}")
    assert OutboxPause.objects.resume(by="ben").events == 3
    assert OutboxPause.objects.resume(by="ben").pauses == 0
    assert log() == [("pause", "ada", 0), ("resume", "ben", 3)]
    assert {"order.placed" in each.about for each in OutboxOperation.objects.all()} == {True}


COMMANDS = {
    "replay": ["outbox_replay", "--event-type", "order.placed", "--by", "ada"],
    "discard": ["outbox_dead", "discard", "--event-type", "order.placed", "--by", "ada"],
    "pause": ["outbox_pause", "--event-type", "order.placed", "--force", "--by", "ada"],
    "resume": ["outbox_pause", "--end", "--event-type", "order.placed", "--by", "ada"],
}


@cases("kind", COMMANDS)
@undone()
def test_each_command_adds_one_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_outbox.management.arguments.BATCH_SIZE", 2)
    dead(3, event_type="order.placed")
    dead(1, event_type="order.paid")
    if kind == "resume":
        pause()
        OutboxOperation.objects.all().delete()
    call_command(*COMMANDS[kind], stdout=StringIO(), stderr=StringIO())
    assert log() == [(kind, "ada", 3 if kind in ("replay", "discard") else 0)]
    assert "order.placed" in OutboxOperation.objects.get().about


def test_a_command_that_changes_nothing_adds_nothing() -> None:
    dead(1)
    for more in (["--all", "--dry-run"], ["--event-type", "order.gone"]):
        call_command("outbox_replay", *more, stdout=StringIO())
    assert log() == []


def test_the_purge_keeps_the_log_of_ninety_days_and_what_is_open() -> None:
    old, new = now() - KEPT - HOUR, now() - KEPT + HOUR
    made = [
        OutboxOperation.objects.create(kind="replay", started_at=at, state=state).pk
        for at, state in ((old, "done"), (old, "stopped"), (old, "open"), (new, "done"))
    ]
    assert sum(OutboxOperation.objects.purge_batches()) == 2
    assert {*OutboxOperation.objects.values_list("pk", flat=True)} == {*made[2:]}


# --- what is to be worked off ---------------------------------------------------------------------


def test_only_bulk_changes_that_can_be_stored_are_begun() -> None:
    begin, rows = OutboxOperation.objects.begin, OutboxEvent.objects.all()
    for kind in ("pause", "skip", "x"):
        with pytest.raises(ValueError, match="expected one of replay, discard, run_now"):
            begin(kind, rows)
    for rate in ("", "100", "0/m", "fast"):
        with pytest.raises(ValueError, match="100/m"):
            begin("replay", rows, rate=rate)
    for limit in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            begin("replay", rows, limit=limit)
    streams = OutboxStream.objects.values("pk")
    for unfit in (rows[:3], rows.filter(stream__in=streams), rows.due(), rows.held()):
        with pytest.raises(ValueError, match="expected"):
            begin("replay", unfit)
    assert not OutboxOperation.objects.exists()
