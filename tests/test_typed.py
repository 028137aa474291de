"""Typed events: classes that declare an event type, a key and headers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec
import pytest
from django.core.checks import run_checks
from django.db import connection, models, transaction
from django.test.utils import CaptureQueriesContext

import django_outbox as outbox
from django_outbox import Event, InvalidEvent, event, write, write_many
from django_outbox.listeners import registry
from django_outbox.models import OutboxEvent
from django_outbox.testing import make_event
from tests.cases import cases
from tests.table import insert, listening, row

pytestmark = pytest.mark.django_db(transaction=True)

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)


class Kind(models.TextChoices):
    PLACED = "cart.placed", "placed"


@dataclass
class Line:
    sku: str
    quantity: int = 1


@event(
    Kind.PLACED,
    key="order.id",
    headers={"region": "order.region", "first": lambda placed: placed.lines[0].sku},
    aggregate_type="shop.Order",
    aggregate_id="order.id",
)
@dataclass(frozen=True, slots=True)
class OrderPlaced:
    order: Order
    lines: list[Line] = field(default_factory=lambda: [Line("tea")])


@dataclass
class Order:
    id: Any
    region: str | None = "north"


@event("plainly")
@dataclass
class Plain:
    n: int = 0


@event("plain.renamed", aliases=("plain.old", "plain.older"))
@dataclass
class Renamed:
    n: int


class Child(Plain):
    """Inherits from a declared class, but has no declaration of its own."""


def stored(event_id: str | None) -> OutboxEvent:
    return row(str(event_id))


# --- writing --------------------------------------------------------------------------------------


def test_an_instance_brings_its_type_key_headers_and_aggregate() -> None:
    with transaction.atomic():
        event_id = write(OrderPlaced(Order(17)))
    found = stored(event_id)
    assert (found.event_type, found.key) == ("cart.placed", "17")
    assert (found.aggregate_type, found.aggregate_id) == ("shop.Order", "17")
    assert json.loads(found.headers or "") == {"region": "north", "first": "tea"}
    assert json.loads(found.payload) == {
        "order": {"id": 17, "region": "north"},
        "lines": [{"sku": "tea", "quantity": 1}],
    }


# ``headers=`` overrides declared headers, and these override the context providers.
def test_what_the_caller_says_wins(settings: Any) -> None:
    settings.OUTBOX = {"CONTEXT_PROVIDERS": ["tests.test_typed.provider"]}
    placed = OrderPlaced(Order(17))
    with transaction.atomic():
        declared = stored(write(placed))
        given = stored(
            write(
                placed,
                key="other",
                headers={"region": "south"},
                aggregate_type="shop.Cart",
                aggregate_id="3",
                tenant_id="t",
            )
        )
    assert json.loads(declared.headers or "") == {"region": "north", "first": "tea", "by": "p"}
    assert json.loads(given.headers or "") == {"region": "south", "first": "tea", "by": "p"}
    assert (given.key, given.tenant_id) == ("other", "t")
    assert (given.aggregate_type, given.aggregate_id) == ("shop.Cart", "3")


def provider() -> dict[str, str]:
    return {"region": "provided", "by": "p"}


def test_many_may_be_typed_beside_ready_ones() -> None:
    with transaction.atomic(), CaptureQueriesContext(connection) as sent:
        ids = write_many([Plain(1), Event(event_type="x"), Plain(2)])
    assert [stored(each).event_type for each in ids] == ["plainly", "x", "plainly"]
    assert [stored(each).payload for each in ids] == ['{"n":1}', "null", '{"n":2}']
    assert len([each for each in sent.captured_queries if "INSERT" in each["sql"]]) == 1


# A header of None is left out; ints and UUIDs are written as text.
def test_a_header_of_none_is_left_out() -> None:
    placed = OrderPlaced(Order(UUID(int=7), region=None))
    made = Event(event_type=placed)
    assert made.headers == {"first": "tea"}
    assert made.key == str(UUID(int=7))
    assert Event(event_type=Keyed("order.id").made({"id": 5})).key == "5"  # through a mapping


class Keyed:
    """A class that declares a key by this path, in ``made``."""

    def __init__(self, key: Any) -> None:
        @event("keyed", key=key)
        @dataclass
        class Declared:
            order: Any

        self.made = Declared


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no attribute": (lambda: Keyed("order.id").made(SimpleNamespace()), "'order.id'.* no 'id'"),
    "no first": (lambda: Keyed("nothing.id").made(1), "Declared has no 'nothing'"),
    "no item": (lambda: Keyed("order.id").made({}), "dict has no 'id'"),
    "None": (lambda: Keyed("order").made(None), "key of 'keyed' is None"),
    "None of a callable": (lambda: Keyed(lambda it: it.order).made(None), "key of 'keyed' is None"),
    "empty": (lambda: Keyed("order").made(""), "key is ''"),
    "bool": (lambda: Keyed("order").made(True), "key is True"),
    "float": (lambda: Keyed("order").made(1.5), "key is 1.5"),
    "too long": (lambda: Keyed("order").made("x" * 256), "key has 256"),
}


# The error is raised before any SQL.
@cases("name", BAD)
def test_a_path_that_leads_to_no_key_is_invalid_and_named(name: str) -> None:
    make, says = BAD[name]
    with transaction.atomic(), CaptureQueriesContext(connection) as sent:
        with pytest.raises(InvalidEvent, match=says):
            write(make())
        with pytest.raises(InvalidEvent, match=says):
            write_many([make()])
    assert len(sent) == 0


def test_an_unfit_header_is_invalid() -> None:
    with pytest.raises(InvalidEvent, match=r"region.*is not str: str"):
        Event(event_type=OrderPlaced(Order(1, region=1.5)))  # type: ignore[arg-type]
    with pytest.raises(InvalidEvent, match=r"headers\['region'\] comes from 'order.region'"):
        Event(event_type=OrderPlaced(SimpleNamespace(id=1)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [Child(1), Line("a"), Plain, object()], ids=lambda it: repr(it)[:9]
)
def test_what_is_not_declared_is_no_event(given: Any) -> None:
    with transaction.atomic():
        with pytest.raises(InvalidEvent, match="event_type is"):
            write(given)
        with pytest.raises(InvalidEvent, match="declared with @event"):
            write_many([given])


def test_a_payload_beside_a_payload_is_invalid() -> None:
    with (
        transaction.atomic(),
        pytest.raises(InvalidEvent, match="together with an instance of Plain"),
    ):
        write(Plain(1), {"n": 2})


# --- what a listener could not read ---------------------------------------------------------------


@event("note.due", aliases=("note.old",))
@dataclass
class Reminder:
    order: int
    note: str = ""


BY_NAME: dict[str, Callable[[], Any]] = {
    "no payload": lambda: write("note.due"),
    "missing field": lambda: write("note.due", {"note": "x"}),
    "wrong type": lambda: write("note.due", {"order": "soon"}),
    "not an object": lambda: write("note.due", [1]),
    "former name": lambda: write("note.old", {}),
    "instance of another class": lambda: write("note.due", Line("a")),
    "many": lambda: write_many([Reminder(1), Event(event_type="note.due")]),
    "text": lambda: write(Event.from_json("note.due", "{}")),
}


@pytest.fixture(params=[False, True], ids=["in production", "in tests"])
def reads_back(request: pytest.FixtureRequest) -> bool:
    """Whether each typed payload is read back."""
    if not request.param:
        request.getfixturevalue("no_test_run")
    return bool(request.param)


@pytest.mark.usefixtures("reads_back")
@pytest.mark.parametrize("name", BY_NAME)
def test_what_does_not_fit_the_declared_class_is_not_written(name: str) -> None:
    with (
        transaction.atomic(),
        CaptureQueriesContext(connection) as sent,
        pytest.raises(InvalidEvent, match="Reminder"),
    ):
        BY_NAME[name]()
    assert len(sent) == 0


@pytest.mark.usefixtures("reads_back")
def test_what_fits_the_declared_class_may_be_written_by_its_name() -> None:
    with transaction.atomic():
        write("note.due", {"order": 1, "more": True})
        write("note.due", Reminder(2))
    assert heard_by(Reminder) == [Reminder(1), Reminder(2)]


def test_of_several_classes_of_a_type_one_must_fit() -> None:
    @event("note.due")
    @dataclass
    class Other:
        at: datetime

    with transaction.atomic():
        assert write("note.due", {"at": NOON})
        assert write("note.due", {"order": 1})
        with pytest.raises(InvalidEvent, match=r"Reminder.*Other"):
            write("note.due", {"note": "x"})


@event("changing")
@dataclass
class Changing:
    n: Any = 0
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.n, int):
            self.n += 1


CHANGED: dict[str, tuple[Any, str]] = {
    "a value": (Changing(1), "n "),
    "a type": (Changing((1,)), "n "),
    "inside": (Changing("", [Line("a"), Line("b", True)]), r"lines\[1\]"),
}


@pytest.mark.parametrize("debug", [False, True], ids=["in tests", "under DEBUG"])
@pytest.mark.parametrize("name", CHANGED)
def test_what_would_come_back_changed_is_not_written(
    name: str, debug: bool, settings: Any, request: pytest.FixtureRequest
) -> None:
    if debug:
        request.getfixturevalue("no_test_run")
        settings.DEBUG = True
    payload, where = CHANGED[name]
    with transaction.atomic(), pytest.raises(InvalidEvent, match=where):
        write(payload)
    with pytest.raises(InvalidEvent, match=where):
        make_event(payload)


# --- declaring ------------------------------------------------------------------------------------


UNFIT: dict[str, Callable[[], Any]] = {
    "type": lambda: event(""),
    "type too long": lambda: event("x" * 129),
    "type no text": lambda: event(5),
    "key no path": lambda: event("x", key="a b"),
    "key empty": lambda: event("x", key=""),
    "key number": lambda: event("x", key=5),  # type: ignore[arg-type]
    "header": lambda: event("x", headers={"a": 5}),  # type: ignore[dict-item]
    "aggregate": lambda: event("x", aggregate_type=""),
    "aliases text": lambda: event("x", aliases="old"),  # type: ignore[arg-type]
    "alias": lambda: event("x", aliases=("",)),
    "function": lambda: event("x")(lambda: None),  # type: ignore[type-var]
}


@cases("name", UNFIT)
def test_a_wrong_declaration_fails_where_it_stands(name: str) -> None:
    with pytest.raises(InvalidEvent):
        UNFIT[name]()


# --- listening ------------------------------------------------------------------------------------


def heard_by(listens_to: Any, **options: Any) -> list[Any]:
    """Deliver what is due to a listener of this class; return the payloads that it received."""
    got: list[Any] = []
    with listening(lambda event: got.append(event.payload), listens_to, **options):
        outbox.drain()
    return got


@pytest.mark.parametrize(
    "payload",
    [OrderPlaced(Order(17), [Line("a"), Line("b", 3)]), Plain(2)],
    ids=lambda each: type(each).__name__,
)
def test_a_listener_gets_an_equal_instance(payload: Any) -> None:
    with transaction.atomic():
        write(payload, key=None)
    OutboxEvent.objects.update(key=None, available_at=models.F("first_due_at"))
    assert heard_by(type(payload)) == [payload]


def third_party(name: str) -> type:
    if name == "msgspec":
        return msgspec.defstruct("Placed", [("order_id", int), ("at", datetime)])
    if name == "attrs":
        attrs = pytest.importorskip("attrs")
        fields = {"order_id": attrs.field(type=int), "at": attrs.field(type=datetime)}
        return attrs.make_class("Placed", fields)  # type: ignore[no-any-return]
    pydantic = pytest.importorskip("pydantic")
    return pydantic.create_model("Placed", order_id=(int, ...), at=(datetime, ...))  # type: ignore[no-any-return]


LIBRARIES = ["msgspec", "attrs", "pydantic"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_classes_of_other_libraries(library: str) -> None:
    declared = event("placed", headers={"order": "order_id"})(third_party(library))
    payload = declared(order_id=5, at=NOON)
    with transaction.atomic():
        found = stored(write(payload))
        write("nested", {"of": [payload]})
    assert json.loads(found.payload) == {"order_id": 5, "at": "2030-01-01T12:00:00Z"}
    assert found.headers == '{"order":"5"}'
    assert heard_by(declared) == [payload]
    assert json.loads(OutboxEvent.objects.get(event_type="nested").payload) == {
        "of": [{"order_id": 5, "at": "2030-01-01T12:00:00Z"}]
    }


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_does_not_fit_such_a_class_is_dead_and_the_field_is_named(library: str) -> None:
    declared = event("placed")(third_party(library))
    [event_id] = insert(event_type="placed", payload='{"order_id": "secret", "at": null}')
    assert heard_by(declared) == []
    found = row(event_id)
    assert (found.status, found.attempts) == (OutboxEvent.Status.DEAD, 0)
    assert "PayloadError" in (found.last_error or "")
    assert "order_id" in (found.last_error or "")
    assert "secret" not in (found.last_error or "")


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (
            '{"order": {"id": 1}, "lines": [{"sku": "a", "quantity": "many"}]}',
            "Expected `int`, got `str` - at `$.lines[0].quantity`",
        ),
        ('{"lines": []}', "missing required field `order`"),
        ("[1]", "Expected `object`, got `array`"),
        ("null", "Expected `object`, got `null`"),
    ],
    ids=["type", "missing", "list", "null"],
)
def test_a_payload_that_does_not_fit_is_dead_and_the_field_is_named(
    payload: str, says: str
) -> None:
    """The event is dead at once; neither the listener nor its fallback is called."""
    [event_id] = insert(event_type=Kind.PLACED, payload=payload)
    called: list[Any] = []
    with listening(called.append, OrderPlaced):
        registry.fallback(called.append, lambda event, failure: called.append(failure))
        assert outbox.drain() == 1
    found = row(event_id)
    assert (found.status, found.attempts) == (OutboxEvent.Status.DEAD, 0)
    assert "does not fit OrderPlaced" in (found.last_error or "")
    assert says in (found.last_error or "")
    assert called == []


def test_unknown_fields_are_ignored_and_defaults_fill_in() -> None:
    insert(event_type="plainly", payload='{"n": 5, "added later": [1]}')
    insert(event_type="plainly", payload="{}")
    assert heard_by(Plain) == [Plain(5), Plain(0)]


@event("guarded")
@dataclass
class Guarded:
    n: int

    def __post_init__(self) -> None:
        if self.n == 1:
            raise ValueError("one is no number")
        if self.n == 2:
            raise KeyError("a mistake in the class")


@pytest.mark.parametrize(("number", "says"), [(1, "one is no number"), (2, "a mistake")])
def test_a_class_that_refuses_or_fails_is_unfit(number: int, says: str) -> None:
    """Another attempt would read the same payload by the same class."""
    [event_id] = insert(event_type="guarded", payload=f'{{"n": {number}}}')
    assert heard_by(Guarded, retry=outbox.Fixed(60)) == []
    found = row(event_id)
    assert (found.status, found.attempts) == (OutboxEvent.Status.DEAD, 0)
    assert says in (found.last_error or "")


def test_one_that_is_unfit_for_one_listener_reaches_the_others() -> None:
    got: list[Any] = []
    [event_id] = insert(event_type="plainly", payload='{"n": "x"}')
    with listening(got.append, Plain), listening(got.append, "plainly", name="raw"):
        outbox.drain()
    assert [each.payload for each in got] == [{"n": "x"}]
    assert row(event_id).status == OutboxEvent.Status.DEAD


# A renamed type keeps its former names as aliases.
def test_former_names_are_routed_and_decoded() -> None:
    for number, name in enumerate(["plain.renamed", "plain.old", "plain.older"]):
        insert(event_type=name, payload=f'{{"n": {number}}}')
    insert(event_type="plain.oldest", payload='{"n": 9}')
    assert heard_by(Renamed) == [Renamed(0), Renamed(1), Renamed(2)]
    with transaction.atomic():
        assert stored(write(Renamed(5))).event_type == "plain.renamed"


def test_a_place_taken_by_an_alias_is_taken() -> None:
    def second(event: Event) -> None: ...

    with (
        listening(lambda event: None, Renamed),
        pytest.raises(outbox.ListenerAlreadyRegistered, match=r"'plain\.old'"),
    ):
        outbox.listener("plain.old")(second)


@pytest.mark.parametrize("given", [Line, Child, int, Kind], ids=lambda each: each.__name__)
def test_a_class_that_is_not_declared_cannot_be_listened_to(given: type) -> None:
    with pytest.raises(ValueError, match="declared with @event"):
        outbox.listener(given)


@event("unreadable")
@dataclass
class Unreadable:
    order: Nowhere  # type: ignore[name-defined]  # noqa: F821
    note: str = ""


@pytest.mark.usefixtures("reads_back")
def test_an_instance_of_a_class_that_cannot_be_read_is_not_written() -> None:
    with transaction.atomic(), pytest.raises(InvalidEvent, match=r"Unreadable\.order"):
        write(Unreadable(1))


@dataclass
class Ambiguous:
    either: Line | Plain


@pytest.mark.parametrize(
    ("cls", "field"), [(Unreadable, "Unreadable.order"), (Ambiguous, "Ambiguous.either")]
)
def test_a_class_that_cannot_be_read_after_all_is_dead_at_once(cls: type, field: str) -> None:
    """A retry would fail alike. Only ``payload_as`` takes a class that was not declared."""
    [event_id] = insert(event_type="x", payload='{"order": 1, "either": {}}')
    with listening(lambda event: event.payload_as(cls), "x", retry=outbox.Fixed(60)):
        outbox.drain()
    found = row(event_id)
    assert found.status == OutboxEvent.Status.DEAD
    assert field in (found.last_error or "")


def test_e013_a_class_that_can_never_be_read() -> None:
    with listening(lambda event: None, Unreadable):
        found = [
            each for each in run_checks(tags=["django_outbox"]) if each.id == "django_outbox.E013"
        ]
    [error] = found
    assert "Unreadable.order" in error.msg
    assert error.is_serious()
    assert error.hint
