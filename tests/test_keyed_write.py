"""Writes with a key, on the database of this run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

import django_outbox as outbox
from django_outbox import Event, InvalidEvent, signals, write, write_many
from django_outbox.events import LENGTHS, aggregate_key
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.writing.on_commit import hot_queues
from tests import samples
from tests.cases import cases
from tests.surroundings import heard
from tests.table import now, row
from tests.test_write import Queue
from tests.testapp.models import Order
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
HOUR = 3_600_000_000  # microseconds


def stream(key: str = "k") -> OutboxStream:
    return OutboxStream.objects.get(pk=f":{key}")


def put_stream(key: str = "k", **columns: Any) -> None:
    """Create a stream as a worker would have left it."""
    OutboxStream.objects.create(**{"stream": f":{key}", "key": key, "seq": 100, **columns})


def keyed(*keys: str | None, **fields: Any) -> list[Event]:
    return [Event(event_type="x", key=key, payload=n, **fields) for n, key in enumerate(keys)]


def seqs(key: str = "k") -> list[int | None]:
    """Return the ``seq`` of a stream's events, in the order in which they were written."""
    return [*OutboxEvent.objects.filter(key=key).order_by("pk").values_list("seq", flat=True)]


def micros() -> int:
    """Return the time of the database's clock, in microseconds."""
    return int(now().timestamp() * 1_000_000)


def statements(work: Callable[[], object]) -> list[str]:
    with transaction.atomic(), CaptureQueriesContext(connection) as sent:
        work()
    return [each["sql"] for each in sent.captured_queries]


# --- one event -----------------------------------------------------------------------------------


BAD: dict[str, Callable[[], object]] = {
    "empty": lambda: write("x", key=""),
    "blank": lambda: write("x", key="  "),
    "trailing space": lambda: write("x", key="k "),
    "too long": lambda: write("x", key="k" * (LENGTHS["key"] + 1)),
    "NUL": lambda: write("x", key="a\0b"),
    "bool": lambda: write("x", key=True),
    "list": lambda: write("x", key=["k"]),
    "delay": lambda: write("x", key="k", deliver_after=1),
    "due time": lambda: write("x", key="k", available_at=NOON),
    "delay from a time": lambda: write("x", key="k", occurred_at=NOON, deliver_after=1),
    "many": lambda: write_many([Event(event_type="x", key="k"), Event(event_type="x", key=1.5)]),  # type: ignore[arg-type]
}


@cases("name", BAD)
def test_an_unfit_key_is_found_before_any_sql_and_poisons_nothing(name: str) -> None:
    with transaction.atomic():
        with CaptureQueriesContext(connection) as sent, pytest.raises(InvalidEvent, match="key"):
            BAD[name]()
        assert len(sent) == 0
        Order.objects.create(sku="goes on")
    assert Order.objects.exists()
    assert not OutboxEvent.objects.exists()


# --- duplicates ----------------------------------------------------------------------------------

SAME = pytest.mark.parametrize("identity", ["event_id", "unique_key"])


# --- after the commit ----------------------------------------------------------------------------


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setitem(hot_queues.by_alias, "default", made)
    return made


def test_an_event_with_a_key_is_not_offered_but_the_claimer_polls(queue: Queue) -> None:
    """Keyed events never go to the hot queue, but they wake the worker of this process."""
    with transaction.atomic():
        write("a", key="k")
        write_many(keyed("k", None))
        assert queue.polls == 0
    assert queue.types == ["x"]
    assert queue.polls == 1


def test_an_event_with_a_key_rings_where_no_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[str] = []
    monkeypatch.setattr("django_outbox.doorbell.ring", lambda each: rung.append(each.alias))
    with transaction.atomic():
        write("a", key="k")
        assert rung == []
    assert rung == ["default"]


# --- MODE "ordered" ------------------------------------------------------------------------------

ORDERED = {"MODE": "ordered"}
FILE = {"MODE": "ordered", "ORDERING": "global", "UNROUTABLE_GRACE": 0}


def keys() -> dict[str, str | None]:
    """Return the key of each event, by its type."""
    return dict(OutboxEvent.objects.values_list("event_type", "key"))


