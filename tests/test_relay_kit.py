"""The test kit's ``capture_relayed``: what relays would send, without a broker."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from django.core import mail
from django.db import transaction
from django.test import TestCase

import django_outbox as outbox
from django_outbox import BrokerUnavailable
from django_outbox.conf import is_test_run
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from django_outbox.testing import (
    capture_relayed,
    drain,
    immediate_delivery,
    pass_time,
    running_worker,
    send_relayed,
    wait_until,
)
from tests.relay_backend import BROKER, InMemory

ORDERS = {
    "BACKEND": "tests.relay_backend.InMemory",
    "EVENTS": ["order.*"],
    "TO": "shop.{tenant_id}",
}
STOCK = {"BACKEND": "tests.relay_backend.InMemory", "EVENTS": ["stock.*"], "FORMAT": "cloudevents"}


@pytest.fixture(autouse=True)
def relays_that_send() -> None:
    """Not here: a test of a project does not let them."""


@pytest.fixture(autouse=True)
def two_relays(settings: Any) -> Iterator[None]:
    BROKER.reset()
    settings.OUTBOX = {"RELAYS": {"orders": ORDERS, "stock": STOCK}, "PROBE_INTERVAL": 0.05}
    yield
    assert BROKER.messages == []
    BROKER.reset()


def write(event_type: str = "order.placed", payload: Any = None, **fields: Any) -> str:
    with transaction.atomic():
        event_id = outbox.write(event_type, payload, **{"tenant_id": "acme", **fields})
    assert event_id is not None
    return event_id


class InATestCase(TestCase):
    def test_messages_are_captured_by_the_name_of_their_relay(self) -> None:
        first, second = write(payload={"n": 1}), write(payload={"n": 2})
        third = write("stock.moved")
        with capture_relayed() as relayed:
            assert drain() == 3
        assert [each.event_id for each in relayed["orders"]] == [first, second]
        assert [json.loads(each.body) for each in relayed["orders"]] == [{"n": 1}, {"n": 2}]
        assert relayed["orders"][0].to == "shop.acme"
        assert [each.event_id for each in relayed["stock"]] == [third]
        assert relayed["stock"][0].headers["ce_type"] == "stock.moved"  # the backend's own prefix
        assert {*relayed} == {"orders", "stock"}
        assert len(relayed) == 2
        assert "order.placed" in repr(relayed)

    def test_headers_that_are_not_sent_are_not_captured(self) -> None:
        with patch.object(InMemory, "commands", re.compile("purge")), capture_relayed() as relayed:
            write(headers={"purge": "all", "trace": "t1"})
            drain()
        assert {"purge", "trace"} & relayed["orders"][0].headers.keys() == {"trace"}

    def test_an_unknown_relay_is_named(self) -> None:
        with capture_relayed() as relayed, pytest.raises(KeyError, match="it has orders"):
            _ = relayed["order"]

    def test_an_outage_costs_no_attempt_and_may_end(self) -> None:
        event_id = write()
        with capture_relayed(fail_with=BrokerUnavailable("down")) as relayed:
            outbox.drain()
            row = OutboxEvent.objects.get(pk=event_id)
            assert (row.status, row.attempts) == (Status.NEW, 0)
            relayed.fail_with = None
            pass_time(60)
            drain()
        assert [each.event_id for each in relayed["orders"]] == [event_id]

    def test_a_refusal_follows_the_retry_policy(self) -> None:
        refused, ended = write(), write("stock.moved")
        with capture_relayed(fail_with=ValueError):
            outbox.drain()
        assert OutboxEvent.objects.get(pk=refused).attempts == 1
        with capture_relayed(fail_with=outbox.Unrecoverable("no such topic")):
            outbox.drain(at=OutboxEvent.objects.get(pk=ended).available_at)
        assert OutboxEvent.objects.get(pk=ended).status == Status.DEAD

    def test_with_immediate_delivery(self) -> None:
        with capture_relayed() as relayed, immediate_delivery():
            write()
        assert len(relayed["orders"]) == 1

    def test_blocks_may_be_nested(self) -> None:
        with capture_relayed() as outer:
            with capture_relayed() as inner:
                write()
                drain()
            write()
            drain()
        assert (len(outer["orders"]), len(inner["orders"])) == (1, 1)


def at_the_commit() -> None:
    with immediate_delivery():
        write()


def by_a_worker() -> None:
    with running_worker():
        wait_until(OutboxEvent.objects.dead().exists)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("backend", [ORDERS["BACKEND"], "nonsense.Kafka"])
@pytest.mark.parametrize("deliver", [drain, at_the_commit, outbox.drain, by_a_worker])
def test_what_no_test_captures_is_not_sent(settings: Any, deliver: Any, backend: str) -> None:
    settings.OUTBOX = {"RELAYS": {"orders": {**ORDERS, "BACKEND": backend}}}
    expected = r"relay 'orders' .* capture_relayed\(\)"
    write()
    if deliver in (drain, at_the_commit):
        with pytest.raises(AssertionError, match=expected):
            deliver()
    else:
        deliver()
    for row in OutboxEvent.objects.all():
        assert (row.status, row.attempts) == (Status.DEAD, 0)
        assert re.search(expected, row.last_error or "")
    assert BROKER.opened == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("allowed", ["no_test_run", "sending"])
def test_what_is_sent_to_a_broker(request: pytest.FixtureRequest, allowed: str) -> None:
    request.getfixturevalue(allowed)
    write()
    drain()
    assert len(BROKER.messages) == 1
    BROKER.messages.clear()


def test_a_site_that_keeps_its_mail_in_memory_is_no_test_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert is_test_run()
    monkeypatch.delitem(sys.modules, "django.test.utils")
    assert hasattr(mail, "outbox") and not is_test_run()


@pytest.fixture
def sending() -> Iterator[None]:
    with send_relayed():
        yield
    assert BROKER.opened == BROKER.closed


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("sending")
def test_an_open_connection_is_not_used_within_the_block() -> None:
    write()
    drain()
    assert (BROKER.opened, BROKER.closed) == (1, 0)
    with capture_relayed() as relayed:
        assert BROKER.closed == 1
        write()
        drain()
    assert len(relayed["orders"]) == 1
    BROKER.messages.clear()
    write()
    drain()
    assert [BROKER.opened, len(BROKER.messages)] == [2, 1]
    BROKER.messages.clear()


@pytest.mark.django_db
def test_the_client_need_not_be_installed(
    settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_client.py").write_text("import a_client_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings.OUTBOX = {"RELAYS": {"orders": {**ORDERS, "BACKEND": "needs_client.Kafka"}}}
    with capture_relayed() as relayed:
        write()
        drain()
    assert relayed["orders"][0].to == "shop.acme"


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["nonsense.Kafka", "tests.relay_backend.Nonsense"])
def test_a_path_that_is_wrong_is_still_wrong(settings: Any, path: str) -> None:
    settings.OUTBOX = {"RELAYS": {"orders": {**ORDERS, "BACKEND": path}}}
    event_id = write()
    with capture_relayed() as relayed:
        outbox.drain()
    assert relayed["orders"] == []
    assert OutboxEvent.objects.get(pk=event_id).status == Status.NEW
