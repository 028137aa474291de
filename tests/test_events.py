"""``Event``: every rule that needs no database."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID

import pytest
from django.db import models
from django.test import override_settings
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import given, settings
from hypothesis import strategies as st

import django_outbox as outbox
from django_outbox import GLOBAL, Event, InvalidEvent, PayloadError, PayloadTooLarge
from django_outbox.events import (
    LENGTHS,
    check_text,
    decode,
    decode_headers,
    encode,
    encode_headers,
    event_from_row,
    new_id,
)
from tests.cases import cases
from tests.testapp.models import Order

ORDER = Order.from_db("default", ["id"], [42])  # as if it were read from the table
NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)


class Kind(models.TextChoices):
    PLACED = "order.placed", "placed"


class Colour(Enum):
    RED = 1


class Plain(str, Enum):
    PLACED = "order.placed"


# --- names and ids --------------------------------------------------------------------------


def test_only_the_type_is_required() -> None:
    event = Event(event_type="order.placed")

    assert event.event_type == "order.placed"
    assert event.aggregate_type == GLOBAL == outbox.GLOBAL == "__GLOBAL__"
    assert event.payload is None
    assert event.headers == {}
    assert (event.aggregate_id, event.tenant_id, event.key, event.unique_key) == (None,) * 4
    assert (event.available_at, event.deliver_at, event.is_delayed) == (None, None, False)
    assert event.attempts == 0


def test_fields_are_keywords_only() -> None:
    with pytest.raises(TypeError):
        Event("order.placed")  # type: ignore[misc]


def test_it_is_frozen_and_slotted() -> None:
    event = Event(event_type="x")

    with pytest.raises(dataclasses.FrozenInstanceError):
        event.payload = 1  # type: ignore[misc]
    assert not hasattr(event, "__dict__")
    assert {"key", "attempts", "headers", "occurred_at"} <= set(Event.__slots__)


@cases("name", ["aggregate", "deliver_after"])
def test_arguments_that_only_fill_others_are_no_attributes(name: str) -> None:
    event = Event(event_type="x", aggregate=ORDER, deliver_after=5)
    assert not hasattr(event, name)


@cases(
    ("member", "text"),
    [
        (Kind.PLACED, "order.placed"),
        (Plain.PLACED, "order.placed"),
        (Colour.RED, "RED"),  # its value is not a str, so its name
        (mark_safe("order.placed"), "order.placed"),
    ],
)
@cases("column", ["event_type", "aggregate_type"])
def test_enum_members_name_types(column: str, member: Any, text: str) -> None:
    event = Event(**{"event_type": "x", column: member})

    assert getattr(event, column) == text
    assert type(getattr(event, column)) is str


@cases("value", [None, 5, b"x", ["x"]])
@cases("column", ["event_type", "aggregate_type"])
def test_other_type_names_are_invalid(column: str, value: Any) -> None:
    with pytest.raises(InvalidEvent, match=f"{column} is .*expected a str or an enum member"):
        Event(**{"event_type": "x", column: value})


@cases("column", LENGTHS)
def test_a_column_takes_exactly_its_length(column: str) -> None:
    """The limit itself passes; one character more is refused."""
    limit = LENGTHS[column]

    assert getattr(Event(**{"event_type": "x", column: "é" * limit}), column) == "é" * limit
    with pytest.raises(InvalidEvent, match=f"{column} has {limit + 1} characters; at most {limit}"):
        Event(**{"event_type": "x", column: "é" * (limit + 1)})


@cases("column", LENGTHS)
@cases("value", ["\0", "a\0b", "\ud800", "trailing ", " ", "\t\n"], ids=repr)
def test_a_column_refuses_what_some_database_would_change(column: str, value: str) -> None:
    """NUL, lone surrogates, trailing spaces and blanks are refused."""
    with pytest.raises(InvalidEvent, match=column):
        Event(**{"event_type": "x", column: value})


@cases("column", ["aggregate_id", "tenant_id", "unique_key", "key"])
@cases("value", [b"x", 1.5, True, ["x"]], ids=repr)
def test_a_column_refuses_what_is_no_text(column: str, value: Any) -> None:
    with pytest.raises(InvalidEvent, match=f"{column} is .*expected a str"):
        Event(**{"event_type": "x", column: value})


@cases("column", ["aggregate_id", "tenant_id", "unique_key", "key", "event_id"])
def test_a_column_holds_exact_str_for_drivers(column: str) -> None:
    event = Event(**{"event_type": "x", column: Kind.PLACED})

    assert getattr(event, column) == "order.placed"
    assert type(getattr(event, column)) is str


@cases("column", ["event_id", "key"])
@cases("value", [7, UUID(int=7)])
def test_ints_and_uuids_stand_for_their_text(column: str, value: Any) -> None:
    assert getattr(Event(**{"event_type": "x", column: value}), column) == str(value)


@cases("value", [False, True, 1.5, b"x"], ids=repr)
def test_an_own_id_that_is_no_text_is_invalid(value: Any) -> None:
    with pytest.raises(InvalidEvent, match="event_id"):
        Event(event_type="x", event_id=value)


def test_str_names_the_event_in_one_line_without_payload() -> None:
    event = Event(
        event_type="t", payload="secret", event_id="01", aggregate_type="a", aggregate_id="7"
    )
    assert str(event) == "t 01 (a 7)"
    assert str(Event(event_type="t", event_id="01")) == "t 01"


# --- aggregate ------------------------------------------------------------------------------


def test_an_instance_fills_type_and_id() -> None:
    event = Event(event_type="x", aggregate=ORDER)
    assert (event.aggregate_type, event.aggregate_id) == ("testapp.Order", "42")


# A key of its own does not make an instance saved: a UUID has a default.
@pytest.mark.parametrize("given", [Order(), Order(pk=42)], ids=["no-key", "own-key"])
def test_an_instance_that_is_not_saved_is_invalid(given: Order) -> None:
    with pytest.raises(InvalidEvent, match=r"testapp\.Order"):
        Event(event_type="x", aggregate=given)


@cases("value", [Order, "order", 5, object()], ids=["class", "str", "int", "object"])
def test_only_instances_are_aggregates(value: Any) -> None:
    with pytest.raises(InvalidEvent, match="expected a model instance"):
        Event(event_type="x", aggregate=value)


@cases("also", [{"aggregate_type": "a"}, {"aggregate_id": "1"}], ids=str)
def test_an_instance_excludes_the_other_form(also: dict[str, str]) -> None:
    with pytest.raises(InvalidEvent, match="together"):
        Event(event_type="x", aggregate=ORDER, **also)


# --- headers --------------------------------------------------------------------------------


def test_headers_are_a_read_only_copy() -> None:
    mine = {"a": "1"}
    event = Event(event_type="x", headers=mine)
    mine["a"] = "2"

    assert event.headers == {"a": "1"}
    with pytest.raises(TypeError):
        event.headers["a"] = "3"  # type: ignore[index]


@cases(
    "value",
    [
        {1: "a"},
        {"a": 1},
        {"a": None},
        {None: "a"},
        {"a": b"b"},
        {"a": "\ud800"},
        [],
        "",
        0,
        [("a", "b")],
        "ab",
    ],
    ids=repr,
)
def test_headers_are_str_to_str(value: Any) -> None:
    with pytest.raises(InvalidEvent, match="header"):
        Event(event_type="x", headers=value)


def test_header_text_is_exact_str() -> None:
    event = Event(event_type="x", headers={Kind.PLACED: mark_safe("<b>")})
    assert encode_headers(event.headers, most=100) == '{"order.placed":"<b>"}'


def test_no_headers_are_stored_as_null() -> None:
    assert encode_headers(Event(event_type="x", headers={}).headers, most=100) is None


@cases("text", [None, "", "null", "{}"])
def test_stored_nothings_are_no_headers(text: str | None) -> None:
    assert decode_headers(text) == {}


@cases("text", ["[]", '{"a": 1}', '{"a"', '{"a": null}', "7", "[" * 5000])
def test_damaged_headers_are_a_payload_error(text: str) -> None:
    with pytest.raises(PayloadError, match="headers cannot be decoded"):
        decode_headers(text)


# --- times ----------------------------------------------------------------------------------


def test_occurred_at_is_now_by_default() -> None:
    before = datetime.now(timezone.utc)
    event = Event(event_type="x")
    assert before <= event.occurred_at <= datetime.now(timezone.utc)


def test_a_naive_datetime_warns_with_time_zone_support() -> None:
    """This is Django's own rule."""
    with pytest.warns(RuntimeWarning, match="naive datetime"):
        event = Event(event_type="x", occurred_at=datetime(2030, 1, 1, 12))  # noqa: DTZ001
    assert event.occurred_at == datetime(2030, 1, 1, 6, 15, tzinfo=timezone.utc)  # Kathmandu


