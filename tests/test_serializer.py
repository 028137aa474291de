"""``SERIALIZER``: a serializer of payloads, given by dotted path."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

import django_outbox as outbox
from django_outbox import Event, InvalidEvent, event, hooks, write
from django_outbox.models import OutboxEvent
from tests import samples
from tests.table import PLACED, insert, listening, row
from tests.test_hot import quiet, resting
from tests.testapp.models import Order
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


class Sets:
    """A serializer for JSON with sets, as an ordinary class."""

    def dumps(self, value: Any) -> str:
        return json.dumps(value, default=lambda each: {"set": sorted(each)})

    def loads(self, text: str) -> Any:
        return json.loads(text, object_hook=lambda each: {*each["set"]} if "set" in each else each)


class Shouting:
    """A serializer whose methods need no instance."""

    @staticmethod
    def dumps(value: Any) -> str:
        return json.dumps(value).upper()

    @staticmethod
    def loads(text: str) -> Any:
        return text.lower()


class Failing:
    def dumps(self, value: Any) -> str:
        raise KeyError("no codec")

    def loads(self, text: str) -> Any:
        raise KeyError("no codec")


class Bytes:
    def dumps(self, value: Any) -> bytes:
        return b"{}"

    def loads(self, text: str) -> Any:
        return None


@dataclass
class Order2:
    sku: str


@event("typed")
@dataclass
class Typed:
    n: int


class Typing:
    """A serializer whose ``loads`` takes the type and makes the instance itself."""

    asked: list[Any] = []

    def dumps(self, value: Any) -> str:
        return json.dumps({"n": value.n - 100})

    def loads(self, text: str, kind: Any = None) -> Any:
        Typing.asked.append(kind)
        if kind is None:
            return json.loads(text)
        return kind(int(json.loads(text)["n"]) + 100)


an_instance = Sets()


def use(settings: Any, name: str, **more: Any) -> None:
    settings.OUTBOX = {"SERIALIZER": f"tests.test_serializer.{name}", **more}


def heard(event_type: Any = "x") -> list[Any]:
    got: list[Any] = []
    with listening(lambda event: got.append(event.payload), event_type):
        outbox.drain()
    return got


def write_one(payload: Any = None, event_type: Any = "x", **fields: Any) -> OutboxEvent:
    with transaction.atomic():
        return row(str(write(event_type, payload, **fields)))


# The default stays strict; a custom serializer may accept more types.
@pytest.mark.parametrize("name", ["Sets", "an_instance"])
def test_a_serializer_widens_what_a_payload_may_be(settings: Any, name: str) -> None:
    with pytest.raises(InvalidEvent, match="cannot be written as JSON"):
        write_one({"tags": {"b", "a"}})
    use(settings, name)
    assert write_one({"tags": {"b", "a"}}).payload == '{"tags": {"set": ["a", "b"]}}'
    assert heard() == [{"tags": {"a", "b"}}]


def test_two_functions_will_do(settings: Any) -> None:
    use(settings, "Shouting")
    assert write_one({"a": "b"}).payload == '{"A": "B"}'
    assert heard() == ['{"a": "b"}']


def test_a_worker_delivers_hot_and_cold_by_the_same_serializer(settings: Any) -> None:
    """Hot and cold events must not differ: there is one serializer for the whole project."""
    use(settings, "Sets", **quiet())
    got: list[tuple[str, Any]] = []

    def listen(event: Event) -> Any:
        got.append((event.source, event.payload))
        return outbox.Defer(0) if len(got) == 1 else None

    with listening(listen), resting():
        write_one({"tags": {1}}, PLACED)
        wait_until(lambda: len(got) == 2, what="two deliveries")
    assert got == [("hot", {"tags": {1}}), ("cold", {"tags": {1}})]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Failing", r"Failing\.dumps cannot write the payload, dict: KeyError\('no codec'\)"),
        ("Bytes", "made bytes of the payload, not str"),
    ],
    ids=["raises", "bytes"],
)
def test_what_it_cannot_write_is_invalid_before_any_sql(
    settings: Any, name: str, says: str
) -> None:
    use(settings, name)
    with transaction.atomic():
        with CaptureQueriesContext(connection) as sent, pytest.raises(InvalidEvent, match=says):
            write("x", {})
        assert len(sent) == 0
        Order.objects.create(sku="goes on")
    assert Order.objects.exists()


@pytest.mark.parametrize(
    ("name", "event_type", "says"),
    [
        ("Failing", "x", "Failing.loads cannot read it: KeyError('no codec')"),
        ("Typing", "typed", "Typing.loads cannot read it: ValueError"),
    ],
    ids=["unreadable", "unfit"],
)
def test_what_it_cannot_read_is_dead(settings: Any, name: str, event_type: str, says: str) -> None:
    [event_id] = insert(event_type=event_type, payload='{"n": "many"}')
    use(settings, name)
    assert heard(Typed if event_type == "typed" else event_type) == []
    found = row(event_id)
    assert (found.status, found.attempts) == (OutboxEvent.Status.DEAD, 0)
    assert "PayloadError" in (found.last_error or "")
    assert says in (found.last_error or "")


# ``loads`` may take the type as a second argument.
def test_it_may_make_the_instances_itself(settings: Any) -> None:
    use(settings, "Typing")
    Typing.asked.clear()
    with transaction.atomic():
        write(Typed(5))
    assert heard(Typed) == [Typed(5)]
    assert Typing.asked[-2:] == [None, Typed]


def test_else_its_values_are_made_instances(settings: Any) -> None:
    use(settings, "Sets")
    write_one({"sku": "a", "more": 1})
    got: list[Any] = []
    with listening(lambda event: got.append(event.payload_as(Order2)), "x"):
        outbox.drain()
    assert got == [Order2("a")]


def test_the_default_may_be_built_upon() -> None:
    assert hooks.JSON.loads(hooks.JSON.dumps(Order2("a"))) == {"sku": "a"}
    assert hooks.JSON.loads('{"sku": "a"}', Order2) == Order2("a")


# --- the how-to -----------------------------------------------------------------------------------


def protobuf_module() -> ModuleType:
    """Return the module that ``protoc`` makes for a message with ``order_id`` and ``skus``."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    text = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
    file = descriptor_pb2.FileDescriptorProto(
        name="shop/order.proto", package="shop", syntax="proto3"
    )
    message = file.message_type.add(name="OrderPlaced")
    message.field.add(name="order_id", number=1, type=text, label=1)
    message.field.add(name="skus", number=2, type=text, label=3)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = ModuleType("shop.order_pb2")
    descriptor = pool.FindMessageTypeByName("shop.OrderPlaced")
    vars(made).update(OrderPlaced=message_factory.GetMessageClass(descriptor))
    return made


