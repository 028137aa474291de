"""``write`` and ``write_many`` behave the same on every database; each run tests one of them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections, models, transaction
from django.db.models.functions import Length
from django.db.transaction import TransactionManagementError
from django.test import TransactionTestCase, override_settings
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import django_outbox as outbox
from django_outbox import (
    DuplicateEvent,
    Event,
    InvalidEvent,
    NoActiveTransaction,
    PayloadTooLarge,
    signals,
    write,
    write_many,
)
from django_outbox.events import new_id
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from django_outbox.sql import dialect_of
from django_outbox.sql.base import insert as inserting
from django_outbox.writing.hot_queue import hot_queues
from tests.cases import cases
from tests.table import now
from tests.test_events import UNFIT, nested
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(databases=["default", "other"])

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)


class Kind(models.TextChoices):
    PLACED = "order.placed", "placed"


class ToOther:
    def db_for_write(self, model: type[models.Model], **hints: Any) -> str | None:
        return "other" if model is OutboxEvent else None


class Undone(Exception):
    """The error that the business code raises."""


@contextmanager
def undone() -> Iterator[None]:
    """Roll back the transaction, or the savepoint, that contains the block."""
    with suppress(Undone), transaction.atomic():
        yield
        raise Undone


def queries(alias: str = "default") -> CaptureQueriesContext:
    return CaptureQueriesContext(connections[alias])


def rows(alias: str = "default") -> int:
    return OutboxEvent.objects.using(alias).count()


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
        write("order.placed", [1], aggregate=order, tenant_id="t", headers={"a": "ü"},
              event_id="own", occurred_at=NOON, available_at=NOON + timedelta(days=1),
              unique_key="u")  # fmt: skip

    row = OutboxEvent.objects.get(event_id="own")
    assert (row.aggregate_type, row.aggregate_id) == ("testapp.Order", str(order.pk))
    assert (row.tenant_id, row.unique_key) == ("t", "u")
    assert json.loads(row.headers or "") == {"a": "ü"}
    assert row.occurred_at == NOON
    assert row.available_at == row.deliver_at == row.first_due_at == NOON + timedelta(days=1)
    nothing = (row.done_at, row.last_error, row.locked_by, row.locked_at, row.key, row.seq,
               row.progress, row.result)  # fmt: skip
    assert nothing == (None,) * 8


def test_absent_fields_are_null() -> None:
    with transaction.atomic():
        write("x")

    row = OutboxEvent.objects.get()
    assert (row.aggregate_type, row.payload) == ("__GLOBAL__", "null")
    assert (row.aggregate_id, row.tenant_id, row.headers, row.unique_key) == (None,) * 4
    assert row.deliver_at is None


def test_enum_members_reach_the_driver_as_text() -> None:
    with transaction.atomic():
        write(Kind.PLACED, aggregate_type=Kind.PLACED, tenant_id=Kind.PLACED, event_id=Kind.PLACED)

    assert OutboxEvent.objects.filter(
        event_type="order.placed", aggregate_type="order.placed", tenant_id="order.placed",
        event_id="order.placed",
    ).exists()  # fmt: skip


def test_a_rollback_leaves_nothing() -> None:
    with undone():
        write("x")
        assert rows() == 1
    assert rows() == 0


def test_an_undone_savepoint_leaves_nothing_of_its_own() -> None:
    with transaction.atomic():
        kept = write("kept")
        with undone():
            write("undone")
    assert [*OutboxEvent.objects.values_list("event_id", flat=True)] == [kept]


def test_changing_the_callers_objects_later_changes_nothing() -> None:
    payload, headers = {"a": [1]}, {"h": "1"}
    with transaction.atomic():
        write("x", payload, headers=headers)
        payload["a"].append(2)
        headers["h"] = "2"
    row = OutboxEvent.objects.get()
    assert (row.payload, row.headers) == ('{"a":[1]}', '{"h":"1"}')


def test_an_event_may_be_written_ready_made() -> None:
    event = Event.from_json("x", ' {"b":1,  "a":1.0}')
    with transaction.atomic():
        assert write(event) == event.event_id
    assert OutboxEvent.objects.get().payload == ' {"b":1,  "a":1.0}'


# --- outside a transaction --------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [lambda: write("x"), lambda: write_many([Event(event_type="x")]), lambda: write_many([])],
)
def test_a_testcases_own_block_is_no_transaction(call: Callable[[], object]) -> None:
    """A forgotten ``atomic()`` fails in a ``TestCase`` too, inside the block that Django opens."""
    assert connection.in_atomic_block
    with queries() as sent, pytest.raises(NoActiveTransaction, match=r"transaction\.atomic\(\)"):
        call()
    assert len(sent) == 0


@pytest.mark.django_db(transaction=True)
def test_autocommit_is_no_transaction() -> None:
    assert not connection.in_atomic_block
    with queries() as sent, pytest.raises(NoActiveTransaction) as caught:
        write("x")
    assert len(sent) == 0
    assert isinstance(caught.value, TransactionManagementError)


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


def test_the_hint_names_the_alias_that_is_in_a_transaction() -> None:
    with (
        transaction.atomic(using="other"),
        pytest.raises(NoActiveTransaction, match=r"on 'default'.* active on \['other'\]"),
    ):
        write("x")
    assert rows() == rows("other") == 0


def test_without_another_transaction_there_is_no_hint() -> None:
    with pytest.raises(NoActiveTransaction) as caught:
        write("x")
    assert "using=" not in str(caught.value)


def test_using_names_the_database() -> None:
    with transaction.atomic(using="other"):
        write("x", using="other")
        write_many([Event(event_type="y")], using="other")
    assert (rows(), rows("other")) == (0, 2)


@override_settings(DATABASE_ROUTERS=["tests.test_write.ToOther"])
def test_the_router_names_the_database() -> None:
    with transaction.atomic(using="other"):
        write("x")
    with transaction.atomic():
        with pytest.raises(NoActiveTransaction, match="on 'other'"):
            write("x")
        write("x", using="default")  # overrides the router
    assert (rows(), rows("other")) == (1, 1)


def test_a_transaction_that_must_roll_back_takes_no_event() -> None:
    with transaction.atomic(), transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            write("x")
    assert rows() == 0


def test_the_callers_connection_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []
    for name in ("close", "connect", "set_autocommit", "close_if_unusable_or_obsolete"):
        monkeypatch.setattr(connection, name, lambda *args, name=name, **kw: touched.append(name))
    with transaction.atomic():
        driver = connection.connection
        write("x", unique_key="u")
        with pytest.raises(DuplicateEvent):
            write("x", unique_key="u")
        with pytest.raises(InvalidEvent):
            write("")
        write_many([Event(event_type="x", unique_key="v")])
        assert connection.connection is driver
    assert touched == []


# --- bad input --------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    **{
        f"payload: {name}": (lambda make=make: write("x", make()), InvalidEvent)
        for name, make in UNFIT.items()
    },
    "payload: lone surrogate": (lambda: write("x", ["\ud800"]), InvalidEvent),
    "payload: nesting 101": (lambda: write("x", nested(101)), InvalidEvent),
    "payload: nesting 20000": (lambda: write("x", nested(20_000)), InvalidEvent),
    "payload: too large": (lambda: write("x", "a" * 1_048_575), PayloadTooLarge),
    "type: blank": (lambda: write(" "), InvalidEvent),
    "type: None": (lambda: write(None), InvalidEvent),
    "type: too long": (lambda: write("x" * 129), InvalidEvent),
    "type: NUL": (lambda: write("a\0b"), InvalidEvent),
    "type: trailing space": (lambda: write("x "), InvalidEvent),
    "aggregate id: too long": (lambda: write("x", aggregate_id="x" * 129), InvalidEvent),
    "aggregate id: surrogate": (lambda: write("x", aggregate_id="\ud800"), InvalidEvent),
    "aggregate id: int": (lambda: write("x", aggregate_id=5), InvalidEvent),  # type: ignore[arg-type]
    "aggregate type: too long": (lambda: write("x", aggregate_type="x" * 65), InvalidEvent),
    "aggregate: unsaved": (lambda: write("x", aggregate=Order()), InvalidEvent),
    "aggregate: class": (lambda: write("x", aggregate=Order), InvalidEvent),
    "aggregate: both forms": (
        lambda: write("x", aggregate=Order(pk=1), aggregate_id="1"), InvalidEvent),
    "tenant id: NUL": (lambda: write("x", tenant_id="\0"), InvalidEvent),
    "tenant id: too long": (lambda: write("x", tenant_id="x" * 65), InvalidEvent),
    "event id: too long": (lambda: write("x", event_id="x" * 37), InvalidEvent),
    "unique key: too long": (lambda: write("x", unique_key="x" * 256), InvalidEvent),
    "unique key: trailing space": (lambda: write("x", unique_key="u "), InvalidEvent),
    "headers: int": (lambda: write("x", headers={"a": 1}), InvalidEvent),
    "headers: list": (lambda: write("x", headers=["a"]), InvalidEvent),
    "headers: surrogate": (lambda: write("x", headers={"a": "\ud800"}), InvalidEvent),
    "delay: both": (lambda: write("x", available_at=NOON, deliver_after=1), InvalidEvent),
    "delay: zero": (lambda: write("x", deliver_after=0), InvalidEvent),
    "delay: NaN": (lambda: write("x", deliver_after=float("nan")), InvalidEvent),
    "delay: None": (lambda: write("x", deliver_after=None), TypeError),  # type: ignore[arg-type]
    "delay: due None": (lambda: write("x", available_at=None), TypeError),  # type: ignore[arg-type]
    "delay: before it occurred": (
        lambda: write("x", occurred_at=NOON, available_at=NOON - timedelta(1)), InvalidEvent),
    "delay: year 9999": (
        lambda: write("x", available_at=datetime.max.replace(tzinfo=timezone.utc)), InvalidEvent),
    "occurred at: text": (lambda: write("x", occurred_at="now"), InvalidEvent),  # type: ignore[arg-type]
    "on_duplicate: unknown": (lambda: write("x", on_duplicate="skip"), ValueError),  # type: ignore[arg-type]
    "an Event and a payload": (lambda: write(Event(event_type="x"), 1), InvalidEvent),
    "an Event and a delay": (lambda: write(Event(event_type="x"), deliver_after=1), InvalidEvent),
    "many: no Event": (lambda: write_many([Event(event_type="x"), "y"]), InvalidEvent),  # type: ignore[list-item]
    "many: one bad payload": (
        lambda: write_many([Event(event_type="x"), Event(event_type="x", payload={1})]),
        InvalidEvent),
    "many: one too large": (
        lambda: write_many([Event(event_type="x"), Event(event_type="x", payload="a" * 2**20)]),
        PayloadTooLarge),
}  # fmt: skip


@cases("name", BAD)
@undone()
def test_bad_input_is_found_before_any_sql_and_poisons_nothing(name: str) -> None:
    call, error = BAD[name]
    with transaction.atomic():
        before = Order.objects.create(sku="before")
        with queries() as sent, pytest.raises(error) as caught:
            call()
        assert len(sent) == 0
        assert type(caught.value) is error
        Order.objects.create(sku="after")
    assert Order.objects.filter(pk__gte=before.pk).count() == 2
    assert rows() == 0


@override_settings(OUTBOX={"MAX_PAYLOAD_BYTES": 10})
def test_the_limit_is_a_setting_and_counts_utf8_bytes() -> None:
    """The limit is inclusive: a payload of exactly that many bytes passes."""
    with transaction.atomic():
        write("x", "éééé")  # 8 bytes plus two quotes
        with pytest.raises(PayloadTooLarge, match="11 bytes; at most 10"):
            write("x", "ééééa")
    assert OutboxEvent.objects.get().payload == '"éééé"'


def test_a_payload_of_exactly_one_mebibyte_is_stored() -> None:
    with transaction.atomic():
        write("x", "a" * (2**20 - 2))
    assert OutboxEvent.objects.aggregate(size=models.Max(Length("payload")))["size"] == 2**20


@transaction.atomic
def place_order() -> None:
    Order.objects.create(sku="lost")
    write("x")


def test_a_failing_insert_reaches_the_caller_and_aborts_the_transaction(
    transactional_db: None,
) -> None:
    """The caller gets Django's own error, and the business change is rolled back."""
    table = OutboxEvent._meta.db_table
    with connection.schema_editor() as editor:
        editor.alter_db_table(OutboxEvent, table, "elsewhere")
    try:
        with pytest.raises(DatabaseError):
            place_order()
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(OutboxEvent, "elsewhere", table)
    assert not Order.objects.exists()