@override_settings(USE_TZ=False, TIME_ZONE="America/New_York")
def test_a_naive_datetime_is_local_without_time_zone_support() -> None:
    event = Event(event_type="x", available_at=datetime(2030, 1, 1, 12))  # noqa: DTZ001
    assert event.available_at == datetime(2030, 1, 1, 17, tzinfo=timezone.utc)


def test_times_are_utc() -> None:
    given = datetime(2030, 1, 1, 20, tzinfo=timezone(timedelta(hours=8)))
    event = Event(event_type="x", occurred_at=given, available_at=given)
    assert event.occurred_at == event.available_at == NOON
    assert event.occurred_at.tzinfo is timezone.utc


@cases("name", ["occurred_at", "available_at"])
@cases(
    "value",
    [
        date(2030, 1, 1),
        "2030-01-01",
        5,
        datetime.min.replace(tzinfo=timezone(timedelta(hours=8))),  # has no UTC equivalent
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-8))),
        datetime(1970, 12, 31, tzinfo=timezone.utc),
        datetime(9999, 1, 1, tzinfo=timezone.utc),
    ],
    ids=str,
)
def test_instants_outside_every_calendar_are_invalid(name: str, value: Any) -> None:
    with pytest.raises(InvalidEvent, match=name):
        Event(**{"event_type": "x", name: value})


