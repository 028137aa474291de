"""``Event``: every rule that needs no database."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID

import msgspec
import pytest
from django.db import models
from django.test import override_settings
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import given, settings
from hypothesis import strategies as st

import django_outbox as outbox
from django_outbox import GLOBAL, Event, InvalidEvent, PayloadError, PayloadTooLarge, write
from django_outbox.events import (
    LENGTHS,
    check_text,
    decode,
    encode,
    encode_headers,
    event_from_row,
    new_id,
)
from django_outbox.events.json_text import decode_headers
from tests.cases import cases
from tests.testapp.models import Order

ORDER = Order.from_db("default", ["id"], [42])  # as if it were read from the table
NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)


class Kind(models.TextChoices):
    PLACED = "order.placed", "placed"


class Colour(Enum):
    RED = 1


class Plain(str, Enum):
    PLACED = "order.placed"


# --- what an event takes ---------------------------------------------------------------------

NAMES = ("event_type", "aggregate_type")
IDS = ("aggregate_id", "tenant_id", "unique_key", "key", "coalesce")


def test_only_the_type_is_required() -> None:
    event = Event(event_type="order.placed")

    assert event.event_type == "order.placed"
    assert event.aggregate_type == GLOBAL == outbox.GLOBAL == "__GLOBAL__"
    assert event.payload is None
    assert event.headers == {}
    assert [getattr(event, each) for each in IDS] == [None] * len(IDS)
    assert (event.available_at, event.deliver_at, event.is_delayed) == (None, None, False)
    assert event.attempts == 0
    event = Event(event_type="x", aggregate=ORDER)
    assert (event.aggregate_type, event.aggregate_id) == ("testapp.Order", "42")
    with pytest.raises(TypeError):
        Event("order.placed")  # type: ignore[misc]


TAKEN: list[tuple[str, Any, Any]] = [
    *((each, Kind.PLACED, "order.placed") for each in (*NAMES, *IDS, "event_id")),
    *((each, Plain.PLACED, "order.placed") for each in NAMES),
    *((each, Colour.RED, "RED") for each in NAMES),  # its value is not a str, so its name
    *((each, mark_safe("order.placed"), "order.placed") for each in NAMES),
    *((each, 7, "7") for each in ("event_id", "key", "coalesce")),
    *((each, UUID(int=7), str(UUID(int=7))) for each in ("event_id", "key", "coalesce")),
    *((each, "é" * most, "é" * most) for each, most in LENGTHS.items()),
]


@cases(("column", "value", "text"), TAKEN)
def test_a_column_holds_exact_str_for_drivers(column: str, value: Any, text: str) -> None:
    found = getattr(Event(**{"event_type": "x", column: value}), column)
    assert (found, type(found)) == (text, str)


WEST, EAST = timezone(timedelta(hours=-8)), timezone(timedelta(hours=8))
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({column: value}, f"{column} is .*expected a str or an enum member")
        for column in NAMES
        for value in (None, 5, b"x", ["x"])
    ),
    *(
        ({column: value}, f"{column} is .*expected a str")
        for column in (*IDS, "event_id")
        for value in (b"x", 1.5, True, ["x"])
    ),
    *(
        ({column: "é" * (most + 1)}, f"{column} has {most + 1} characters; at most {most}")
        for column, most in LENGTHS.items()
    ),
    *(  # what some database would change or refuse
        ({column: value}, column)
        for column in LENGTHS
        for value in ("\0", "a\0b", "\ud800", "trailing ", " ", "\t\n")
    ),
    # A key of its own does not make an instance saved: a UUID has a default.
    *(({"aggregate": each}, r"testapp\.Order") for each in (Order(), Order(pk=42))),
    *(({"aggregate": each}, "expected a model instance") for each in (Order, "order", 5, object())),
    ({"key": "k", "coalesce": "c"}, "together"),
    ({"aggregate": ORDER, "aggregate_type": "a"}, "together"),
    ({"aggregate": ORDER, "aggregate_id": "1"}, "together"),
    *(
        ({"headers": value}, "header")
        for value in (
            *({1: "a"}, {"a": 1}, {"a": None}, {None: "a"}, {"a": b"b"}, {"a": "\ud800"}),
            *([], "", 0, [("a", "b")], "ab"),
        )
    ),
    *(
        ({name: value}, name)
        for name in ("occurred_at", "available_at")
        for value in (
            *(date(2030, 1, 1), "2030-01-01", 5),
            datetime.min.replace(tzinfo=EAST),  # has no UTC equivalent
            datetime.max.replace(tzinfo=WEST),
            datetime(1970, 12, 31, tzinfo=timezone.utc),
            datetime(9999, 1, 1, tzinfo=timezone.utc),
        )
    ),
    *(
        ({"deliver_after": value}, "deliver_after")
        for value in (
            *(0, -1, 0.0, 1e-9, timedelta(0), timedelta(microseconds=-1), True, "5", Decimal(5)),
            *(float("nan"), float("inf"), float("-inf"), 10**400, timedelta(days=36_526)),
        )
    ),
    *(  # it may not leave the calendar
        (
            {"occurred_at": datetime(9998, 12, 31, tzinfo=timezone.utc), "deliver_after": value},
            "deliver_after",
        )
        for value in (timedelta(days=2), timedelta(days=36_500))
    ),
    ({"available_at": NOON, "deliver_after": 1}, "both given"),
    ({"occurred_at": NOON, "available_at": NOON - timedelta(microseconds=1)}, "lies before"),
]


@cases(("fields", "said"), REFUSED)
def test_what_no_event_has(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidEvent, match=said):
        Event(**{"event_type": "x", **fields})


SUGGESTED: dict[str, str | None] = {
    "delay": "deliver_after",
    "countdown": "deliver_after",
    "delay_secs": "deliver_after",
    "eta": "available_at",
    "run_at": "available_at",
    "aggregate_typ": "aggregate_type",
    "idempotency_key": "unique_key",
    "colour": None,
}


@pytest.mark.parametrize("call", [write, Event])
@cases(("name", "right"), SUGGESTED.items())
def test_an_unknown_argument_is_refused_with_the_name_of_a_known_one(
    call: Callable[..., object], name: str, right: str | None
) -> None:
    with pytest.raises(TypeError, match=f"'{name}'") as caught:
        call(event_type="x", payload={}, **{name: 5})
    assert right is None or f"{right!r}?" in str(caught.value)
    with pytest.raises(TypeError, match=r"due time"):  # others are passed on
        call(event_type="x", deliver_after=None)


def test_a_due_time_that_only_the_outbox_fills_in_is_refused() -> None:
    with pytest.raises(InvalidEvent, match="available_at"):
        Event(event_type="x", deliver_at=NOON)


def test_str_names_the_event_in_one_line_without_payload() -> None:
    event = Event(
        event_type="t", payload="secret", event_id="01", aggregate_type="a", aggregate_id="7"
    )
    assert str(event) == "t 01 (a 7)"
    assert str(Event(event_type="t", event_id="01")) == "t 01"


def test_headers_are_a_read_only_copy_of_exact_str() -> None:
    mine = {Kind.PLACED: mark_safe("<b>")}
    event = Event(event_type="x", headers=mine)
    mine.clear()

    assert encode_headers(event.headers, most=100) == '{"order.placed":"<b>"}'
    with pytest.raises(TypeError):
        event.headers["a"] = "3"  # type: ignore[index]
    assert encode_headers(Event(event_type="x", headers={}).headers, most=100) is None


def test_stored_headers() -> None:
    for nothing in (None, "", "null", "{}"):
        assert decode_headers(nothing) == {}
    for damaged in ("[]", '{"a": 1}', '{"a"', '{"a": null}', "7", "[" * 5000):
        with pytest.raises(PayloadError, match="headers cannot be decoded"):
            decode_headers(damaged)


# --- times ----------------------------------------------------------------------------------


def test_occurred_at_is_now_by_default() -> None:
    before = datetime.now(timezone.utc)
    for fields in ({}, {"occurred_at": None}):
        event = Event(event_type="x", **fields)
        assert before <= event.occurred_at <= datetime.now(timezone.utc)


def test_a_naive_datetime_warns_with_time_zone_support() -> None:
    """This is Django's own rule."""
    with pytest.warns(RuntimeWarning, match="naive datetime"):
        event = Event(event_type="x", occurred_at=datetime(2030, 1, 1, 12))  # noqa: DTZ001
    assert event.occurred_at == datetime(2030, 1, 1, 6, 15, tzinfo=timezone.utc)  # Kathmandu
    with override_settings(USE_TZ=False, TIME_ZONE="America/New_York"):
        event = Event(event_type="x", available_at=datetime(2030, 1, 1, 12))  # noqa: DTZ001
    assert event.available_at == datetime(2030, 1, 1, 17, tzinfo=timezone.utc)


