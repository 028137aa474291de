"""Slow replays: by the queryset, the command and the admin; due one after the other."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxAttempt, OutboxEvent, OutboxStream, replay
from django_outbox.models.replay import Spacing
from tests.table import insert, keyed, listening, now, row, stream_due_in

pytestmark = pytest.mark.django_db(transaction=True)

MINUTE, SECOND = timedelta(minutes=1), timedelta(seconds=1)


def dead(count: int = 1, **columns: Any) -> list[str]:
    given = {"status": Status.DEAD, "done_at": now(), "attempts": 3, "last_error": "E: no"}
    return insert(count, due=None, **{**given, **columns})


def dead_in_stream(key: str, count: int) -> list[str]:
    ids = keyed(key, count, status=Status.DEAD, done_at=now(), last_error="E: no")
    OutboxStream.objects.update(due_at=None)
    return ids


def times(ids: list[str]) -> list[datetime]:
    found = [row(each).available_at for each in ids]
    assert None not in found
    return [each for each in found if each is not None]


def steps(found: list[datetime]) -> set[timedelta]:
    return {later - earlier for earlier, later in pairwise(found)}


# -- the queryset ----------------------------------------------------------------------------------


def test_events_become_due_one_after_the_other_in_the_order_of_their_ids() -> None:
    ids = sorted(dead(5))
    before = now()
    assert OutboxEvent.objects.dead().replay(rate="10/m", by="ada") == 5
    found = times(ids)
    assert steps(found) == {6 * SECOND}
    assert before <= found[0] <= now()
    assert [row(each).first_due_at for each in ids] == found
    assert {row(each).status for each in ids} == {Status.NEW}
    assert {each.by for each in OutboxAttempt.objects.filter(kind="replayed")} == {"ada"}


def test_the_rate_holds_over_statements_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "EVENTS_PER_STATEMENT", 3)
    ids = sorted(dead(25))
    assert [*OutboxEvent.objects.dead().replay_batches(size=10, rate="5/s")] == [10, 10, 5]
    assert steps(times(ids)) == {SECOND / 5}


def test_events_with_progress_keep_their_places() -> None:
    first, second, third = sorted(dead(3))
    text = '{"a":{"state":"done"},"b":{"state":"dead","attempts":3}}'
    OutboxEvent.objects.filter(pk=second).update(progress=text)
    OutboxEvent.objects.all().replay(rate="1/s")
    assert steps(times([first, second, third])) == {SECOND}
    assert '"dead"' not in str(row(second).progress)


def test_the_ten_first_are_a_slice() -> None:
    ids = sorted(dead(12))
    rows = OutboxEvent.objects.dead().order_by("pk")[:10]
    assert rows.replay(rate="1/m") == 10
    assert steps(times(ids[:10])) == {MINUTE}
    assert {*OutboxEvent.objects.dead().values_list("pk", flat=True)} == {*ids[10:]}


def test_events_of_a_stream_wait_for_their_time_and_keep_their_order() -> None:
    got: list[str] = []
    with listening(lambda event: got.append(event.event_id)):
        first, second = dead_in_stream("k", 2)
        (behind,) = keyed("k")
        assert OutboxEvent.objects.dead().replay(rate="1/m") == 2
        outbox.drain()
        assert got == [first]
        assert 50 < stream_due_in("k") <= 60
        deliver_at = row(second).deliver_at
        assert deliver_at is not None
        assert row(second).first_due_at == deliver_at
        OutboxEvent.objects.filter(pk=second).update(deliver_at=now() - SECOND)
        OutboxStream.objects.update(due_at=now())
        outbox.drain()
    assert got == [first, second, behind]


def test_a_worker_delivers_them_as_they_become_due() -> None:
    ids = sorted(dead(3))
    with listening(lambda event: None):
        OutboxEvent.objects.dead().replay(rate="1/m")
        assert outbox.drain() == 1
        assert outbox.drain(at=now() + MINUTE) == 1
    assert [row(each).status for each in ids] == [Status.DONE, Status.DONE, Status.NEW]


def test_a_spacing_that_was_interrupted_makes_no_burst() -> None:
    """What was not replayed meanwhile is not caught up."""
    late = now()
    spacing = Spacing("1/m", start=late - timedelta(days=1))
    assert spacing.take(2, late) == [late, late + MINUTE]
    assert spacing.last_at == late + MINUTE
    assert spacing.take(1, late) == [late + 2 * MINUTE]
    assert spacing.take(0, late) == []
