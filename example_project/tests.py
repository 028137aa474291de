"""Tests of events in ordinary test cases: ``drain()`` delivers them, without a worker."""

# Django's unittest, so that the example needs no pytest.
# ruff: noqa: PT009, PT027

from __future__ import annotations

import logging

from django.core.management import call_command
from django.test import Client, TestCase, override_settings
from django.urls import reverse

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from example_project.partners.models import Call, RefusedGoods
from example_project.shop.listeners import take_payment
from example_project.shop.models import Order, Payment, Product
from example_project.shop.ordering import OutOfStock, place
from example_project.warehouse.listeners import book_parcel, write_pick_list
from example_project.warehouse.models import Parcel, PickList

NONE = {"NEW": 0, "DONE": 0, "RETRY": 0, "DEAD": 0}
TRIES = 4
AT_ONCE = {"RETRY": {"policy": "fixed", "delay": 0, "max_attempts": TRIES}}


def setUpModule() -> None:
    logging.disable(logging.ERROR)  # the failures and refusals here are meant


def tearDownModule() -> None:
    logging.disable(logging.NOTSET)


def deliver() -> None:
    """Run every event until it is delivered or dead; one ``drain`` runs each of them once."""
    while outbox.drain():
        pass


@override_settings(OUTBOX=AT_ONCE)
class ShopTestCase(TestCase):
    databases = "__all__"  # the shop may have one of its own

    @classmethod
    def setUpTestData(cls) -> None:
        call_command("seed", verbosity=0)
        cls.teapot = Product.objects.get(sku="teapot")
        cls.burner = Product.objects.get(sku="spirit-burner")

    def event(self, event_type: str) -> OutboxEvent:
        return OutboxEvent.objects.get(event_type=event_type)


class ScenarioTests(ShopTestCase):
    def test_success(self) -> None:
        order = place("Visitor", {self.teapot: 2})
        deliver()
        self.assertEqual(OutboxEvent.objects.counts_by_status(), {**NONE, "DONE": 3})
        self.assertEqual(PickList.objects.get().order_number, order.pk)
        self.assertEqual(Parcel.objects.get().order_number, order.pk)
        self.assertEqual(Payment.objects.get().order, order)
        refusals = Call.objects.filter(partner="cards").values_list("served", flat=True)
        self.assertEqual([*refusals], [False, False, True])

    def test_remote_failure_to_dead(self) -> None:
        place("Visitor", {self.teapot: 1, self.burner: 1})
        deliver()
        event = self.event("parcel.requested")
        self.assertEqual(event.status, OutboxEvent.Status.DEAD)
        self.assertEqual(event.attempts, TRIES)
        self.assertIn("does not carry spirit-burner", event.last_error)
        self.assertEqual(Call.objects.filter(partner="courier").count(), TRIES)
        self.assertFalse(Parcel.objects.exists())
        self.assertEqual(OutboxEvent.objects.done().count(), 2)

    def test_replay_after_the_repair(self) -> None:
        place("Visitor", {self.burner: 1})
        deliver()
        RefusedGoods.objects.all().delete()
        self.assertEqual(OutboxEvent.objects.dead().replay(), 1)
        deliver()
        event = self.event("parcel.requested")
        self.assertEqual(event.status, OutboxEvent.Status.DONE)
        self.assertEqual(Parcel.objects.get().event_id, event.pk)

    def test_rollback_without_a_call(self) -> None:
        with self.assertRaises(OutOfStock):
            place("Visitor", {self.teapot: self.teapot.stock + 1})
        self.assertEqual(outbox.drain(), 0)
        for model in (OutboxEvent, Order, PickList, Payment, Parcel, Call):
            self.assertFalse(model.objects.exists(), model)
        self.assertEqual(Product.objects.get(sku="teapot").stock, self.teapot.stock)

    def test_a_second_delivery_changes_nothing(self) -> None:
        order = place("Visitor", {self.teapot: 1})
        deliver()
        for listen, event_type in (
            (write_pick_list, "order.placed"),
            (take_payment, "payment.requested"),
            (book_parcel, "parcel.requested"),
        ):
            row = self.event(event_type)
            listen(outbox.Event.from_json(event_type, row.payload, event_id=row.pk))
        self.assertEqual(Payment.objects.filter(order=order).count(), 1)
        self.assertEqual((PickList.objects.count(), Parcel.objects.count()), (1, 1))
        self.assertEqual(Call.objects.filter(served=True).count(), 2)


class PageTests(ShopTestCase):
    def order(self, **values: object) -> object:
        return self.client.post(reverse("shop"), {"customer": "Visitor", **values})

    def test_an_order_leads_to_its_place_in_the_list(self) -> None:
        page = self.order(teapot=1)
        order = Order.objects.get()
        self.assertRedirects(page, f"{reverse('orders')}#order-{order.pk}")
        self.assertEqual(OutboxEvent.objects.filter(aggregate_id=str(order.pk)).count(), 3)

    def test_the_list_follows_the_events(self) -> None:
        self.order(teapot=1, **{"spirit-burner": 1})
        waiting = self.client.get(reverse("orders"))
        self.assertContains(waiting, "data-live")
        self.assertContains(waiting, "waiting</span>", count=3)
        deliver()
        settled = self.client.get(reverse("orders"))
        self.assertNotContains(settled, "data-live")
        self.assertContains(settled, "delivered</span>", count=2)
        self.assertContains(settled, "dead</span>", count=1)
        self.assertContains(settled, Payment.objects.get().receipt, count=2)

    def test_too_many_is_said_beside_the_product(self) -> None:
        page = self.order(teapot=99)
        self.assertContains(page, "There is not enough of “Teapot” left.", status_code=422)
        self.assertFalse(OutboxEvent.objects.exists())

    def test_nothing_chosen_and_no_name(self) -> None:
        self.assertContains(self.order(), "Choose at least one thing.", status_code=422)
        page = self.order(customer="", teapot=1)
        self.assertContains(page, "This field is required.", status_code=422)

    def test_a_form_from_elsewhere_is_refused(self) -> None:
        page = Client(enforce_csrf_checks=True).post(reverse("shop"), {"teapot": 1})
        self.assertEqual(page.status_code, 403)