# --- many ---------------------------------------------------------------------------------------


def events(count: int, **fields: Any) -> list[Event]:
    return [Event(event_type="x", payload=number, **fields) for number in range(count)]


def test_many_are_one_insert_and_return_ids_in_order() -> None:
    mine = events(20)
    with transaction.atomic(), queries() as sent:
        ids = write_many(each for each in mine)  # any iterable

    assert ids == [each.event_id for each in mine]
    assert [each["sql"].partition(" ")[0] for each in sent.captured_queries] == ["INSERT"]
    stored = OutboxEvent.objects.order_by("pk").values_list("pk", "payload")
    assert [*stored] == [(each.event_id, str(each.payload)) for each in mine]


def test_none_are_no_insert() -> None:
    with transaction.atomic(), queries() as sent:
        assert write_many([]) == []
    assert len(sent) == 0


def test_more_rows_than_a_statement_has_parameters_for_are_all_written() -> None:
    """Older SQLite versions take at most 999 parameters in one statement."""
    mine = events(1200)
    with transaction.atomic():
        ids = write_many(mine)
    assert rows() == 1200
    assert ids == [each.event_id for each in mine]


def test_statements_stay_below_the_limit_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inserting, "STATEMENT_PARAMS", 10 * inserting.PARAMS_PER_ROW)
    with transaction.atomic(), queries() as sent:
        write_many(events(25))
    assert len(sent) == 3
    assert rows() == 25


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


