"""Samples do what their page says; test_samples runs all others, too."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from django.db import transaction
from django.db.models import F
from django.test import TestCase

import django_outbox as outbox
import tests.testapp
from django_outbox.models import OutboxEvent
from tests import samples
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db


class Recorder:
    """Stands in for any remote service: records each call, and answers or fails as configured."""

    def __init__(self, answer: Any = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answer = answer

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        return call


class OutOfStock(Exception):
    pass


def out_of_stock(sku: str) -> None:
    raise OutOfStock(sku)


def nothing(*args: Any) -> None:
    pass


@pytest.mark.django_db(transaction=True)
def test_the_sample_of_the_readme_may_be_pasted_twice(capsys: pytest.CaptureFixture[str]) -> None:
    readme = "../README.md"
    with samples.run(readme, only="user.joined"), samples.run(readme, only="user.joined"):
        assert capsys.readouterr().out.count("welcome, ada") == 2


# --- why an outbox -------------------------------------------------------------------------------


WHY = "explanation/why-an-outbox.md"
SHOP = {"transaction": transaction, "Order": Order, "outbox": outbox}


def test_508_a_call_after_the_commit_makes_no_ghost_and_loses() -> None:
    warehouse = Recorder()
    with samples.run(WHY, only="on_commit(lambda: warehouse", **SHOP) as names:
        names |= {"warehouse": warehouse, "take_from_stock": out_of_stock}
        with (
            pytest.raises(OutOfStock),
            TestCase.captureOnCommitCallbacks(execute=True) as callbacks,
        ):
            names["place_order"]("teapot")
        assert (warehouse.calls, callbacks) == ([], [])
        names["take_from_stock"] = nothing
        with TestCase.captureOnCommitCallbacks(execute=False):  # killed after the COMMIT
            names["place_order"]("teapot")
    assert Order.objects.count() == 1
    assert warehouse.calls == []


def test_508_the_outbox_has_neither_ghost_nor_loss() -> None:
    warehouse = Recorder()
    given = {**SHOP, "warehouse": warehouse, "take_from_stock": out_of_stock}
    with samples.run(WHY, only="outbox.write(", **given) as names:
        with pytest.raises(OutOfStock):
            names["place_order"]("teapot")
        assert outbox.drain() == 0
        names["take_from_stock"] = nothing
        names["place_order"]("teapot")
        assert outbox.drain() == 1
    event = OutboxEvent.objects.get()
    assert warehouse.calls == [("reserve", ("teapot",), {"idempotency_key": event.pk})]


# --- what is guaranteed --------------------------------------------------------------------------


class Payments:
    """The page's model, kept in a dict."""

    def __init__(self) -> None:
        self.objects, self.rows = self, {}

    def get_or_create(self, *, event_id: str, defaults: dict[str, Any]) -> None:
        self.rows.setdefault(event_id, defaults)


def test_475_the_listener_of_the_guarantees_may_run_twice() -> None:
    cards, payments = Recorder("receipt 1"), Payments()
    given = {"outbox": outbox, "cards": cards, "Payment": payments}
    with samples.run("explanation/guarantees.md", **given) as names:
        event = outbox.Event(
            event_type="payment.requested", payload={"order": 7, "amount_cents": 4800}, event_id="e"
        )
        for _ in range(2):
            names["take_payment"](event)
    assert [kwargs for _, _, kwargs in cards.calls] == [{"idempotency_key": "e"}] * 2
    assert payments.rows == {"e": {"order_id": 7, "receipt": "receipt 1"}}


# --- write events --------------------------------------------------------------------------------


def orders(n: int) -> Order:
    return Order.objects.create(sku=f"s{n}")


# --- listen --------------------------------------------------------------------------------------

LISTEN = "how-to/listen.md#..Let several listeners share an event"


class Service:
    """An invoice service; ``status`` is what it will answer."""

    def __init__(self) -> None:
        self.status, self.retry_after, self.text = 200, 1800, "no such customer"
        self.keys: list[str] = []

    def create(self, order: Any, *, idempotency_key: str) -> Service:
        self.keys.append(idempotency_key)
        return self


class Packed:
    """``Order`` as the page's listener queries it."""

    found: Any = None

    class objects:  # noqa: N801 - a manager
        @staticmethod
        def filter(pk: int) -> Any:
            return SimpleNamespace(first=lambda: Packed.found)


def test_306_305_the_answers_of_listen() -> None:
    """Refused, not yet, busy, impossible and done each lead to their own outcome."""
    service = Service()
    event = outbox.Event(event_type="invoice.requested", payload={"order": 1}, event_id="e")
    given = {"outbox": outbox, "Order": Packed, "invoices": service}
    with samples.run(LISTEN, only="def write_invoice(", **given) as names:
        write_invoice = names["write_invoice"]
        assert isinstance(write_invoice(event), outbox.Dead)
        Packed.found = SimpleNamespace(is_packed=False)
        assert write_invoice(event).delay == 60
        Packed.found = SimpleNamespace(is_packed=True)
        assert write_invoice(event) is None
        service.status = 429
        with pytest.raises(outbox.RetryAfter) as busy:
            write_invoice(event)
        assert busy.value.delay == 1800
        service.status = 400
        with pytest.raises(outbox.Unrecoverable, match="no such customer"):
            write_invoice(event)
    assert service.keys == ["e", "e", "e"]


class Sales:
    """A model of counts by sku, backed by orders of the test app."""

    class objects:  # noqa: N801 - a manager
        @staticmethod
        def filter(sku: str) -> Any:
            rows = Order.objects.filter(sku=sku)
            return SimpleNamespace(update=lambda count: rows.update(quantity=F("quantity") + 1))


