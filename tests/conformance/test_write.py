"""Writes on each database: what arrives, what is refused, and what a statement may hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import DatabaseError, connection, models, transaction

from django_outbox import DuplicateEvent, Event, NoActiveTransaction, write, write_many
from django_outbox.events import new_id
from django_outbox.inbox import once
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxInbox, OutboxStream
from django_outbox.sql import dialect_of
from django_outbox.sql import insert as inserting
from tests.table import now, undone
from tests.test_write import NOON, events, queries, rows
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(databases=["default", "other"])


# --- one transaction ----------------------------------------------------------------------------


def test_a_write_is_one_insert_on_the_callers_connection() -> None:
    """A write needs no listener and no second query."""
    with transaction.atomic(), queries() as sent:
        event_id = write("order.placed", {"sku": "tea"})

    assert [each["sql"].partition(" ")[0] for each in sent.captured_queries] == ["INSERT"]
    row = OutboxEvent.objects.get()
    assert (row.event_id, row.event_type, row.payload) == (
        event_id,
        "order.placed",
        '{"sku":"tea"}',
    )
    assert (row.status, row.attempts, row.rescues) == (OutboxEvent.Status.NEW, 0, 0)


def test_every_field_arrives() -> None:
    """Every argument is stored in its own column, headers included."""
    order = Order.objects.create(sku="tea")
    with transaction.atomic():
        write(
            "order.placed",
            [1],
            aggregate=order,
            tenant_id="t",
            headers={"a": "ü"},
            event_id="own",
            occurred_at=NOON,
            available_at=NOON + timedelta(days=1),
            unique_key="u",
        )

    row = OutboxEvent.objects.get(event_id="own")
    assert (row.aggregate_type, row.aggregate_id) == ("testapp.Order", str(order.pk))
    assert (row.tenant_id, row.unique_key) == ("t", "u")
    assert json.loads(row.headers or "") == {"a": "ü"}
    assert row.occurred_at == NOON
    assert row.available_at == row.deliver_at == row.first_due_at == NOON + timedelta(days=1)
    nothing = (
        row.done_at,
        row.last_error,
        row.locked_by,
        row.locked_at,
        row.key,
        row.seq,
        row.listener,
        row.routes,
        row.stream,
        row.result,
    )
    assert nothing == (None,) * 10


def test_absent_fields_are_null() -> None:
    with transaction.atomic():
        write("x")

    row = OutboxEvent.objects.get()
    assert (row.aggregate_type, row.payload) == ("__GLOBAL__", "null")
    assert (row.aggregate_id, row.tenant_id, row.headers, row.unique_key) == (None,) * 4
    assert row.deliver_at is None


def test_an_undone_savepoint_leaves_nothing_of_its_own() -> None:
    with transaction.atomic():
        kept = write("kept")
        with undone():
            write("undone")
    assert [*OutboxEvent.objects.values_list("event_id", flat=True)] == [kept]


@pytest.mark.django_db(transaction=True)
def test_autocommit_switched_off_is_no_transaction() -> None:
    """The refusal comes before the INSERT; Django's ``on_commit`` would refuse only after it."""
    transaction.set_autocommit(False)
    try:
        with queries() as sent, pytest.raises(NoActiveTransaction):
            write("x")
        assert len(sent) == 0
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


INSERTS: list[tuple[type[models.Model], Callable[[], object]]] = [
    (OutboxEvent, lambda: write("x")),
    (OutboxEvent, lambda: write("x", event_id="mine")),  # in a savepoint
    (OutboxStream, lambda: write("x", key="k")),
    (OutboxInbox, lambda: once("source", "id").__enter__()),
]


@pytest.mark.parametrize(("model", "insert"), INSERTS)
def test_a_missing_table_reaches_the_caller_and_aborts_the_transaction(
    transactional_db: None, model: type[models.Model], insert: Callable[[], object]
) -> None:
    """The caller gets Django's own error, and the business change is rolled back."""
    table = model._meta.db_table
    with connection.schema_editor() as editor:
        editor.alter_db_table(model, table, "elsewhere")
    try:
        with pytest.raises(DatabaseError) as expected:
            model._base_manager.exists()
        with (
            pytest.raises(
                type(expected.value), match="migrate django_outbox --database default"
            ) as caught,
            transaction.atomic(),
        ):
            Order.objects.create(sku="lost")
            insert()
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(model, "elsewhere", table)
    assert type(caught.value.__cause__) is type(expected.value.__cause__)
    assert not Order.objects.exists()


def test_another_error_reaches_the_caller_as_it_is() -> None:
    def refuse(*_: object) -> None:
        raise DatabaseError("other")

    with (
        transaction.atomic(),
        connection.execute_wrapper(refuse),
        pytest.raises(DatabaseError, match=r"^other$"),
    ):
        write("x")