def test_an_explicit_none_is_no_due_time_and_a_past_one_is_due_at_once() -> None:
    """Only an explicit ``occurred_at`` makes an earlier due time invalid."""
    for name in ("available_at", "deliver_after"):
        with pytest.raises(TypeError, match="None is not a due time"):
            Event(**{"event_type": "x", name: None})
    past = datetime(2001, 1, 1, tzinfo=timezone.utc)
    assert Event(event_type="x", available_at=past).available_at == past


def test_deliver_after_counts_from_the_databases_now_or_from_occurred_at() -> None:
    """Without ``occurred_at`` there is no due time until the database supplies one."""
    for delay in (90, 90.0, timedelta(seconds=90)):
        event = Event(event_type="x", deliver_after=delay)
        assert (event.available_at, event._delay, event.is_delayed) == (None, 90.0, True)
        event = Event(event_type="x", deliver_after=delay, occurred_at=NOON)
        assert event.available_at == event.deliver_at == NOON + timedelta(seconds=90)
        assert (event._delay, event.is_delayed) == (None, True)


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


def test_a_copy_may_be_due_at_another_time() -> None:
    event = Event(event_type="x", deliver_after=90)
    assert dataclasses.replace(event, deliver_after=5)._delay == 5
    due = dataclasses.replace(event, available_at=NOON)
    assert (due.available_at, due.deliver_at, due._delay) == (NOON, NOON, None)
    at_once = dataclasses.replace(due, available_at=None)
    assert not at_once.is_delayed
    with pytest.raises(InvalidEvent, match="both given"):
        dataclasses.replace(due, deliver_after=5)


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


