"""Queryset methods on events with a key and on their streams, and the purge of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_outbox import write
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from tests.databases import vendor
from tests.plans import analyze, explain, statements, uses
from tests.table import elsewhere, in_thread, insert, listening, now, row
from tests.test_stream_queryset import (
    LONG_AGO,
    events,
    in_ten_minutes,
    is_due,
    put,
    release,
    stream,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def listener() -> Iterator[None]:
    """Register an unnamed listener: events wait in the stream of their key."""
    with listening(lambda event: None, "*"):
        yield


NEW, DONE, RETRY, DEAD = Status.NEW, Status.DONE, Status.RETRY, Status.DEAD
several_writers = pytest.mark.skipif(vendor() == "sqlite", reason="SQLite has one writer at a time")


# --- replay --------------------------------------------------------------------------------------


def test_a_replayed_event_keeps_its_place_and_its_stream_is_due() -> None:
    dead, follower = events("k", DEAD, DONE, attempts=3, rescues=2, deliver_at=LONG_AGO)
    put()
    before = row(dead)

    assert OutboxEvent.objects.dead().replay() == 1

    event, its = row(dead), stream()
    assert (event.status, event.attempts, event.rescues) == (NEW, 0, 0)
    assert (event.key, event.seq) == ("k", before.seq)
    assert (event.available_at, event.deliver_at) == (None, None)  # the stream is due instead
    assert (event.done_at, event.last_error) == (None, None)
    assert event.first_due_at > before.first_due_at  # type: ignore[operator]
    assert (its.seq, its.locked_by) == (101, None)
    assert is_due()
    assert row(follower).status == DONE


def test_r6_a_replay_while_the_stream_is_leased_is_found_by_its_owner() -> None:
    """Otherwise the owner would release the stream as idle, and the event would be stuck."""
    [dead] = events("k", DEAD)
    lease = in_ten_minutes()
    put(due_at=lease, locked_by="w1", seq=7)
    seq_read = stream().seq  # the owner has read its events: none is pending

    assert OutboxEvent.objects.filter(pk=dead).replay() == 1

    assert release(seq_read) == 0
    its = stream()
    assert (its.seq, its.locked_by, its.due_at) == (8, "w1", lease)  # the lease is unchanged


def test_a_replay_brings_the_stream_back_that_was_purged() -> None:
    """The stream's row may have been purged; the replay inserts it again."""
    events("k", DEAD)
    assert OutboxEvent.objects.dead().replay() == 1
    assert is_due()
    assert stream().seq > 1_000_000  # from the clock, so that numbers keep rising


def test_a_replay_waits_for_the_writer_of_its_key_and_both_count() -> None:
    """Each raises the version of the stream, and neither change is lost."""
    [dead] = events("k", DEAD)
    put(seq=10)
    with elsewhere(lambda: write("x", key="k")):
        replaying = in_thread(lambda: OutboxEvent.objects.filter(pk=dead).replay())
    assert replaying.result(30) == 1
    assert stream().seq == 12
    assert OutboxEvent.objects.pending().count() == 2


# --- discard, skip, release ----------------------------------------------------------------------


def test_a_discarded_head_lets_its_followers_go_on() -> None:
    """Discarding a dead head that blocks its stream makes the stream due."""
    head, follower = events("k", DEAD, NEW)
    put()
    assert OutboxEvent.objects.dead().discard() == 1
    assert not OutboxEvent.objects.filter(pk=head).exists()
    assert row(follower).status == NEW
    assert (stream().seq, is_due()) == (101, True)


def test_a_skipped_head_is_dead_and_its_stream_goes_on() -> None:
    head, follower = events("k", RETRY, NEW, last_error="OSError: refused", attempts=2)
    put(due_at=in_ten_minutes())

    assert OutboxEvent.objects.filter(pk=head).skip() == 1

    event = row(head)
    assert (event.status, event.attempts, event.deliver_at) == (DEAD, 2, None)
    assert event.done_at is not None
    assert (event.last_error or "").startswith("Skipped")
    assert "OSError: refused" in (event.last_error or "")
    assert row(follower).status == NEW
    assert is_due()