def test_many_are_one_insert_and_return_ids_in_order() -> None:
    mine = events(20)
    with transaction.atomic(), queries() as sent:
        ids = write_many(each for each in mine)  # any iterable

    assert ids == [each.event_id for each in mine]
    assert [each["sql"].partition(" ")[0] for each in sent.captured_queries] == ["INSERT"]
    stored = OutboxEvent.objects.order_by("pk").values_list("pk", "payload")
    assert [*stored] == [(each.event_id, str(each.payload)) for each in mine]


def test_more_rows_than_a_statement_has_parameters_for_are_all_written() -> None:
    """Older SQLite versions take at most 999 parameters in one statement."""
    mine = events(1200)
    with transaction.atomic():
        ids = write_many(mine)
    assert rows() == 1200
    assert ids == [each.event_id for each in mine]


def test_statements_stay_below_the_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """MariaDB drops the connection when a statement exceeds ``max_allowed_packet``."""
    monkeypatch.setattr(inserting, "STATEMENT_BYTES", 20_000)
    mine = [Event(event_type="x", payload="ü" * 2000) for _ in range(10)]
    with transaction.atomic(), queries() as sent:
        write_many(mine)

    inserts = [each["sql"] for each in sent.captured_queries]
    assert len(inserts) == 5
    assert all(len(sql.encode()) < 20_000 for sql in inserts)
    assert rows() == 10


# --- duplicates ---------------------------------------------------------------------------------

SAME = [{"event_id": "same"}, {"unique_key": "same"}]


@pytest.mark.parametrize("identity", SAME, ids=str)
def test_a_second_identity_is_a_duplicate_and_poisons_nothing(identity: dict[str, str]) -> None:
    """The transaction stays usable after ``DuplicateEvent``."""
    with transaction.atomic():
        write("first", **identity)  # type: ignore[arg-type]
        with pytest.raises(DuplicateEvent, match=r"already stored.*same"):
            write("second", **identity)  # type: ignore[arg-type]
        Order.objects.create(sku="goes on")
    assert Order.objects.exists()
    assert [*OutboxEvent.objects.values_list("event_type", flat=True)] == ["first"]


@pytest.mark.parametrize("identity", SAME, ids=str)
@pytest.mark.parametrize("status", [Status.DONE, Status.DEAD])
def test_g3_an_identity_is_accepted_again_after_the_purge(
    settings: Any, identity: dict[str, str], status: Status
) -> None:
    """Before the purge it is a duplicate, for as long as the row exists."""
    settings.OUTBOX = {"RETENTION_DONE": 60, "RETENTION_UNIQUE": 60, "RETENTION_DEAD": 60}
    with transaction.atomic():
        first = write("first", **identity)  # type: ignore[arg-type]
    rows, clock = OutboxEvent.objects.all(), now()
    ended = {"status": status, "available_at": None, "created_at": clock - timedelta(days=9)}
    rows.update(done_at=clock - timedelta(seconds=30), **ended)
    assert OutboxEvent.objects.purge() == 0
    with transaction.atomic(), pytest.raises(DuplicateEvent):
        write("second", **identity)  # type: ignore[arg-type]
    rows.update(done_at=clock - timedelta(seconds=90))
    assert OutboxEvent.objects.purge() == 1
    with transaction.atomic():
        second = write("second", **identity)  # type: ignore[arg-type]
    assert (second == first) is ("event_id" in identity)
    assert [*OutboxEvent.objects.values_list("event_type", "status")] == [("second", Status.NEW)]


def test_an_event_written_twice_is_a_duplicate_and_poisons_nothing() -> None:
    """A generated ``event_id`` is unique only once: the same ``Event`` cannot be written again."""
    event = Event(event_type="once")
    with transaction.atomic():
        write(event)
        for again in (event, dataclasses.replace(event)):
            with pytest.raises(DuplicateEvent, match=event.event_id):
                write(again)
            with pytest.raises(DuplicateEvent, match=event.event_id):
                write_many([Event(event_type="other"), again])
        Order.objects.create(sku="goes on")
    assert Order.objects.exists()
    assert [*OutboxEvent.objects.values_list("event_type", flat=True)] == ["once"]


@pytest.mark.parametrize("identity", SAME, ids=str)
def test_an_ignored_duplicate_answers_the_first_id(identity: dict[str, str]) -> None:
    with transaction.atomic():
        first = write("first", on_duplicate="ignore", **identity)  # type: ignore[arg-type]
        again = write("second", on_duplicate="ignore", **identity)  # type: ignore[arg-type]
        other = write("third", on_duplicate="ignore")
    assert first == again != other
    assert {*OutboxEvent.objects.values_list("event_type", flat=True)} == {"first", "third"}


