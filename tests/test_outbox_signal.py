"""``OutboxSignal``: a signal that writes an event and still calls its receivers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.dispatch import Signal
from django.test.utils import CaptureQueriesContext

from django_outbox import Event, InvalidEvent, NoActiveTransaction, OutboxSignal
from django_outbox.models import OutboxEvent
from tests import samples
from tests.table import in_thread
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(databases=["default", "other"])

heard: list[Any] = []  # (sender, arguments) that receivers got


@dataclass
class Placed:
    id: Any
    region: str | None = "north"


class Undone(Exception):
    """The error of a receiver that fails."""


def receive(sender: Any, **named: Any) -> str:
    named.pop("signal")
    heard.append((sender, named))
    return "received"


def fail(**named: Any) -> None:
    raise Undone


@pytest.fixture(autouse=True)
def nothing_heard() -> Iterator[None]:
    heard.clear()
    yield
    heard.clear()


def signal(*args: Any, receiver: Any = receive, **options: Any) -> OutboxSignal:
    made = OutboxSignal(*(args or ("order.placed",)), **options)
    made.connect(receiver, weak=False)
    return made


def stored() -> OutboxEvent:
    return OutboxEvent.objects.get()


def async_in_sync(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call an async method from sync code; the caller's thread is then the thread-sensitive one."""
    return async_to_sync(method)  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[OutboxSignal], Callable[..., Any]]] = {
    "send": lambda made: made.send,
    "send_robust": lambda made: made.send_robust,
    "asend": lambda made: async_in_sync(made.asend),
    "asend_robust": lambda made: async_in_sync(made.asend_robust),
}
every_way = pytest.mark.parametrize("way", WAYS)


@every_way
def test_it_writes_and_calls_the_receivers_in_the_same_transaction(way: str) -> None:
    made = signal()
    assert isinstance(made, Signal)
    with transaction.atomic():
        answers = WAYS[way](made)(sender=Order, order=5, lines=["tea"])
    assert answers == [(receive, "received")]
    assert heard == [(Order, {"order": 5, "lines": ["tea"]})]
    row = stored()
    assert (row.event_type, json.loads(row.payload)) == (
        "order.placed",
        {"order": 5, "lines": ["tea"]},
    )
    assert (row.key, row.headers, row.aggregate_type) == (None, None, "__GLOBAL__")


@every_way
def test_without_a_transaction_it_is_an_error_before_any_receiver(way: str) -> None:
    with CaptureQueriesContext(connection) as sent, pytest.raises(NoActiveTransaction):
        WAYS[way](signal())(sender=None, order=5)
    assert (heard, len(sent)) == ([], 0)


@pytest.mark.parametrize(
    ("key", "order", "expected"),
    [
        ("order.id", Placed(17), "17"),
        ("order.id", Placed("o-1"), "o-1"),
        ("order.id", {"id": UUID(int=3)}, str(UUID(int=3))),
        (lambda sent: f"order-{sent['order'].id}", Placed(17), "order-17"),
        (lambda sent: "static", Placed(17), "static"),
    ],
    ids=["int", "text", "mapping", "callable", "static"],
)
def test_a_key_by_path_or_callable(key: Any, order: Any, expected: str) -> None:
    made = signal(
        key=key,
        headers={"region": "region"},
        payload={"n": "n"},
        aggregate_type="shop.Order",
        aggregate_id=key,
    )
    with transaction.atomic():
        made.send(sender=None, order=order, region="north", n=1)
    row = stored()
    assert (row.key, row.headers, row.payload) == (expected, '{"region":"north"}', '{"n":1}')
    assert (row.aggregate_type, row.aggregate_id) == ("shop.Order", expected)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (Placed(""), "key is ''"),
        (Placed(None), "key of 'order.placed' is None"),
        (Placed(1.5), "key is 1.5"),
        (5, "int has no 'id'"),
    ],
    ids=["empty", "None", "float", "missing"],
)
def test_a_wrong_key_is_invalid_and_nobody_is_called(order: Any, says: str) -> None:
    with transaction.atomic(), CaptureQueriesContext(connection) as sent:
        with pytest.raises(InvalidEvent, match=says):
            signal(key="order.id", payload={}).send(sender=None, order=order)
        with pytest.raises(InvalidEvent, match="has no 'order'"):
            signal(key="order.id", payload={}).send(sender=None)
    assert (heard, len(sent)) == ([], 0)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (None, {"order": 5, "total": 9}),
        ({"n": "order", "again": lambda sent: sent["total"] + 1}, {"n": 5, "again": 10}),
        (lambda sent: [sent["total"]], [9]),
        ({}, {}),
    ],
    ids=["all", "paths", "callable", "empty"],
)
def test_the_payload_is_what_the_signal_says(payload: Any, expected: Any) -> None:
    with transaction.atomic():
        signal(payload=payload).send(sender=None, order=5, total=9)
    assert json.loads(stored().payload) == expected