@dataclass
class Cart:
    coupon: str
    lines: Any


class Box(msgspec.Struct):
    label: str
    content: Any


FAULTY_PATHS: list[tuple[Any, str]] = [
    ({1}, "payload"),
    ({"order": {"lines": [{"price": 1}, {"price": {1}}]}}, "payload.order.lines[1].price"),
    ({"a": ({}, [NAN])}, "payload.a[1][0]"),
    ({"no name": {7: b"x"}}, "payload['no name'][7]"),
    ({"by": {(1, 2): 3}}, "payload.by"),  # the key is the fault
    (Cart("x", lines=[{"price": Decimal("NaN")}]), "payload.lines[0].price"),
    ({"box": Box("x", content=[Cart("x", b"x")])}, "payload.box.content[0].lines"),
    ({"box": Box("x", content=[1, object()])}, "payload.box.content[1]"),
    ({"of": ORDER}, "payload.of"),  # not an attribute of what is no payload
]


@cases(("payload", "path"), FAULTY_PATHS)
def test_what_json_cannot_hold_is_named_by_its_path(payload: Any, path: str) -> None:
    with pytest.raises(InvalidEvent, match=f"^{re.escape(path)} "):
        encode(payload)


def test_the_path_ends_where_nesting_does() -> None:
    with pytest.raises(InvalidEvent, match=r"^payload(\[0\]){100} "):
        encode(nested(700, inside={1}))


def nested(depth: int, *, inside: Any = 1) -> Any:
    for _ in range(depth):
        inside = [inside]
    return inside


def circle() -> Any:
    line = Line()
    line.more.append(line)
    return line


TEXT_FAULTS: list[tuple[Any, str]] = [
    (nested(101), "deeper than 100"),
    (nested(20_000), "deeper than 100"),  # no RecursionError, however deep
    (nested(100_000), "deeper than 100"),
    (circle(), "Circular reference"),
    *((each, "lone surrogate") for each in ("\ud800", {"\udfff": 1}, [{"a": "x\ud83d"}])),
]


@cases(("payload", "said"), TEXT_FAULTS, ids=lambda each: str(type(each)))
def test_text_that_no_database_takes(payload: Any, said: str) -> None:
    with pytest.raises(InvalidEvent, match=said):
        check_text(encode(payload), most=10**7)


def test_nesting_of_one_hundred_brackets_in_texts_and_siblings_pass() -> None:
    for payload in (
        nested(100),
        [nested(99), []],
        {"a[": ["[" * 500, '"[\\' * 50]},
        [[1], [2]] * 200,
    ):
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


@cases("text", ["", "{", "NaN", "[" * 100_000, '"\\ud800"', "1e999"], ids=lambda each: each[:9])
def test_damaged_json_is_a_payload_error(text: str) -> None:
    with pytest.raises(PayloadError):
        decode(text)
    with pytest.raises(PayloadError, match="cannot be decoded"):
        _ = stored(text).payload


def test_payload_as_gives_an_instance_or_refuses() -> None:
    event = Event(event_type="x", payload={"sku": "tea", "price": "1.10", "more": [1]})
    assert event.payload_as(Line) == Line("tea", "1.10", [1])
    event = Event(event_type="x", payload={"sku": 5})
    with pytest.raises(PayloadError, match=r"x .* does not fit Line: .*sku"):
        event.payload_as(Line)
    with pytest.raises(PayloadError, match=r"does not fit int \| None"):  # Union, from Python 3.14
        event.payload_as(int | None)  # type: ignore[arg-type]


def test_from_json_keeps_the_exact_text() -> None:
    event = Event.from_json("x", ' {"b": 1.0,  "a": 1e2}', tenant_id="t")

    assert event._payload_text == ' {"b": 1.0,  "a": 1e2}'
    assert dataclasses.replace(event, event_type="y")._payload_text == event._payload_text
    assert dataclasses.replace(event, payload={"b": 2})._payload_text is None
    assert event.payload == {"b": 1.0, "a": 100.0}
    assert event.tenant_id == "t"


@cases("text", ["", "{", "NaN", "[1,]", '"\\ud800"', b"1", None, "1e999"], ids=repr)
def test_from_json_refuses_what_is_no_json(text: Any) -> None:
    with pytest.raises(InvalidEvent, match="from_json got"):
        Event.from_json("x", text)


# --- new ids -----------------------------------------------------------------------------------


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


def test_new_ids_are_ulids_and_rise_when_the_clock_steps_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ulid import ULID

    new_id.reset()  # another test may have changed the clock
    before = new_id()
    age = datetime.now(timezone.utc) - ULID.from_str(before).datetime
    assert abs(age) < timedelta(seconds=5)
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


def test_an_event_made_without_names_says_how() -> None:
    with pytest.raises(TypeError, match="event_type="):
        outbox.Event("order.placed", {"sku": "teapot"})  # type: ignore[misc]