def test_available_at_is_a_due_time() -> None:
    event = Event(event_type="x", available_at=NOON)
    assert event.available_at == event.deliver_at == NOON
    assert event.is_delayed


@cases("delay", [90, 90.0, timedelta(seconds=90)], ids=repr)
def test_deliver_after_counts_from_the_databases_now(delay: Any) -> None:
    """Without ``occurred_at`` there is no due time until the database supplies one."""
    event = Event(event_type="x", deliver_after=delay)
    assert (event.available_at, event._delay, event.is_delayed) == (None, 90.0, True)


def test_deliver_after_counts_from_occurred_at_if_given() -> None:
    event = Event(event_type="x", deliver_after=90, occurred_at=NOON)
    assert event.available_at == event.deliver_at == NOON + timedelta(seconds=90)
    assert (event._delay, event.is_delayed) == (None, True)


def test_both_due_times_are_invalid() -> None:
    with pytest.raises(InvalidEvent, match="both given"):
        Event(event_type="x", available_at=NOON, deliver_after=1)


@cases(
    "delay",
    [
        0,
        -1,
        0.0,
        1e-9,
        timedelta(0),
        timedelta(microseconds=-1),
        float("nan"),
        float("inf"),
        float("-inf"),
        10**400,
        timedelta(days=36_526),
        True,
        "5",
        Decimal(5),
    ],
    ids=repr,
)
def test_deliver_after_is_a_duration_above_zero(delay: Any) -> None:
    with pytest.raises(InvalidEvent, match="deliver_after"):
        Event(event_type="x", deliver_after=delay)