def test_a_whole_batch_of_the_largest_payloads_is_written() -> None:
    """In a single statement, 20 events of 1 MB lost the connection."""
    with transaction.atomic():
        write_many([Event(event_type="x", payload="a" * (2**20 - 2)) for _ in range(20)])
    assert rows() == 20


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


@pytest.mark.parametrize("identity", ["event_id", "unique_key"])
def test_many_with_one_duplicate_are_none(identity: str) -> None:
    """``write_many`` is all or nothing, and the transaction stays usable."""
    with transaction.atomic():
        write("first", **{identity: "b"})  # type: ignore[arg-type]
        batch = [Event(**{"event_type": "x", identity: value}) for value in "abc"]
        with pytest.raises(DuplicateEvent):
            write_many(batch)
        Order.objects.create(sku="goes on")
    assert [*OutboxEvent.objects.values_list("event_type", flat=True)] == ["first"]


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
    return dialect_of(connection).clock(connection)


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
        write("☕", "😀", aggregate_type="🫖", aggregate_id="🍵", tenant_id="🏪", unique_key="🔑",
              headers={"👤": "🧑"}, event_id="🆔")  # fmt: skip
    row = OutboxEvent.objects.get(event_id="🆔")
    assert (row.event_type, row.payload, row.aggregate_type) == ("☕", '"😀"', "🫖")
    assert (row.aggregate_id, row.tenant_id, row.unique_key) == ("🍵", "🏪", "🔑")
    assert row.headers == '{"👤":"🧑"}'