def test_what_json_cannot_hold_is_invalid_and_nobody_is_called() -> None:
    with transaction.atomic():
        order = Order.objects.create(sku="tea")
        with pytest.raises(InvalidEvent, match="cannot be written as JSON"):
            signal().send(sender=None, order=order)
        Order.objects.create(sku="goes on")
    assert heard == []


def test_a_failing_receiver_undoes_the_event_with_the_transaction_unless_sent_robustly() -> None:
    with pytest.raises(Undone), transaction.atomic():
        signal(receiver=fail).send(sender=None)
    assert not OutboxEvent.objects.exists()
    with transaction.atomic():
        [(_, answer)] = signal(receiver=fail).send_robust(sender=None)
    assert isinstance(answer, Undone)
    assert stored().event_type == "order.placed"


@every_way
def test_without_the_bridge_only_receivers_are_called(settings: Any, way: str) -> None:
    settings.OUTBOX = {"SIGNAL_BRIDGE": False}
    WAYS[way](signal(key="order.id"))(sender=None, order=5)  # outside a transaction, with no key
    assert heard == [(None, {"order": 5})]
    assert not OutboxEvent.objects.exists()


class Suppressing:
    def before_write(self, events: list[Event]) -> None:
        """Suppress every event."""


def test_a_suppressed_event_does_not_keep_receivers_from_their_call(settings: Any) -> None:
    settings.OUTBOX = {"WRITER_HOOKS": ["tests.test_outbox_signal.Suppressing"]}
    with transaction.atomic():
        signal().send(sender=None)
    assert len(heard) == 1
    assert not OutboxEvent.objects.exists()


def test_a_signal_may_name_its_database() -> None:
    made = signal(using="other")
    with transaction.atomic(using="other"):
        made.send(sender=None)
    assert OutboxEvent.objects.using("other").count() == 1
    with transaction.atomic(), pytest.raises(NoActiveTransaction, match="on 'other'"):
        made.send(sender=None)


@pytest.mark.parametrize(
    "options",
    [{"key": 5}, {"payload": 5}, {"payload": {"a": "b c"}}, {"headers": {"a": 1}}],
    ids=["key", "payload", "path", "header"],
)
def test_a_wrong_declaration_fails_where_it_stands(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidEvent, match=r"expected an attribute path|expected a dict of paths"):
        OutboxSignal("order.placed", **options)
    with pytest.raises(InvalidEvent, match="event_type"):
        OutboxSignal("")


@pytest.mark.django_db(transaction=True)
def test_the_samples_of_the_how_to() -> None:
    with samples.modules("how-to/hook-into-writing.md#A Django signal that also writes") as shop:
        placed = shop["shop.signals"].order_placed
        placed.connect(receive)

        class Saved(Placed):
            def save(self) -> None:
                Order.objects.create(sku="tea")

        in_thread(lambda: shop["shop.views"].Checkout().place(Saved(17), 4800)).result(30)
    row = stored()
    assert (row.key, row.headers) == ("17", '{"region":"north"}')
    assert json.loads(row.payload) == {"order": 17, "total_cents": 4800}
    assert [sender.__name__ for sender, _ in heard] == ["Checkout"]