# It stores protobuf as base64 inside JSON.
def test_the_samples_of_the_how_to(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order_pb2 = protobuf_module()
    monkeypatch.setitem(sys.modules, "shop.order_pb2", order_pb2)
    settings.OUTBOX = {"SERIALIZER": "shop.codec.ProtobufOrJSON"}  # before a class is declared
    with samples.modules("how-to/type-events.md#Choose a serializer") as shop:
        settings.OUTBOX = shop["settings"].OUTBOX
        message = order_pb2.OrderPlaced(order_id="17", skus=["tea", "cup"])
        with transaction.atomic():
            found = row(str(write(message)))
            write("plain", {"sku": "jug"})
        assert base64.b64decode(json.loads(found.payload)) == message.SerializeToString()
        assert (found.event_type, found.key) == ("order.placed", "17")
        got: list[Any] = []
        reserved = shop["shop.listeners"].reserved
        with listening(got.append, "plain"), outbox.Worker():
            wait_until(lambda: reserved and got, what="both delivered")
        assert reserved == ["tea", "cup"]
        assert got[0].payload == {"sku": "jug"}

        insert(event_type="order.placed", payload='"not base64 of a message"')
        outbox.drain()
        dead = OutboxEvent.objects.dead().get()
        assert "does not fit" in (dead.last_error or "")
        stored = Event(event_type="x").as_delivered(found.payload, hooks.serializer().loads)
        assert stored.payload == json.loads(found.payload)
        assert stored.payload_as(order_pb2.OrderPlaced) == message
