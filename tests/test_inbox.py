"""Messages that the inbox refuses, and the samples of its guide."""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

import django_outbox as outbox
from django_outbox import inbox
from django_outbox.models import OutboxEvent, OutboxInbox
from tests import samples
from tests.surroundings import printed
from tests.table import listening, now, write
from tests.testapp.models import Effect, Order

inside = pytest.mark.django_db
outside = pytest.mark.django_db(transaction=True)


@outside
def test_outside_a_transaction_it_is_refused() -> None:
    refused = pytest.raises(outbox.NoActiveTransaction, match="A message was received outside")
    with refused, inbox.once("bank", "m1"):
        pytest.fail("entered")
    assert not OutboxInbox.objects.exists()


BAD: list[tuple[Any, Any]] = [
    *(("bank", bad) for bad in (None, b"m1", 1.5, True, "", "  ", "m1 ", "m\0", "\ud800")),
    ("bank", "x" * 256),
    *((bad, "m1") for bad in (None, 5, "", "bank ", "x" * 129)),
]


@inside
def test_a_bad_source_or_message_id_is_found_before_any_sql(django_assert_num_queries: Any) -> None:
    with transaction.atomic(), django_assert_num_queries(0):
        for source, message in BAD:
            says = "source" if message == "m1" else "message_id"
            with pytest.raises(ValueError, match=says), inbox.once(source, message):
                pytest.fail("entered")
    with pytest.raises(outbox.NoActiveTransaction), inbox.once("bank", "m1"):
        pytest.fail("entered")  # a TestCase's own block is no transaction
    assert receive()


class Broker:
    """Delivers each message at least twice, and until it is acknowledged."""

    def __init__(self) -> None:
        self.waiting = [{"id": f"m{n // 2}", "sku": f"s{n // 2}"} for n in range(6)]
        self.acknowledged = 0

    def messages(self) -> list[dict[str, str]]:
        return self.waiting

    def acknowledge(self, message: dict[str, str]) -> None:
        self.acknowledged += 1


@outside
def test_474_479_the_samples_of_the_how_to() -> None:
    with samples.run("how-to/receive-messages.md", Order=Order) as names:
        broker = Broker()
        names["consume"](broker)
        assert broker.acknowledged == 6
        assert skus() == ["s0", "s1", "s2"]
        for message in broker.waiting:
            names["receive_into_outbox"]({**message, "id": f"other {message['id']}"})
        assert outbox.drain() == 3
        assert skus() == ["s0", "s0", "s1", "s1", "s2", "s2"]
        for message in broker.waiting:
            names["receive_by_key"](message)
        assert outbox.drain() == 3
        assert Counter(skus()) == {"s0": 3, "s1": 3, "s2": 3}
        event = outbox.Event(event_type="order.placed", payload={"sku": "s9"})
        names["count_sale"](event)
        names["count_sale"](event)
        assert skus()[-2:] == ["s2", "s9"]


def skus() -> list[str]:
    return [*Order.objects.order_by("sku").values_list("sku", flat=True)]


def receive(message: Any = "m1", source: str = "bank", **options: Any) -> bool:
    """Receive a message in its own transaction, and leave an effect if it is the first time."""
    with transaction.atomic(**options), inbox.once(source, message, **options) as first:
        if first:
            leave_effect(str(message))
        return first


def leave_effect(name: str) -> None:
    Effect.objects.create(event_id=name[:36], pid=os.getpid(), phase="received")


def effects() -> Counter[str]:
    return Counter(Effect.objects.values_list("event_id", flat=True))


@inside
def test_ints_and_uuids_stand_for_their_text() -> None:
    number = uuid.uuid4()
    assert receive(17)
    assert receive(number)
    assert not receive("17")
    assert not receive(str(number))


@outside
def test_in_a_listener_that_is_run_again() -> None:
    """The first run commits and then fails; the second finds the message received."""
    calls: list[bool] = []

    def reserve(event: outbox.Event) -> None:
        with transaction.atomic(), inbox.once("reserve", event.event_id) as first:
            calls.append(first)
            if first:
                leave_effect(event.event_id)
        if len(calls) == 1:
            raise outbox.RetryAfter(0)

    (event_id,) = write()
    with listening(reserve):
        outbox.drain()
        outbox.drain()
    assert calls == [True, False]
    assert effects() == {event_id: 1}


def events() -> Counter[str]:
    """Return how many events were written for each message."""
    payloads = OutboxEvent.objects.values_list("payload", flat=True)
    return Counter(json.loads(each)["message"] for each in payloads)


def received(count: int, *, days: float) -> list[int]:
    """Insert received messages of that age; return their keys."""
    at = now() - timedelta(days=days)
    first = OutboxInbox.objects.count()
    made = [
        OutboxInbox.objects.create(source="s", message_id=f"{first + n}", received_at=at)
        for n in range(count)
    ]
    return [each.pk for each in made]


@inside
@pytest.mark.parametrize(
    ("retention", "kept"), [(None, 3), (86400, 2), (0, 0)], ids=["None", "a day", "nothing"]
)
def test_retention_inbox(settings: Any, retention: float | None, kept: int) -> None:
    settings.OUTBOX = {"RETENTION_INBOX": retention}
    received(1, days=30)
    received(2, days=0.5)
    assert OutboxInbox.objects.purge() == 3 - kept
    assert OutboxInbox.objects.count() == kept


@outside
def test_the_command_purges_both(settings: Any) -> None:
    received(4, days=8)
    count = "events: 0, idle streams: 0, received messages: 4"
    assert printed("outbox_purge", "--dry-run") == f"would purge {count}"
    assert OutboxInbox.objects.count() == 4
    assert printed("outbox_purge") == f"purged {count}"
    assert not OutboxInbox.objects.exists()