TEXTS = st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=10,
)  # fmt: skip


@given(payload=VALUES, headers=st.dictionaries(TEXTS, TEXTS, max_size=3))
@settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_exact_text_comes_back(db: None, payload: Any, headers: dict[str, str]) -> None:
    """The stored text is the serializer's own: ``jsonb`` changed 117 of 926 payloads."""
    event = Event(event_type="x", payload=payload, headers=headers)
    with transaction.atomic():
        write(event)
    row = OutboxEvent.objects.get(pk=event.event_id)

    assert row.payload == json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    assert json.loads(row.headers or "{}") == headers


def test_numbers_keep_their_spelling() -> None:
    """Key order, duplicate keys, -0.0 and 1e308 are stored as written."""
    text = '{"b":-0.0,"a":1e308,"B":1.10,"b":2}'
    with transaction.atomic():
        write(Event.from_json("x", text))
        write("y", {"price": Decimal("1.10")})
    assert OutboxEvent.objects.get(event_type="x").payload == text
    assert OutboxEvent.objects.get(event_type="y").payload == '{"price":"1.10"}'


# --- signals and hot queue ------------------------------------------------------------------------


class Queue:
    """A hot queue with room for this many events."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.events: list[Event] = []
        self.polls = 0

    def offer(self, event: Event) -> bool:
        if len(self.events) >= self.room:
            return False
        self.events.append(event)
        return True

    def poll(self) -> None:
        self.polls += 1

    @property
    def types(self) -> list[str]:
        return [event.event_type for event in self.events]


@pytest.fixture
def queue(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setitem(hot_queues.by_alias, "default", made)
    return made


def callbacks() -> int:
    return len(connection.run_on_commit)


def test_all_writes_of_a_transaction_share_one_callback(queue: Queue) -> None:
    """All hot events of a transaction are offered after its commit, in the order of writing."""
    with transaction.atomic():
        write("a")
        write_many(events(5))
        write("b")
        assert callbacks() == 1
        assert queue.types == []
    assert queue.types == ["a", *"xxxxx", "b"]


def test_a_hot_event_is_what_was_inserted(queue: Queue) -> None:
    payload = {"at": NOON, 1: (2,)}
    with transaction.atomic():
        write("a", payload, headers={"h": "1"})
        payload["later"] = True  # type: ignore[index]
    event, row = queue.events[0], OutboxEvent.objects.get()

    assert event.payload == json.loads(row.payload)
    assert (event.event_id, event.headers) == (row.event_id, {"h": "1"})


def test_every_savepoint_has_its_own_callback_and_takes_only_its_own_events_along(
    queue: Queue,
) -> None:
    """A savepoint that is rolled back drops its own callback and events, and no others."""
    with transaction.atomic():
        write("before")
        with undone():
            write("undone")
            write("undone too")
            assert callbacks() == 2
        with transaction.atomic():
            write("kept")
        write("after")
        assert callbacks() == 2
    assert queue.types == ["before", "after", "kept"]


def test_a_rollback_hands_over_nothing(queue: Queue) -> None:
    with undone():
        write("x")
    assert (queue.types, queue.polls) == ([], 0)


def test_an_event_not_inserted_is_not_handed_over(queue: Queue) -> None:
    with transaction.atomic():
        write("first", unique_key="u")
        write("second", unique_key="u", on_duplicate="ignore")
    assert queue.types == ["first"]


def test_delayed_events_are_not_offered_but_the_claimer_polls(queue: Queue) -> None:
    """A delayed event cannot start now, but the claimer has to know its due time."""
    with transaction.atomic():
        write("later", deliver_after=60)
    assert (queue.types, queue.polls) == ([], 1)


def test_a_full_queue_drops_and_says_so(queue: Queue) -> None:
    """A dropped event stays due in its row, and the claimer polls for it."""
    queue.room = 1
    told: list[tuple[str, str]] = []

    def queued(sender: str, event: Event, **kwargs: Any) -> None:
        told.append(("queued", event.event_type))

    def dropped(sender: str, event: Event, **kwargs: Any) -> None:
        told.append(("dropped", event.event_type))

    signals.event_queued.connect(queued)
    signals.event_dropped.connect(dropped)
    try:
        with transaction.atomic():
            write("a")
            write("b")
            assert told == []
    finally:
        signals.event_queued.disconnect(queued)
        signals.event_dropped.disconnect(dropped)
    assert told == [("queued", "a"), ("dropped", "b")]
    assert queue.polls == 1
    assert OutboxEvent.objects.due().count() == 2


@override_settings(OUTBOX={"HOT_QUEUE_CAPACITY": 3})
def test_one_transaction_keeps_no_more_payloads_than_fit(queue: Queue) -> None:
    """A transaction must not fill the memory with hot events that the queue cannot hold."""
    with transaction.atomic():
        write_many(events(10))
    assert (len(queue.events), queue.polls) == (3, 1)


@override_settings(OUTBOX={"ENABLED": False})
def test_disabled_still_writes_and_hands_nothing_over(queue: Queue) -> None:
    with transaction.atomic():
        write("x")
        assert callbacks() == 0
    assert rows() == 1
    assert (queue.types, queue.polls) == ([], 0)


def test_a_queue_that_fails_costs_the_caller_nothing(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in our ``on_commit`` callback does not stop the caller's other callbacks."""
    monkeypatch.setattr(queue, "offer", lambda event: 1 / 0)
    done: list[int] = []
    with transaction.atomic():
        write("x")
        transaction.on_commit(lambda: done.append(1))
    assert done == [1]
    assert rows() == 1