def place(event_type: str = "order.placed", **payload: Any) -> OutboxEvent:
    with transaction.atomic():
        event_id = outbox.write(event_type, {"sku": "teapot", "email": "a@example.com", **payload})
    outbox.drain()
    return OutboxEvent.objects.get(pk=event_id)


def test_298_every_kind_of_listener_of_the_page_is_called() -> None:
    """A function, an atomic one, an async one, a method, and one with two event names all run."""
    warehouse, mail, carrier = Recorder(), AsyncRecorder(), Recorder()
    with samples.run(LISTEN, only="def reserve_stock(event):\n    warehouse", warehouse=warehouse):
        done = place()
        assert warehouse.calls == [("reserve", ("teapot",), {"idempotency_key": done.pk})]
    bank = Recorder()
    with samples.run(LISTEN, only="def collect(", outbox=outbox, bank=bank):
        done = place("invoice.due", amount_cents=500)
        assert bank.calls == [("collect", (500,), {"idempotency_key": done.pk})]
    with samples.run(LISTEN, only="def book(", Carrier=lambda: carrier):
        assert place("parcel.booked").status == OutboxEvent.Status.DONE
        assert place("parcel.cancelled").status == OutboxEvent.Status.DONE
    assert [name for name, *_ in carrier.calls] == ["book", "cancel"]
    order = orders(0)
    with samples.run(LISTEN, only="def count_sale(", outbox=outbox, Sales=Sales, F=F):
        place(sku=order.sku)
        order.refresh_from_db()
        assert order.quantity == 2
    with samples.run(LISTEN, only="def tell_the_customer(", outbox=outbox, mail=mail):
        done = place()
        assert mail.calls == [("send", ("a@example.com",), {"idempotency_key": done.pk})]
    given = {"outbox": outbox, "mail": mail, "Order": Order}
    with samples.run(LISTEN, only="def send_invoice(", **given):
        done = place(order=order.pk)
        addressed = ("a@example.com", order.sku)
        assert mail.calls[1:] == [("send", addressed, {"idempotency_key": done.pk})]
    with samples.run(LISTEN, only="def book_parcel(", outbox=outbox):
        assert place("parcel.requested").status == OutboxEvent.Status.DONE
    with samples.run(LISTEN, only='("order.submitted")', outbox=outbox):
        for name in ("order.placed", "order.submitted"):
            assert place(name).status == OutboxEvent.Status.DONE


class AsyncRecorder(Recorder):
    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, args, kwargs))

        return call


# --- alerts ------------------------------------------------------------------------------


def kill(event_type: str = "parcel.requested", **fields: Any) -> OutboxEvent:
    """Make a dead event."""

    def refuse(event: outbox.Event) -> outbox.Dead:
        return outbox.Dead("the courier does not carry it")

    outbox.listener(event_type)(refuse)
    try:
        return place(event_type, **fields)
    finally:
        samples.registry.remove(refuse)


@pytest.mark.django_db(transaction=True)
def test_469_the_alert_of_the_signals_page_links_to_the_event(settings: Any) -> None:
    """The alert links to the admin page where the event can be replayed."""
    from django_outbox.signals import event_dead

    settings.SITE_URL, settings.CHAT_HOOK = "https://shop.example", "https://chat.example/hook"
    said: list[Any] = []
    with (
        samples.run("reference/signals.md", __name__="tests.testapp") as names,
        patch("urllib.request.urlopen", lambda request, timeout: said.append((request, timeout))),
    ):
        config = names["ShopConfig"]("shop", tests.testapp)
        config.ready()
        try:
            row = kill()
        finally:
            event_dead.disconnect(names["tell_us"])
            names["chat"].shutdown()  # waits for the message
    [(request, timeout)] = said
    text = json.loads(request.data)["text"]
    page = "https://shop.example/admin/django_outbox/outboxevent/"
    assert f"{page}?state=dead&q={row.event_id}" in text
    assert "the courier does not carry it" in text
    assert timeout == 5


# --- tenants, personal data ----------------------------------------------------------------------


def test_12_the_samples_of_protect_personal_data(settings: Any) -> None:
    """Archiving, erasing and encrypted payloads work as the page says."""
    fernet = pytest.importorskip("cryptography.fernet")
    settings.OUTBOX_KEYS = [fernet.Fernet.generate_key()]
    archived: list[dict[str, Any]] = []
    model = SimpleNamespace(objects=SimpleNamespace(create=lambda **row: archived.append(row)))
    mail = Recorder()
    given = {"ArchivedEvent": model, "Customer": Customers, "mail": mail}
    with samples.modules("explanation/security.md#Protect personal data", **given) as shop:
        settings.OUTBOX = vars(shop["settings"])["OUTBOX"]
        shop["shop.greetings"].sign_up(SimpleNamespace(pk=7))
        first, second = OutboxEvent.objects.order_by("pk")  # the greeting's and the archive's
        assert "customer" not in first.payload + second.payload
        assert outbox.drain() == 2
        assert mail.calls == [("send", ("7@example.com",), {"idempotency_key": first.event_id})]
        assert [each["payload"] for each in archived] == [{"customer": 7}]
        erase = shop["shop.erasure"].erase
        for n in (7, 8):
            with transaction.atomic():
                outbox.write("x", aggregate_type="shop.Customer", aggregate_id=str(n))
        assert erase(7) == 1
        assert outbox.drain() == 2
        assert erase(7) == 0
        assert [*OutboxEvent.objects.filter(event_type="x").values_list("aggregate_id")] == [("8",)]


class Customers:
    """A model with an address for every id."""

    class objects:  # noqa: N801 - a manager
        @staticmethod
        def filter(pk: int) -> Any:
            return SimpleNamespace(first=lambda: SimpleNamespace(email=f"{pk}@example.com"))