def test_release_gives_back_the_streams_of_these_events() -> None:
    mine, other = events("k", NEW, NEW), events("z", NEW)
    for key in "kz":
        put(key, due_at=in_ten_minutes(), locked_by="w1")
    insert(due=60, locked_by="w1")

    assert OutboxEvent.objects.filter(pk__in=mine).release() == 1
    assert (stream("k").locked_by, is_due("k")) == (None, True)
    assert (stream("z").locked_by, is_due("z")) == ("w1", False)
    assert OutboxEvent.objects.release() == 2  # the other stream, and the event without a key
    assert is_due("z")
    assert row(other[0]).status == NEW


# --- adjectives and questions --------------------------------------------------------------------


def test_adjectives_of_streams() -> None:
    put("due", due_at=LONG_AGO)
    put("expired", due_at=LONG_AGO, locked_by="w1")
    put("leased", due_at=in_ten_minutes(), locked_by="w1")
    put("waits", due_at=in_ten_minutes())
    put("idle")

    def keys(rows: Any) -> set[str]:
        return {each.key for each in rows}

    streams = OutboxStream.objects
    assert keys(streams.due()) == {"due", "expired"}
    assert keys(streams.leased()) == {"leased"}
    assert keys(streams.blocked()) == {"waits"}
    assert streams.release() == 2


def test_heads_and_backlogs() -> None:
    """The admin shows both for a blocked stream."""
    dialect = dialect_of(connection)
    first = events("a", DONE, RETRY, NEW, NEW)
    second = events("b", DEAD, NEW)
    events("c", DONE)
    keys = [":a", ":b", ":c", ":none"]

    heads = dialect.heads(streams=keys, statuses=(0, 2))
    assert heads == {":a": first[1], ":b": second[1]}
    assert dialect.heads(streams=keys, statuses=(0, 2, 3)) == {":a": first[1], ":b": second[0]}
    found = dialect.summaries(streams=keys, statuses=(0, 2), most=2)
    counts = {key: backlog for key, (_head, backlog) in found.items()}
    assert counts == {":a": 2, ":b": 1, ":c": 0, ":none": 0}
    assert dialect.summaries(streams=[":a"], statuses=(0, 2), most=100)[":a"] == (heads[":a"], 3)


# --- purge of streams ----------------------------------------------------------------------------


def test_36_idle_streams_are_purged() -> None:
    put("old")
    put("young", locked_at=now())
    put("due", due_at=LONG_AGO)
    put("leased", due_at=LONG_AGO, locked_by="w1")
    put("waits", due_at=in_ten_minutes())
    assert [each.key for each in OutboxStream.objects.expired()] == ["old"]
    assert OutboxStream.objects.purge() == 1
    assert OutboxStream.objects.count() == 4


@pytest.mark.parametrize("status", [NEW, RETRY, DEAD], ids=lambda each: each.name)
def test_36_a_stream_with_a_pending_or_dead_event_stays(status: Status) -> None:
    """Otherwise ``seq`` would start again while events with old numbers remain."""
    put()
    events("k", DONE, status)
    assert OutboxStream.objects.purge() == 0
    OutboxEvent.objects.filter(status=status).update(status=DONE)
    assert OutboxStream.objects.purge() == 1


def test_36_after_a_purge_the_numbers_of_a_key_still_rise() -> None:
    """A new stream takes its first number from the clock."""
    with transaction.atomic():
        first = row(str(write("x", key="k"))).seq
    OutboxEvent.objects.update(status=DONE)
    OutboxStream.objects.update(due_at=None, locked_at=LONG_AGO)
    assert OutboxStream.objects.purge() == 1
    with transaction.atomic():
        again = row(str(write("x", key="k"))).seq
    assert again > first  # type: ignore[operator]


@several_writers
def test_r7_a_stream_somebody_writes_to_is_not_purged_and_nobody_waits() -> None:
    put()
    put("z")
    with elsewhere(lambda: write("x", key="k")):
        assert in_thread(OutboxStream.objects.purge).result(5) == 1
        assert OutboxStream.objects.filter(pk=":k").exists()
    assert is_due()  # the write has committed by now
    assert OutboxStream.objects.purge() == 0
    assert OutboxEvent.objects.get().seq == stream().seq == 101