def test_a_write_in_an_on_commit_callback_is_handed_over_too(queue: Queue) -> None:
    def again() -> None:
        with transaction.atomic():
            write("second")

    with transaction.atomic():
        write("first")
        transaction.on_commit(again)
    assert queue.types == ["first", "second"]


def test_each_captured_block_of_a_testcase_sees_its_callback(
    django_capture_on_commit_callbacks: Any,
) -> None:
    """A second ``captureOnCommitCallbacks`` block still captures one callback."""
    for _ in range(2):
        with django_capture_on_commit_callbacks() as captured, transaction.atomic():
            write("x")
            write("y")
        assert len(captured) == 1


def test_a_captured_block_that_ran_its_callbacks_is_not_added_to(
    django_capture_on_commit_callbacks: Any,
) -> None:
    """A write after such a block registers a new callback."""
    with transaction.atomic():
        for _ in range(2):
            with django_capture_on_commit_callbacks(execute=True) as captured:
                write("x")
            assert len(captured) == 1


def test_a_write_is_announced_and_receivers_cannot_harm_it() -> None:
    seen: list[tuple[str, str]] = []

    def receiver(sender: str, event: Event, **kwargs: Any) -> None:
        seen.append((sender, event.event_type))
        raise ZeroDivisionError

    signals.event_written.connect(receiver)
    try:
        with transaction.atomic():
            write("a")
            write_many(events(1))
    finally:
        signals.event_written.disconnect(receiver)
    assert seen == [("default", "a"), ("default", "x")]
    assert rows() == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # threads that other tests left