def test_deliver_after_may_not_leave_the_calendar() -> None:
    late = datetime(9998, 12, 31, tzinfo=timezone.utc)
    for delay in (timedelta(days=2), timedelta(days=36_500)):
        with pytest.raises(InvalidEvent, match="deliver_after"):
            Event(event_type="x", occurred_at=late, deliver_after=delay)


def test_available_at_before_occurred_at_is_invalid() -> None:
    with pytest.raises(InvalidEvent, match="lies before occurred_at"):
        Event(event_type="x", occurred_at=NOON, available_at=NOON - timedelta(microseconds=1))
    assert Event(event_type="x", occurred_at=NOON, available_at=NOON).available_at == NOON


def test_a_past_due_time_alone_is_due_at_once() -> None:
    """Only an explicit ``occurred_at`` makes an earlier due time invalid."""
    past = datetime(2001, 1, 1, tzinfo=timezone.utc)
    assert Event(event_type="x", available_at=past).available_at == past


@cases("name", ["available_at", "deliver_after"])
def test_an_explicit_none_is_no_due_time(name: str) -> None:
    with pytest.raises(TypeError, match="None is not a due time"):
        Event(**{"event_type": "x", name: None})


def test_an_explicit_none_is_no_error_for_occurred_at() -> None:
    assert Event(event_type="x", occurred_at=None).occurred_at is not None  # type: ignore[arg-type]


# --- a changed copy -------------------------------------------------------------------------

LATER = NOON + timedelta(days=1)