def test_r7_a_write_right_before_the_delete_keeps_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The writer comes after the query for expired streams, so the locked row is checked again."""
    put()
    put("z")
    real = type(dialect_of(connection)).delete
    seen: list[list[str]] = []

    def late(self: Any, table: str, *, ids: list[str]) -> int:
        seen.append(ids)
        return real(self, table, ids=ids)

    monkeypatch.setattr(type(dialect_of(connection)), "delete", late)
    expired = OutboxStream.objects.expired()  # by the clock before the write
    with transaction.atomic():
        write("x", key="k")
    assert expired._delete_unlocked() == 1
    assert seen == [[":z"]]


@several_writers
def test_r11_a_purge_deletes_by_the_primary_key_and_meets_no_other_row() -> None:
    """With a list of keys, MariaDB scanned the small table and waited for every locked row."""
    for key in "abc":
        put(key)
    put("z", due_at=LONG_AGO)
    with elsewhere(lambda: write("x", key="z")), CaptureQueriesContext(connection) as sent:
        assert OutboxStream.objects.purge() == 3
    deletes = [each["sql"] for each in sent.captured_queries if each["sql"].startswith("DELETE")]
    assert len(deletes) == 1


@override_settings(OUTBOX={"MODE": "writer_only", "RETENTION_DONE": 0})
def test_in_writer_only_streams_go_when_their_events_went() -> None:
    """In this mode no worker makes a stream idle."""
    put("k", due_at=LONG_AGO)
    OutboxStream.objects.create(stream=":old", key="old", seq=9)  # as of a key's first write
    with transaction.atomic():
        write("x", key="young")
    assert OutboxStream.objects.purge() == 2
    assert [*OutboxStream.objects.values_list("pk", flat=True)] == [":young"]


# --- purge of dead events ------------------------------------------------------------------------


@pytest.mark.parametrize("on_dead", ["continue", "block"])
def test_a_dead_head_with_followers_is_not_purged_where_it_blocks(on_dead: str) -> None:
    """A purge would end the block, which only a person may do."""
    head, _ = events("k", DEAD, NEW)
    OutboxEvent.objects.filter(pk=head).update(done_at=LONG_AGO)
    alone, _ = events("z", DEAD, DONE)
    OutboxEvent.objects.filter(pk=alone).update(done_at=LONG_AGO)
    [unkeyed] = insert(due=None, status=DEAD, done_at=LONG_AGO)

    with override_settings(OUTBOX={"ON_DEAD": on_dead, "RETENTION_DEAD": 60}):
        OutboxEvent.objects.purge()
    left = {*OutboxEvent.objects.values_list("pk", flat=True)}
    assert (head in left) == (on_dead == "block")
    assert not {alone, unkeyed} & left


# --- what it costs -------------------------------------------------------------------------------


@pytest.fixture
def long_backlog() -> None:
    """One blocked stream with a long backlog among many finished events."""
    with transaction.atomic():
        insert(due=None, key="k", seq=0, status=RETRY)
        insert(3000, due=None, key="k", seq=1, counted="seq")
        for n in range(50):
            insert(80, due=None, key=f"d{n}", seq=1, counted="seq", status=DONE, done_at=LONG_AGO)
        put("k", due_at=in_ten_minutes())
    if connection.vendor != "sqlite":  # rarely analyzed in practice
        for model in (OutboxEvent, OutboxStream):  # what is known of streams may be of another test
            analyze(model)


def test_looks_at_streams_use_the_index_of_their_events(long_backlog: None) -> None:
    """Neither a long backlog behind a head nor finished events make these queries slower."""
    dialect = dialect_of(connection)
    for work in (
        lambda: dialect.heads(streams=[":k", ":z"], statuses=(0, 2)),
        lambda: dialect.heads(streams=[":k", ":z"], statuses=(0, 2, 3)),
        lambda: dialect.summaries(streams=[":k", ":z"], statuses=(0, 2), most=1000),
        lambda: [*OutboxStream.objects.expired()],
    ):
        for sql, params in statements(work):
            plan = repr(explain(sql, params))
            assert uses("outbox_event_stream", sql, params), (sql, plan)
            assert not [each for each in ("Sort", "filesort", "TEMP") if each in plan], (sql, plan)
