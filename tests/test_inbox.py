"""Messages that the inbox refuses, and the samples of its guide."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from django.db import transaction

import django_outbox as outbox
from django_outbox import inbox
from django_outbox.models import OutboxInbox
from tests import samples
from tests.conformance.test_inbox import inside, outside, receive
from tests.fleet import REPOSITORY
from tests.testapp.models import Order


@outside
def test_outside_a_transaction_it_is_refused() -> None:
    refused = pytest.raises(outbox.NoActiveTransaction, match="A message was received outside")
    with refused, inbox.once("bank", "m1"):
        pytest.fail("entered")
    assert not OutboxInbox.objects.exists()


BAD = {
    "None": None,
    "bytes": b"m1",
    "float": 1.5,
    "bool": True,
    "empty": "",
    "blank": "  ",
    "trailing": "m1 ",
    "nul": "m\0",
    "surrogate": "\ud800",
    "long": "x" * 256,
}


@inside
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_message_id_is_found_before_any_sql(bad: str, django_assert_num_queries: Any) -> None:
    with transaction.atomic():
        refused = pytest.raises(ValueError, match="message_id")
        with django_assert_num_queries(0), refused, inbox.once("bank", BAD[bad]):
            pytest.fail("entered")
        assert receive()


@inside
@pytest.mark.parametrize("bad", [None, 5, "", "bank ", "x" * 129], ids=repr)
def test_a_bad_source_is_found_before_any_sql(bad: Any, django_assert_num_queries: Any) -> None:
    refused = pytest.raises(outbox.InvalidEvent, match="source")
    with transaction.atomic(), django_assert_num_queries(0), refused, inbox.once(bad, "m1"):
        pytest.fail("entered")


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


def test_the_room_is_found_by_its_name() -> None:
    script = "import django_outbox as outbox\nprint(outbox.inbox.once.__name__)"
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    code = f"import django; django.setup()\n{script}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "once\n", done.stderr