@cases(
    "fields",
    [
        {},
        {"event_id": "own", "occurred_at": NOON},
        {"available_at": LATER},
        {"deliver_after": 90},
        {"deliver_after": 90, "occurred_at": NOON},
        {"available_at": datetime(2001, 1, 1, tzinfo=timezone.utc)},
        {"aggregate": ORDER, "headers": {"a": "1"}, "unique_key": "u", "tenant_id": "t"},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_a_copy_is_equal_and_a_change_changes_nothing_else(fields: dict[str, Any]) -> None:
    """A write hook usually returns a changed copy, so copying must keep the rest."""
    event = Event(event_type="x", payload={"a": 1}, **fields)
    copy = dataclasses.replace(event)
    assert copy == event
    assert (copy._id_was_given, copy._delay) == (event._id_was_given, event._delay)
    assert copy.is_delayed == event.is_delayed

    changed = dataclasses.replace(event, payload=2)
    assert changed.payload == 2
    assert dataclasses.replace(changed, payload=event.payload) == event


def test_a_copy_may_get_an_id_of_its_own() -> None:
    event = Event(event_type="x")
    assert dataclasses.replace(event, event_id="own")._id_was_given
    another = dataclasses.replace(event, event_id="")
    assert another.event_id != event.event_id
    assert not another._id_was_given


def test_a_copy_may_be_due_at_another_time() -> None:
    event = Event(event_type="x", deliver_after=90)
    assert dataclasses.replace(event, deliver_after=5)._delay == 5
    due = dataclasses.replace(event, available_at=NOON)
    assert (due.available_at, due.deliver_at, due._delay) == (NOON, NOON, None)
    at_once = dataclasses.replace(due, available_at=None)
    assert not at_once.is_delayed
    with pytest.raises(InvalidEvent, match="both given"):
        dataclasses.replace(due, deliver_after=5)


def test_a_copy_is_checked_like_any_event() -> None:
    with pytest.raises(InvalidEvent, match="event_type"):
        dataclasses.replace(Event(event_type="x"), event_type="")
    with pytest.raises(InvalidEvent, match="lies before"):
        dataclasses.replace(Event(event_type="x", occurred_at=NOON), available_at=NOON - SECOND)


def test_ready_json_is_kept_by_a_copy_until_its_payload_changes() -> None:
    event = Event.from_json("x", ' {"b": 1.0}')
    assert dataclasses.replace(event, event_type="y")._payload_text == ' {"b": 1.0}'
    assert dataclasses.replace(event, payload={"b": 2})._payload_text is None


def test_a_stored_event_knows_its_text_and_a_copy_of_it_has_its_own_payload() -> None:
    stored = Event(event_type="x", event_id="i").as_delivered("[1.0]", decode)
    assert stored._payload_text == "[1.0]"
    copy = dataclasses.replace(stored, event_type="y", payload=2)
    assert (copy.event_type, copy.payload, copy._payload_text) == ("y", 2, None)
    assert dataclasses.replace(stored).payload == [1.0]


# --- payload as text --------------------------------------------------------------------------


@dataclass
class Line:
    sku: str = "tea"
    price: Any = Decimal("1.10")
    more: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    at: date = date(2030, 1, 2)


class Level(IntEnum):
    LOW = 1


@cases(
    ("payload", "text"),
    [
        (None, "null"),
        ({"b": 1, "a": -0.0}, '{"b":1,"a":-0.0}'),  # order and sign are kept
        ([1, "x", None, {"y": [2.5]}], '[1,"x",null,{"y":[2.5]}]'),
        ("☃😀\0", '"☃😀\\u0000"'),
        (
            Line(more=[Line("x")]),
            '{"sku":"tea","price":"1.10","more":[{"sku":"x","price":"1.10","more":[]}]}',
        ),
        (Slotted(), '{"at":"2030-01-02"}'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (NOON, '"2030-01-01T12:00:00Z"'),
        ([Colour.RED, Kind.PLACED, Level.LOW], '[1,"order.placed",1]'),
        (gettext_lazy("tea"), '"tea"'),
        (mark_safe("<b>"), '"<b>"'),
        ({1: 2, None: 3}, '{"1":2,"null":3}'),
        ((1, 2), "[1,2]"),
        (10**30, "1" + "0" * 30),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_json_can_hold(payload: Any, text: str) -> None:
    assert encode(payload) == text


NAN, INFINITY = float("nan"), float("inf")
UNFIT: dict[str, Callable[[], Any]] = {
    "NaN": lambda: NAN,
    "Infinity": lambda: [INFINITY],
    "-Infinity": lambda: {"a": -INFINITY},
    "NaN as key": lambda: {NAN: 1},
    "NaN in a dataclass": lambda: Line(price=NAN),
    "NaN in a dataclass in a dataclass": lambda: Line(more=[Line(price=NAN)]),
    "Decimal NaN": lambda: Decimal("NaN"),
    "Decimal sNaN": lambda: Decimal("sNaN"),
    "Decimal Infinity": lambda: [Decimal("Infinity")],
    "Decimal NaN in a dataclass": lambda: Line(price=Decimal("NaN")),
    "bytes": lambda: b"x",
    "bytearray": lambda: bytearray(b"x"),
    "memoryview": lambda: memoryview(b"x"),
    "bytes in a dataclass": lambda: Line(price=b"x"),
    "set": lambda: {1},
    "frozenset": frozenset,
    "set in a dataclass": lambda: Line(more=[{1}]),
    "object": object,
    "class": lambda: Line,
    "model instance": lambda: ORDER,
    "queryset": Order.objects.none,
    "generator": lambda: (n for n in [1]),
    "tuple as key": lambda: {(1, 2): 3},
    "int of 5000 digits": lambda: 10**5000,
    "function": lambda: encode,
}


@cases("name", UNFIT)
def test_what_json_cannot_hold_is_invalid(name: str) -> None:
    with pytest.raises(InvalidEvent, match="cannot be written as JSON"):
        encode(UNFIT[name]())


def test_a_circle_is_invalid() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(InvalidEvent):
        encode(circle)


def test_a_circle_of_dataclasses_is_invalid() -> None:
    line = Line()
    line.more.append(line)
    with pytest.raises(InvalidEvent):
        encode(line)


def nested(depth: int, *, inside: Any = 1) -> Any:
    for _ in range(depth):
        inside = [inside]
    return inside


def test_nesting_of_one_hundred_passes_and_one_more_is_invalid() -> None:
    check_text(encode(nested(100)), most=10**6)
    check_text(encode([nested(99), []]), most=10**6)
    with pytest.raises(InvalidEvent, match="deeper than 100"):
        check_text(encode(nested(101)), most=10**6)


def test_brackets_in_texts_are_no_nesting() -> None:
    check_text(encode({"a[": ["[" * 500, '"[\\' * 50]}), most=10**6)


def test_siblings_are_no_nesting() -> None:
    check_text(encode([[1], [2]] * 200), most=10**6)


@cases("depth", [20_000, 100_000])
def test_any_depth_is_invalid_and_no_crash(depth: int) -> None:
    """Deep nesting must not end in a RecursionError, which 20,000 levels used to raise."""
    with pytest.raises(InvalidEvent, match="deeper than 100"):
        check_text(encode(nested(depth)), most=10**7)


@cases("payload", ["\ud800", {"\udfff": 1}, [{"a": "x\ud83d"}]], ids=["value", "key", "inside"])
def test_a_lone_surrogate_is_invalid(payload: Any) -> None:
    with pytest.raises(InvalidEvent, match="lone surrogate"):
        check_text(encode(payload), most=10**6)


@cases("letter", ["a", "é", "😀"])
def test_exactly_the_limit_of_utf8_bytes_passes(letter: str) -> None:
    text = encode(letter * 3)
    size = len(text.encode())

    check_text(text, most=size)
    with pytest.raises(PayloadTooLarge, match=f"{size} bytes; at most {size - 1}"):
        check_text(text, most=size - 1)


def test_a_serializer_must_make_text_that_databases_take() -> None:
    with pytest.raises(InvalidEvent, match="bytes"):
        check_text(b"{}", most=10)
    with pytest.raises(InvalidEvent, match="NUL"):
        check_text("\0", most=10)


TEXTS = st.text(st.characters(codec="utf-8"))  # no lone surrogates
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=20,
)


@given(VALUES)
@settings(deadline=None, max_examples=200)
def test_what_is_encoded_comes_back_equal(payload: Any) -> None:
    """Everything that can be written can be read back by a listener."""
    text = encode(payload)
    check_text(text, most=10**7)
    assert decode(text) == payload == json.loads(text)


# --- what listeners see ------------------------------------------------------------------------


class Loads:
    """A decoder that counts its calls."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> Any:
        self.texts.append(text)
        return decode(text)


def stored(text: str, loads: Any = decode) -> Event:
    """Return an event as it is read from a row."""
    return event_from_row(("x", text), {"event_type": 0, "payload": 1}, loads)


def test_a_stored_payload_is_decoded_at_first_sight_and_once() -> None:
    loads = Loads()
    event = stored('{"a": 1}', loads)

    assert loads.texts == []
    assert event.payload is event.payload
    assert (event.payload, loads.texts) == ({"a": 1}, ['{"a": 1}'])


def test_both_routes_decode_the_same_text() -> None:
    """A hot listener receives what a cold one receives, not the object that the writer passed."""
    mine = {1: (2, 3), "at": NOON}
    written = Event(event_type="x", payload=mine)
    text = encode(mine)
    hot = written.as_delivered(text, decode)
    cold = stored(text)
    mine["later"] = "changed"  # type: ignore[index]

    assert hot.payload == cold.payload == {"1": [2, 3], "at": "2030-01-01T12:00:00Z"}


def test_a_hot_event_keeps_every_other_field() -> None:
    written = Event(
        event_type="x",
        aggregate=ORDER,
        tenant_id="t",
        headers={"a": "b"},
        unique_key="u",
        deliver_after=5,
        occurred_at=NOON,
    )
    hot = written.as_delivered("null", decode)

    names = [each.name for each in dataclasses.fields(Event) if each.name[0] != "_"]
    names.remove("payload")
    assert {name: getattr(hot, name) for name in names} == {
        name: getattr(written, name) for name in names
    }
    assert hot.payload is None


def test_a_damaged_payload_is_a_payload_error() -> None:
    event = stored("{")
    with pytest.raises(PayloadError, match="cannot be decoded"):
        _ = event.payload


@cases("text", ["", "{", "NaN", "[" * 100_000, '"\\ud800"', "1e999"], ids=repr)
def test_damaged_json_is_a_payload_error(text: str) -> None:
    with pytest.raises(PayloadError):
        decode(text)


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = stored("1").nonsense


def test_payload_as_gives_an_instance() -> None:
    event = Event(event_type="x", payload={"sku": "tea", "price": "1.10", "more": [1]})
    assert event.payload_as(Line) == Line("tea", "1.10", [1])


def test_payload_as_refuses_what_does_not_fit() -> None:
    event = Event(event_type="x", payload={"sku": 5})
    with pytest.raises(PayloadError, match=r"x .* does not fit Line: .*sku"):
        event.payload_as(Line)
    with pytest.raises(PayloadError, match=r"does not fit int \| None"):  # Union, from Python 3.14
        event.payload_as(int | None)  # type: ignore[arg-type]


def test_from_json_keeps_the_exact_text() -> None:
    event = Event.from_json("x", ' {"b": 1.0,  "a": 1e2}', tenant_id="t")

    assert event._payload_text == ' {"b": 1.0,  "a": 1e2}'
    assert event.payload == {"b": 1.0, "a": 100.0}
    assert event.tenant_id == "t"


@cases("text", ["", "{", "NaN", "[1,]", '"\\ud800"', b"1", None, "1e999"], ids=repr)
def test_from_json_refuses_what_is_no_json(text: Any) -> None:
    with pytest.raises(InvalidEvent, match="from_json got"):
        Event.from_json("x", text)


# --- new ids -----------------------------------------------------------------------------------


def test_a_new_id_is_a_ulid_of_now() -> None:
    from ulid import ULID

    new_id.reset()  # another test may have changed the clock
    event_id = Event(event_type="x").event_id

    assert len(event_id) == 26
    assert abs(ULID.from_str(event_id).datetime - datetime.now(timezone.utc)) < timedelta(seconds=5)


def test_new_ids_rise_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is drawing an id makes the others wait."""
    inside, go_on, drawn, urandom = threading.Event(), threading.Event(), [], os.urandom

    def slow(size: int) -> bytes:
        inside.set()
        go_on.wait(10)
        return urandom(size)

    def draw() -> None:
        drawn.append(new_id())

    new_id.reset()
    monkeypatch.setattr(os, "urandom", slow)
    first, second = threading.Thread(target=draw), threading.Thread(target=draw)
    first.start()
    assert inside.wait(10)
    monkeypatch.setattr(os, "urandom", urandom)
    second.start()
    second.join(0.2)
    assert drawn == []
    go_on.set()
    first.join()
    second.join()

    assert len(drawn) == 2
    assert new_id() > max(drawn) > min(drawn)


def test_ids_drawn_at_once_by_many_threads_differ() -> None:
    with ThreadPoolExecutor(8) as pool:
        drawn = [
            new
            for part in pool.map(lambda _: [new_id() for _ in range(500)], range(8))
            for new in part
        ]
    assert len(set(drawn)) == len(drawn) == 4000


def test_new_ids_rise_when_the_clock_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = new_id()
    monkeypatch.setattr("time.time_ns", lambda: 0)
    drawn = [new_id() for _ in range(10)]
    assert [before, *drawn] == sorted({before, *drawn})


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # threads of other tests
def test_a_forked_child_draws_ids_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fork ids still rise, and never repeat those of the parent."""
    now = time.time_ns()
    monkeypatch.setattr("time.time_ns", lambda: now)  # all within one instant
    before = new_id()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # no pytest code may run here
        try:
            os.write(write, " ".join(new_id() for _ in range(100)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        theirs = answer.read().split()
    os.waitpid(child, 0)
    ours = [new_id() for _ in range(100)]

    assert theirs == sorted(theirs)
    assert len({before, *ours, *theirs}) == 201