def test_keys_that_differ_in_case_or_accent_are_no_duplicates() -> None:
    """MariaDB's default collation treated such keys as equal."""
    keys = ["Order-1", "order-1", "Ördér-1", "Order-1\t"]
    with transaction.atomic():
        for key in keys:
            write("x", unique_key=key, event_id=f"id-{key}")
    assert rows() == 4
    assert OutboxEvent.objects.filter(unique_key="order-1").count() == 1


def test_many_with_a_duplicate_among_themselves_are_none() -> None:
    with transaction.atomic():
        with pytest.raises(DuplicateEvent):
            write_many([Event(event_type="x", unique_key="u") for _ in range(2)])
        assert rows() == 0


def test_many_over_several_statements_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One savepoint covers all statements of a call."""
    monkeypatch.setattr(inserting, "STATEMENT_BYTES", 1)  # one statement for each row
    with transaction.atomic():
        write("first", unique_key="c")
        with pytest.raises(DuplicateEvent):
            write_many([Event(event_type="x", unique_key=value) for value in "abc"])
    assert rows() == 1


# --- clocks and texts ---------------------------------------------------------------------------


@pytest.fixture(params=[-3600, 3600], ids="{:+d} s".format)
def wrong_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Shift this process's clock by an hour."""
    import time

    from django.utils import timezone as django_timezone

    shift: int = request.param
    real, real_ns = time.time, time.time_ns

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.fromtimestamp(real() + shift, tz)

    monkeypatch.setattr(time, "time", lambda: real() + shift)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + shift * 10**9)
    monkeypatch.setattr(django_timezone, "now", lambda: Shifted.now(timezone.utc))
    monkeypatch.setattr("django_outbox.events.arguments.datetime", Shifted)
    yield shift
    new_id.reset()  # new_id never falls below the highest time it has used


def database_now() -> datetime:
    return dialect_of(connection).clock()


def test_a_wrong_application_clock_delays_nothing(wrong_clock: int) -> None:
    """Due and creation times come from the database's clock, not from this process."""
    before = database_now() - timedelta(milliseconds=2)
    with transaction.atomic():
        write("x")
        write("later", deliver_after=90)
    row, later = OutboxEvent.objects.order_by("event_type").reverse()

    assert before <= row.created_at <= database_now()
    assert row.available_at == row.first_due_at == row.created_at
    assert later.available_at == later.deliver_at == later.created_at + timedelta(seconds=90)
    assert abs(row.occurred_at - row.created_at - timedelta(seconds=wrong_clock)) < timedelta(60)
    assert [each.event_type for each in OutboxEvent.objects.due()] == ["x"]


SESSION_ZONES = {"postgresql": "SET TIME ZONE '+08:00'", "mysql": "SET time_zone = '+08:00'"}


@pytest.fixture
def session_zone() -> Iterator[None]:
    """Set the session's time zone eight hours off, on databases whose sessions have one."""
    reset = {"postgresql": "SET TIME ZONE 'UTC'", "mysql": "SET time_zone = '+00:00'"}
    with connection.cursor() as cursor:
        if connection.vendor in reset:
            cursor.execute(SESSION_ZONES[connection.vendor])
        yield
        if connection.vendor in reset:
            cursor.execute(reset[connection.vendor])


@pytest.mark.parametrize("use_tz", [True, False])
def test_time_zones_of_session_and_settings_shift_nothing(
    use_tz: bool, settings: Any, request: pytest.FixtureRequest
) -> None:
    """In these settings ``Now()`` was off by 8, 13 and 5 hours."""
    settings.USE_TZ = use_tz
    settings.TIME_ZONE = "America/New_York"
    request.getfixturevalue("session_zone")
    with transaction.atomic():
        write("x", occurred_at=NOON)
        write("later", available_at=NOON)
    row, later = OutboxEvent.objects.order_by("event_type").reverse()

    assert row.occurred_at == later.available_at == NOON
    assert abs(row.created_at - datetime.now(timezone.utc)) < timedelta(minutes=5)
    assert [each.event_type for each in OutboxEvent.objects.due()] == ["x"]
    age = OutboxEvent.objects.oldest_pending_age()
    assert age is not None
    assert age < 300


def test_four_byte_texts_arrive_in_every_column() -> None:
    with transaction.atomic():
        write(
            "☕",
            "😀",
            aggregate_type="🫖",
            aggregate_id="🍵",
            tenant_id="🏪",
            unique_key="🔑",
            headers={"👤": "🧑"},
            event_id="🆔",
        )
    row = OutboxEvent.objects.get(event_id="🆔")
    assert (row.event_type, row.payload, row.aggregate_type) == ("☕", '"😀"', "🫖")
    assert (row.aggregate_id, row.tenant_id, row.unique_key) == ("🍵", "🏪", "🔑")
    assert row.headers == '{"👤":"🧑"}'
