"""Samples do what their page says; test_samples runs all others, too."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from django.db import connection, transaction
from django.db.migrations.loader import MigrationLoader
from django.dispatch import Signal
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


# --- orders and events ---------------------------------------------------------------------------


def orders(n: int) -> Order:
    return Order.objects.create(sku=f"s{n}")


def place(event_type: str = "order.placed", **payload: Any) -> OutboxEvent:
    with transaction.atomic():
        event_id = outbox.write(event_type, {"sku": "teapot", "email": "a@example.com", **payload})
    outbox.drain()
    return OutboxEvent.objects.get(pk=event_id)


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


# --- another app's signals, and migrations -------------------------------------------------------


FOREIGN = "how-to/write-events.md#Write from another app's signals and methods"


def test_an_override_lets_a_receiver_write_with_the_order_of_another_app() -> None:
    """The app commits, and then sends its signal, as django-oscar does."""
    sent = Signal()

    class CoreOrderCreator:
        def place_order(self, sku: str) -> Order:
            with transaction.atomic():
                order = Order.objects.create(sku=sku)
            sent.send(sender=self, order=order)
            return order

    names = {"oscar.apps.order.utils": {"OrderCreator": CoreOrderCreator}}
    names |= {"oscar.apps.order.signals": {"order_placed": sent}}
    names |= {"wagtail.management.commands": {"publish_scheduled": SimpleNamespace(Command=object)}}
    made = {name: ModuleType(name) for name in names}
    for name, module in made.items():
        vars(module).update(names[name])
    with patch.dict(sys.modules, made), samples.modules(FOREIGN) as shop:
        with pytest.raises(outbox.NoActiveTransaction):
            CoreOrderCreator().place_order("teapot")
        order = shop["shop.order.utils"].OrderCreator().place_order("kettle")
        assert OutboxEvent.objects.get().aggregate_id == str(order.pk)
        sent.connect(lambda **_: out_of_stock("cup"), weak=False)
        with pytest.raises(OutOfStock):
            shop["shop.order.utils"].OrderCreator().place_order("cup")
    assert not Order.objects.filter(sku="cup").exists()


def test_a_migration_writes_after_that_of_the_outbox() -> None:
    order = orders(7)
    registry = SimpleNamespace(get_model=lambda *_: Order)
    with samples.modules("how-to/write-events.md#Write in migrations") as shop:
        first, second = (vars(module)["Migration"] for module in shop.values())
        with transaction.atomic():
            first.operations[0].code(registry, SimpleNamespace(connection=connection))
    assert json.loads(OutboxEvent.objects.get().payload) == {"order": order.pk}
    ours = ("django_outbox", "0001_initial")
    assert ours in first.dependencies
    assert ours in second.dependencies
    assert ours in MigrationLoader(connection).disk_migrations