def test_a_forked_child_knows_no_queue(queue: Queue) -> None:
    """The worker runs in the parent only, so a forked child offers its events to no queue."""
    child = os.fork()
    if child == 0:  # run none of pytest's code in the child
        os._exit(len(hot_queues.by_alias))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert hot_queues.by_alias == {"default": queue}


# --- from models.py -------------------------------------------------------------------------------


def test_write_can_be_imported_and_called_from_a_models_module(tmp_path: Path) -> None:
    """Models may import ``write`` before our app is loaded; calling it then gives a clear error."""
    app = tmp_path / "early"
    app.mkdir()
    (app / "__init__.py").touch()
    (app / "models.py").write_text(
        textwrap.dedent(
            """
            from django.db import models
            from django_outbox import NoActiveTransaction, write

            try:
                write("too early")
            except NoActiveTransaction:
                called = True

            class Thing(models.Model):
                def save(self, **options):
                    super().save(**options)
                    write("thing.saved", aggregate=self)
            """
        )
    )
    script = textwrap.dedent(
        """
        import django
        from django.conf import settings

        settings.configure(
            INSTALLED_APPS=["early", "django_outbox"],
            DEFAULT_AUTO_FIELD="django.db.models.AutoField",
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        )
        django.setup()
        from django.core.management import call_command
        from django.db import transaction
        from early.models import Thing, called
        from django_outbox.models import OutboxEvent

        assert called
        call_command("migrate", run_syncdb=True, verbosity=0)
        with transaction.atomic():
            Thing().save()
        print(OutboxEvent.objects.get().aggregate_type)
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{tmp_path}:{Path(outbox.__file__).parents[1]}"},
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == ("early.Thing", "")


class TestWithDjangosOwnTestCase(TransactionTestCase):
    """A ``unittest`` test case works without any pytest fixture."""

    def test_a_transaction_test_case_writes(self) -> None:
        with transaction.atomic():
            write("x")
        self.assertEqual(rows(), 1)  # noqa: PT009
