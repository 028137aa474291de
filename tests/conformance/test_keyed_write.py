"""Writes with a key, on the database of this run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from uuid import UUID

import pytest
from django.db import OperationalError, connection, transaction
from django.test import override_settings

from django_outbox import DuplicateEvent, Event, write, write_many
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from django_outbox.sql import insert as inserting
from tests.databases import vendor
from tests.sessions import waiters
from tests.table import claim, elsewhere, in_thread, listening, now, row, undone
from tests.test_keyed_write import (
    HOUR,
    NOON,
    SAME,
    keyed,
    micros,
    put_stream,
    seqs,
    statements,
    stream,
)
from tests.testapp.models import Order
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def listener() -> Iterator[None]:
    """Register an unnamed listener: events wait in the stream of their key."""
    with listening(lambda event: None, "*"):
        yield


def test_an_event_with_a_key_takes_a_place_in_its_stream() -> None:
    with transaction.atomic():
        event_id = write("x", {"n": 1}, key="k")

    event, its = row(str(event_id)), stream()
    assert (event.key, event.seq) == ("k", its.seq)
    assert its.due_at is not None
    assert abs((its.due_at - now()).total_seconds()) < 60
    assert (its.locked_by, its.locked_at) == (None, None)
    assert (event.available_at, event.deliver_at) == (None, None)  # its stream is due instead
    assert event.first_due_at is not None
    assert claim() == []


def test_a_key_costs_one_statement_more_or_none() -> None:
    sent = statements(lambda: write("x", key="k"))
    assert len(sent) == {"postgresql": 1, "mysql": 2, "sqlite": 2}[connection.vendor]


@pytest.mark.skipif(connection.vendor != "mysql", reason="others have no list of warnings")
def test_a_keyed_write_leaves_no_warning() -> None:
    """MySQL has warning 1287 for deprecated syntax."""
    found: list[Any] = []

    def look(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        with closing(connection.connection.cursor()) as cursor:
            cursor.execute("SHOW WARNINGS")
            found.append((sql, cursor.fetchall()))
        return result

    with connection.execute_wrapper(look):
        for _ in range(2):
            with transaction.atomic():
                write_many(keyed("k", "z"))
            with transaction.atomic():
                write("x", key="k")
        dialect_of(connection).wake_streams([":k", ":z"])
    upserts = [sql for sql, _ in found if "ON DUPLICATE KEY" in sql]
    assert len(upserts) == 5
    assert not [each for each in found if each[1]]


def test_an_application_clock_changes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the database's clock counts."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    before = micros()
    with transaction.atomic():
        write("x", key="k", occurred_at=NOON)
        write("x", key="k", occurred_at=NOON.replace(year=1999))
    first, second = OutboxEvent.objects.order_by("seq")
    assert (first.occurred_at, second.occurred_at) == (NOON, NOON.replace(year=1999))
    assert before - 1000 <= stream().seq <= before + HOUR


def test_a_rollback_returns_the_place() -> None:
    """An undone write leaves no gap, and no stream without an event."""
    with undone():
        write("x", key="k")
    assert not OutboxStream.objects.exists()

    with transaction.atomic():
        write("x", key="k")
        with undone():
            write("x", key="k")
        write("x", key="k")
    first = seqs()[0]
    assert seqs() == [first, first + 1]  # type: ignore[operator]
    assert stream().seq == seqs()[-1]


@pytest.mark.parametrize(
    ("given", "stored"),
    [(7, "7"), (UUID(int=1), str(UUID(int=1))), ("Ördér ☕", "Ördér ☕"), ("k" * 255, "k" * 255)],
    ids=["int", "uuid", "unicode", "longest"],
)
def test_keys_are_texts(given: Any, stored: str) -> None:
    """Ints and UUIDs are converted."""
    with transaction.atomic():
        write("x", key=given)
        write_many([Event(event_type="x", key=given), Event(event_type="x", key="z")])
    assert len(seqs(stored)) == 2
    assert stream(stored).seq == seqs(stored)[-1]


def test_many_take_places_in_the_order_given_among_events_without_a_key() -> None:
    """The n events of a key take the numbers seq-n+1 … seq."""
    with transaction.atomic():
        write("x", key="b")
        write_many(keyed("b", None, "a", "b", "b", "a", None))

    for key, count in (("a", 2), ("b", 4)):
        last = stream(key).seq
        assert seqs(key) == [*range(last - count + 1, last + 1)]
    unkeyed = OutboxEvent.objects.filter(key=None)
    assert [*unkeyed.values_list("seq", flat=True)] == [None, None]
    assert not unkeyed.filter(available_at=None).exists()
    assert not OutboxEvent.objects.exclude(key=None).exclude(available_at=None).exists()


def test_many_keys_are_one_upsert_in_the_order_of_the_keys() -> None:
    """Unsorted keys caused 19 deadlocks on PostgreSQL and 117 on MariaDB in 4 s."""
    sent = statements(lambda: write_many(keyed("d", "b", "e", "a", "c")))
    assert len(sent) == {"postgresql": 2, "mysql": 3, "sqlite": 2}[connection.vendor]
    assert [sent[0].index(f"'{key}'") for key in "abcde"] == sorted(
        sent[0].index(f"'{key}'") for key in "abcde"
    )


def test_a_keys_own_stream_is_locked_before_those_of_its_lanes() -> None:
    """A write locks it first, too, and the name of a lane may sort before it."""
    (sent, *_) = statements(lambda: dialect_of(connection).wake_streams(["1st:k", ":k"]))
    assert sent.index("':k'") < sent.index("'1st:k'")


def test_more_keys_than_a_statement_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_outbox.sql.insert.STREAMS_AT_ONCE", 10)
    monkeypatch.setattr(inserting, "STATEMENT_PARAMS", 7 * inserting.PARAMS_PER_ROW)
    keys = [f"k{n:02}" for n in range(25)] * 2
    with transaction.atomic():
        write_many(keyed(*keys))
    assert OutboxStream.objects.count() == 25
    for each in OutboxStream.objects.all():
        assert seqs(each.key) == [each.seq - 1, each.seq]


def test_an_idle_stream_becomes_due() -> None:
    put_stream(due_at=None, locked_at=NOON)
    with transaction.atomic():
        write("x", key="k")
    its = stream()
    assert its.seq == 101
    assert its.due_at is not None
    assert abs((its.due_at - now()).total_seconds()) < 60


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("stop", [True, False], ids=["stop", "go-on"])
def test_a_lease_is_left_alone(stop: bool, many: bool) -> None:
    """The owner finds the new event because its release of the stream no longer matches."""
    put_stream(due_at=NOON, locked_by="w1", locked_at=NOON)
    with override_settings(OUTBOX={"STOP_ON_FIRST_FAILURE": stop}), transaction.atomic():
        write_many(keyed("k", "z")) if many else write("x", key="k")
    its = stream()
    assert (its.seq, its.due_at, its.locked_by, its.locked_at) == (101, NOON, "w1", NOON)


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_behind_a_head_that_waits_the_stream_waits(many: bool) -> None:
    """An event behind a waiting head could not be delivered anyway."""
    put_stream(due_at=NOON)
    with transaction.atomic():
        write_many(keyed("k", "z")) if many else write("x", key="k")
    assert (stream().seq, stream().due_at) == (101, NOON)


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@override_settings(OUTBOX={"STOP_ON_FIRST_FAILURE": False})
def test_where_followers_go_past_a_failing_head_the_stream_is_due_for_them(many: bool) -> None:
    """Otherwise new events would wait for the retry of the head."""
    put_stream(due_at=NOON)
    with transaction.atomic():
        write_many(keyed("k", "z")) if many else write("x", key="k")
    assert stream().due_at < NOON  # type: ignore[operator]


@SAME
def test_a_duplicate_takes_no_place_and_poisons_nothing(identity: str) -> None:
    same: dict[str, Any] = {identity: "same"}
    with transaction.atomic():
        write("x", key="k", **same)
        before = stream().seq
        for key in ("k", "fresh"):
            with pytest.raises(DuplicateEvent, match="already stored"):
                write("y", key=key, **same)
            with pytest.raises(DuplicateEvent, match="already stored"):
                write_many([Event(event_type="y", key=key), Event(event_type="y", key=key, **same)])
        write("z", key="k")
        Order.objects.create(sku="goes on")
    assert stream().seq == before + 1
    assert {*seqs()} == {before, before + 1}
    assert not OutboxStream.objects.filter(key="fresh").exists()
    assert Order.objects.exists()


@SAME
def test_an_ignored_duplicate_takes_no_place_and_wakes_nobody(identity: str) -> None:
    same: dict[str, Any] = {identity: "same", "on_duplicate": "ignore"}
    with transaction.atomic():
        first = write("x", key="k", **same)
    OutboxStream.objects.update(due_at=None)
    before = stream().seq
    with transaction.atomic():
        assert write("y", key="k", **same) == first
        assert write("y", key="fresh", **same) == first
    assert (stream().seq, stream().due_at) == (before, None)
    assert OutboxStream.objects.count() == OutboxEvent.objects.count() == 1


def test_a_duplicate_that_commits_meanwhile_takes_no_place() -> None:
    """The second writer waits for the first, then finds its event."""
    with elsewhere(lambda: write("x", key="k", unique_key="u")):
        late = in_thread(lambda: ignored("k"))
        wait_for_a_waiter()
    first = OutboxEvent.objects.get()
    assert late.result(30) == first.event_id
    assert stream().seq == first.seq


def ignored(key: str) -> str | None:
    with transaction.atomic():
        return write("y", key=key, unique_key="u", on_duplicate="ignore")


def wait_for_a_waiter() -> None:
    """Return once a session of this database waits for a row; SQLite cannot tell."""
    if connection.vendor != "sqlite":
        wait_until(waiters, what="a writer that waits")


def test_x1_a_second_writer_of_a_key_waits_for_the_first_ones_commit() -> None:
    """So ``seq`` is the order of commits, and no event overtakes one that commits late."""
    begun, more, end = (threading.Event() for _ in range(3))

    def slow() -> None:
        with transaction.atomic():
            write("slow", 1, key="k")
            begun.set()
            assert more.wait(60)
            write("slow", 2, key="k")
            assert end.wait(60)

    def quick() -> None:
        with transaction.atomic():
            write("quick", key="k")

    first = in_thread(slow)
    assert begun.wait(30)
    second = in_thread(quick)
    wait_for_a_waiter()
    more.set()
    end.set()
    first.result(30)
    second.result(30)

    order = OutboxEvent.objects.order_by("seq").values_list("event_type", "payload")
    assert [*order] == [("slow", "1"), ("slow", "2"), ("quick", "null")]


@pytest.mark.skipif(vendor() == "sqlite", reason="SQLite has one writer at a time")
def test_writers_of_other_keys_wait_for_nobody() -> None:
    with elsewhere(lambda: write("x", key="k")):
        with transaction.atomic():
            write("x", key="z")
            write_many(keyed("y", "a", None))
        assert OutboxEvent.objects.count() == 4
    assert OutboxEvent.objects.count() == 5


def _write(key: str) -> None:
    with transaction.atomic():
        write("x", key=key)


def test_many_writers_of_shared_keys_meet_no_deadlock_and_leave_no_gap() -> None:
    rounds = 15 if vendor() == "sqlite" else 40
    keys = [f"k{n}" for n in range(6)]

    def work(shift: int) -> None:
        for n in range(rounds):
            mine = [
                keys[(shift * 5 + n + step * (1 if shift % 2 else -1)) % 6] for step in range(4)
            ]
            with transaction.atomic():
                write_many(keyed(*mine))

    writers = [in_thread(lambda shift=shift: work(shift)) for shift in range(4)]  # type: ignore[misc]
    for each in writers:
        each.result(100)
    assert OutboxEvent.objects.count() == 4 * rounds * 4
    for key in keys:
        places = sorted(each for each in seqs(key) if each is not None)
        assert places == [*range(places[0], places[0] + len(places))]
        assert stream(key).seq == places[-1]


def has_snapshot_isolation() -> bool:
    """Return whether MariaDB refuses to change a row that changed since the snapshot."""
    if not getattr(connection, "mysql_is_mariadb", False):
        return False
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@innodb_snapshot_isolation")
        return bool(cursor.fetchone()[0])


def test_r9_a_second_writer_at_repeatable_read() -> None:
    """PostgreSQL and MariaDB from 11.6 on refuse the write; the others accept it."""
    level = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
    postgres = connection.vendor == "postgresql"
    refusal = "could not serialize" if postgres else "Record has changed since last read"
    with transaction.atomic():
        write("x", key="k")

    def strict() -> None:
        if connection.vendor == "mysql":
            with connection.cursor() as cursor:
                cursor.execute(level)  # for the next transaction
        with transaction.atomic():
            with connection.cursor() as cursor:
                if postgres:
                    cursor.execute(level)
                cursor.execute("SELECT 1")
            assert OutboxEvent.objects.count() == 1  # the snapshot
            if connection.vendor != "sqlite":  # SQLite has one write transaction at a time
                in_thread(lambda: _write("k")).result(30)
            write("late", key="k")

    if postgres or has_snapshot_isolation():
        with pytest.raises(OperationalError, match=refusal):
            strict()
        with transaction.atomic():
            write("late", key="k")
    else:
        strict()
    late = OutboxEvent.objects.get(event_type="late")
    assert late.seq == stream().seq == max(each for each in seqs() if each is not None)


def test_keys_that_differ_in_case_or_accent_are_different_streams() -> None:
    keys = ["Order-1", "order-1", "Ördér-1", "Order-1\t"]
    with transaction.atomic():
        write_many(keyed(*keys))
    assert {*OutboxStream.objects.values_list("key", flat=True)} == {*keys}