@override_settings(OUTBOX=ORDERED)
def test_358_every_event_gets_the_key_of_its_aggregate() -> None:
    """The mode needs no further setting."""
    order = Order.objects.create(sku="tea")
    with transaction.atomic():
        write("model", aggregate=order)
        write_many(
            [
                Event(event_type="id", aggregate_type="Order", aggregate_id="7"),
                Event(event_type="no id", aggregate_type="Order"),
                Event(event_type="nothing"),
                Event(event_type="own", aggregate_type="Order", aggregate_id="7", key="mine"),
            ]
        )
    assert keys() == {
        "model": f"testapp.Order:{order.pk}",
        "id": "Order:7",
        "no id": "Order",
        "nothing": outbox.GLOBAL,
        "own": "mine",
    }
    lanes = {f":{key}" for key in keys().values()}
    assert {*OutboxStream.objects.values_list("pk", flat=True)} == lanes
    assert not OutboxEvent.objects.filter(seq=None).exists()


@override_settings(OUTBOX=FILE)
def test_358_or_all_events_share_one_stream() -> None:
    """With ORDERING "global"; a key that is given still counts."""
    with transaction.atomic():
        write("a", aggregate_type="Order", aggregate_id="7")
        write_many([Event(event_type="b"), Event(event_type="c", aggregate_type="Customer")])
        write("own", key="mine")
    assert keys() == {**dict.fromkeys("abc", outbox.GLOBAL), "own": "mine"}
    assert len(seqs(outbox.GLOBAL)) == 3


@pytest.mark.parametrize("ordering", [ORDERED, FILE], ids=["aggregate", "global"])
def test_33_a_delayed_event_has_no_key(ordering: dict[str, Any]) -> None:
    """It is delivered at its own time, outside the streams."""
    with override_settings(OUTBOX=ordering), transaction.atomic():
        write("later", deliver_after=60, aggregate_type="Order", aggregate_id="7")
        write("then", available_at=NOON, aggregate_type="Order", aggregate_id="7")
    assert keys() == {"later": None, "then": None}
    assert not OutboxEvent.objects.filter(available_at=None).exists()
    assert not OutboxStream.objects.exists()


@override_settings(OUTBOX=ORDERED)
def test_an_ordered_event_is_announced_with_its_key_and_not_offered(queue: Queue) -> None:
    with heard(signals.event_written) as told, transaction.atomic():
        event = Event(event_type="x", payload={"n": 1.0}, aggregate_type="Order")
        assert write(event) == event.event_id
    assert [each["event"].key for each in told] == ["Order"]
    assert (queue.types, queue.polls) == ([], 1)
    assert row(event.event_id).payload == '{"n":1.0}'
    assert event.key is None  # the caller's event is unchanged


def test_35_no_two_aggregates_share_a_stream() -> None:
    """Not even if their names contain colons or backslashes."""
    alike: list[tuple[str, str | None]] = [
        ("a:b", None),
        ("a", "b"),
        ("a:b", "c"),
        ("a", "b:c"),
        ("a:b:c", None),
        ("a\\", "b"),
        ("a\\:b", None),
        ("a\\", ":b"),
        ("a", "\\:b"),
        ("a\\\\", "b"),
        ("a:", "b"),
        ("a", ":b"),
    ]
    assert len({aggregate_key(*each) for each in alike}) == len(alike)


# --- the how-to ----------------------------------------------------------------------------------


def test_the_samples_of_the_how_to_deliver_in_order() -> None:
    order = Order.objects.create(sku="tea")
    with samples.modules("how-to/deliver-in-order.md") as shop:
        shop["shop.views"].pay(order)
        shop["shop.views"].ship(order)
        shop["shop.transfers"].transfer("b", "a", 100)
        with outbox.Worker(workers=2):
            wait_until(lambda: len(shop["shop.listeners"].seen) == 2)
            wait_until(lambda: OutboxEvent.objects.filter(status=1).count() >= 2)
        seen = shop["shop.listeners"].seen
    assert [each for each, _ in seen] == ["order.paid", "order.shipped"]
    assert seen[1][1] == seen[0][1] + 1
    assert {*OutboxStream.objects.values_list("key", flat=True)} == {
        f"order:{order.pk}",
        "account:a",
        "account:b",
    }
    with samples.run("how-to/deliver-in-order.md", only="blocked()"):
        pass
