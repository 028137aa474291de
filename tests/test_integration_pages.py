"""Pages about other packages, changing schemas and archives: the samples do what they say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import sentry_sdk
from django.db import connection, connections, transaction
from django.test import Client
from django.urls import path
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport

import django_outbox as outbox
from django_outbox import signals
from django_outbox.models import OutboxEvent
from tests import samples
from tests.table import insert, listening, row, statuses, write
from tests.testapp.models import Order

INTEGRATIONS = "how-to/integrations.md"
EVOLVE = "how-to/type-events.md#Evolve event schemas"

pytestmark = pytest.mark.django_db(transaction=True)

Shop = dict[str, ModuleType]


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """Lend the modules of the page about integrations, with a model of orders."""
    models = ModuleType("shop.models")
    vars(models)["Order"] = Order
    monkeypatch.setitem(sys.modules, "shop.models", models)
    with samples.modules(INTEGRATIONS) as found:
        yield found


# --- Django REST framework -----------------------------------------------------------------------


@pytest.fixture
def post(shop: Shop, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Lend a function that posts an order to the page's view, with ATOMIC_REQUESTS."""
    urls = ModuleType("shop.urls")
    vars(urls)["urlpatterns"] = [path("orders/", vars(shop["shop.api"])["OrderView"].as_view())]
    monkeypatch.setitem(sys.modules, "shop.urls", urls)
    for given in (connections.settings["default"], connection.settings_dict):
        monkeypatch.setitem(given, "ATOMIC_REQUESTS", True)
    settings.ROOT_URLCONF = "shop.urls"

    def post(**data: str) -> int:
        client = Client(raise_request_exception=False)
        status: int = client.post("/orders/", data, content_type="application/json").status_code
        return status

    return post


def test_a_view_of_drf_commits_the_order_with_its_event(post: Callable[..., int]) -> None:
    assert post(sku="teapot") == 201
    assert (Order.objects.count(), OutboxEvent.objects.count()) == (1, 1)


def test_an_exception_of_drf_rolls_both_back(post: Callable[..., int]) -> None:
    assert post(sku="unicorn") == 400  # an APIException
    assert post() == 500  # a KeyError
    assert (Order.objects.count(), OutboxEvent.objects.count()) == (0, 0)


# --- Sentry --------------------------------------------------------------------------------------


@pytest.fixture
def reports(shop: Shop) -> Iterator[list[dict[str, Any]]]:
    """Lend what Sentry would get, with the page's receiver and filter."""
    found: list[dict[str, Any]] = []

    class Collecting(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            found.extend(each for item in envelope.items if (each := item.get_event()))

    sentry = vars(shop["shop.sentry"])
    sentry_sdk.init(
        dsn="http://key@127.0.0.1/1",
        transport=Collecting,
        default_integrations=False,
        integrations=[LoggingIntegration()],
        before_send=sentry["drop_log_line"],
        auto_enabling_integrations=False,
        enable_backpressure_handling=False,
    )
    signals.event_dead.connect(sentry["report_dead"])
    try:
        yield found
    finally:
        signals.event_dead.disconnect(sentry["report_dead"])
        sentry_sdk.get_client().close()
        sentry_sdk.get_global_scope().set_client(None)


def fail(event: outbox.Event) -> None:
    raise LookupError("no such customer: Ada")


async def fail_async(event: outbox.Event) -> None:
    fail(event)


@pytest.mark.parametrize("listener", [fail, fail_async], ids=["plain", "async"])
def test_sentry_gets_the_exception_with_tags_and_the_dead_event(
    shop: Shop, reports: list[dict[str, Any]], settings: Any, listener: Callable[..., Any]
) -> None:
    once = {"policy": "fixed", "max_attempts": 1}
    settings.OUTBOX = {"INTERCEPTORS": ["shop.sentry.tag_calls"], "RETRY": once}
    with listening(listener, "customer.moved"):
        [event_id] = write(1, "customer.moved")
        outbox.drain()
    raised, dead = reports
    assert (raised["level"], dead["level"]) == ("warning", "error")
    assert raised["exception"]["values"][-1]["stacktrace"]["frames"][-1]["function"] == "fail"
    assert raised["tags"] == {
        "outbox.event_type": "customer.moved",
        "outbox.event_id": event_id,
        "outbox.listener": "customer.moved",
        "outbox.attempt": 1,
    }
    assert dead["message"] == "customer.moved is dead: LookupError"
    assert dead["fingerprint"] == ["outbox-dead", "customer.moved", "LookupError"]
    assert "Ada" not in json.dumps(dead, default=str)


# --- schemas of events ---------------------------------------------------------------------------


def test_the_listeners_read_old_and_new_payloads(settings: Any) -> None:
    with samples.modules(EVOLVE) as shop:
        settings.OUTBOX = shop["settings"].OUTBOX
        given: dict[str, list[Any]] = {
            "order.placed": [{"order": 1}, {"order": 2, "currency": "GBP"}],
            "refund.made": [{"cents": 5}],
            "payment.refunded": [{"cents": 6}],
            "customer.moved": [{"customer": 1, "address": "Elm 1, Ely"}],
            "customer.moved.v2": [{"customer": 2, "street": "Oak 2", "city": "Ayr"}],
            "customer.merged": [{"customer": 1, "target": 2}],
        }
        for event_type, payloads in given.items():
            for payload in payloads:
                write(1, event_type, payload=payload)
        with transaction.atomic():
            merged = shop["shop.customers"].CustomerMerged(3, 4, "a duplicate")
            assert row(str(outbox.write(merged))).key == "3"
        outbox.drain()
        assert statuses() == {"DONE": 8}
        assert shop["shop.invoices"].invoiced == [(1, "EUR"), (2, "GBP")]
        assert shop["shop.refunds"].refunded == [("refund.made", 5), ("payment.refunded", 6)]
        assert shop["shop.addresses"].moved == [(1, "Elm 1", "Ely"), (2, "Oak 2", "Ayr")]
        merged = shop["shop.customers"].merged
        assert sorted(merged) == [(1, 2, "unknown"), (3, 4, "a duplicate")]


def test_what_an_old_worker_does_with_new_events() -> None:
    """The table of the page: no listener, a payload that does not fit, a key that is missing."""
    with samples.modules(EVOLVE) as shop, listening(print, shop["shop.events"].ParcelSent):
        [unknown] = write(1, "parcel.lost")
        [unfit] = insert(event_type="parcel.sent", payload='{"number": 1}')  # of a new writer
        [missing] = write(1, "order.placed", payload={"id": 1})
        outbox.drain(limit=3)
        assert row(unknown).status in (OutboxEvent.Status.NEW, OutboxEvent.Status.RETRY)
        assert row(unfit).status == OutboxEvent.Status.DEAD
        assert row(missing).status == OutboxEvent.Status.RETRY
        left = shop["shop.leftovers"].left
        assert [left(kind) for kind in ("parcel.sent", "parcel.lost", "parcel.found")] == [1, 1, 0]
