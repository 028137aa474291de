"""Queryset methods on events with a key and on their streams, on SQLite."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings

from django_outbox.events import stream_of
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from tests.table import insert, now

pytestmark = pytest.mark.django_db(transaction=True)


NEW, DONE, RETRY, DEAD = Status.NEW, Status.DONE, Status.RETRY, Status.DEAD
LONG_AGO = datetime(2001, 1, 1, tzinfo=timezone.utc)


BLOCK = {"ON_DEAD": "block"}


def events(key: str, *statuses: Status, **fields: Any) -> list[str]:
    """Insert the events of a stream, in this order, as a worker would have left them."""
    found = []
    for n, status in enumerate(statuses, 1):
        finished = status in (DONE, DEAD)
        at = now() if finished else None
        error = "ValueError: no" if status == DEAD else None
        values = {"done_at": at, "last_error": error, **fields}
        found += insert(due=None, key=key, seq=n, status=status, first_due_at=now(), **values)
    return found


def put(key: str = "k", **columns: Any) -> OutboxStream:
    """Insert a stream, long idle by default."""
    return OutboxStream.objects.create(
        stream=stream_of("", key),
        **{"key": key, "seq": 100, "due_at": None, "locked_at": LONG_AGO, **columns},
    )


def stream(key: str = "k") -> OutboxStream:
    return OutboxStream.objects.get(pk=f":{key}")


def is_due(key: str = "k") -> bool:
    return OutboxStream.objects.due().filter(pk=f":{key}").exists()


def in_ten_minutes() -> datetime:
    return now() + timedelta(minutes=10)


def release(seq: int, *, key: str = "k", me: str = "w1") -> int:
    """Release a stream as its worker does: only if its version is the one that was read."""
    mine = OutboxStream.objects.filter(pk=f":{key}", seq=seq, locked_by=me)
    return mine.update(due_at=None, locked_by=None, locked_at=now())


def test_a_replay_does_not_wait_for_a_head_that_is_retried_later() -> None:
    """The stream is due so that a read happens; the read decides what is delivered."""
    events("k", DEAD, RETRY)
    put(due_at=in_ten_minutes())
    OutboxEvent.objects.dead().replay()
    assert is_due()


def test_a_failed_replay_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Event and stream change in one transaction."""
    events("k", DEAD)
    put()
    monkeypatch.setattr("django_outbox.models.replay._reset", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        OutboxEvent.objects.dead().replay()
    assert (stream().seq, stream().due_at) == (100, None)


def test_a_discard_while_the_stream_is_leased_is_found_by_its_owner() -> None:
    """Otherwise the owner would release the stream as still blocked by its dead head."""
    events("k", DEAD, NEW)
    put(due_at=in_ten_minutes(), locked_by="w1", seq=7)
    OutboxEvent.objects.dead().discard()
    assert release(7) == 0


def test_live_events_are_not_discarded_under_a_worker() -> None:
    live = events("k", NEW, RETRY, DONE)
    put(due_at=in_ten_minutes(), locked_by="w1")
    assert OutboxEvent.objects.discard() == 0
    assert OutboxEvent.objects.count() == len(live)
    assert stream().seq == 100  # no worker is woken


def test_what_a_worker_is_about_to_run_is_not_skipped() -> None:
    events("k", RETRY)
    put(due_at=in_ten_minutes(), locked_by="w1")
    assert OutboxEvent.objects.skip() == 0
    assert OutboxEvent.objects.filter(status=RETRY).count() == 1


def test_skip_leaves_finished_events_and_those_without_a_key() -> None:
    events("k", DONE, DEAD)
    insert(due=60, status=RETRY)
    put()
    assert OutboxEvent.objects.skip() == 0


def test_an_idle_stream_behind_a_dead_head_is_blocked_where_dead_heads_block() -> None:
    events("blocked", DEAD, NEW)
    events("over", DEAD, DONE)
    for key in ("blocked", "over"):
        put(key)
    assert not OutboxStream.objects.blocked().exists()
    with override_settings(OUTBOX=BLOCK):
        assert [each.key for each in OutboxStream.objects.blocked()] == ["blocked"]


def test_heads_of_more_streams_than_a_statement_takes() -> None:
    for n in range(60):
        events(f"k{n}", NEW)
    keys = [stream_of("", f"k{n}") for n in range(60)]
    assert len(dialect_of(connection).heads(streams=keys, statuses=(0, 2, 3))) == 60


def test_36_a_purge_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(12):
        put(f"k{n:02}")
    put("k05b", due_at=LONG_AGO)
    with override_settings(OUTBOX={"PURGE_BATCH_SIZE": 5}):
        assert [*OutboxStream.objects.purge_batches()] == [5, 4, 3]


def test_a_head_that_ends_while_it_is_looked_for_is_none() -> None:
    """Between the two statements: a page that shows it knows no state of it."""
    put()
    events("k", NEW)
    asked = 0

    def end(execute: Any, *statement: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 2:
            OutboxEvent.objects.update(status=DONE)
        return execute(*statement)

    with connection.execute_wrapper(end):
        assert OutboxStream.objects.heads([stream_of("", "k")]) == {}
