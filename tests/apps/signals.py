"""What the page about other apps' signals says, done with django-oscar and Wagtail.

``tox -e apps`` runs it; it is no ``test_`` module, since no other environment has these packages.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from oscar.apps.basket.models import Basket
from oscar.apps.catalogue.models import Product, ProductClass
from oscar.apps.order.utils import OrderCreator
from oscar.apps.partner.models import Partner, StockRecord
from oscar.apps.partner.strategy import Default
from oscar.apps.shipping.methods import Free
from oscar.core.prices import Price
from wagtail.management.commands import publish_scheduled
from wagtail.models import Locale, Page, Revision
from wagtail.signals import page_published

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests import samples

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = "how-to/write-events.md#Write from another app's signals and methods"


@pytest.fixture
def shop() -> Iterator[Any]:
    with samples.modules(PAGE) as found:
        yield found


def announce_page(sender: Any, instance: Page, **kwargs: Any) -> None:
    outbox.write("page.published", {"page": instance.pk})


def place_order(creator: type[OrderCreator], number: str) -> Any:
    """Place an order for a teapot, as django-oscar's checkout does."""
    kind, _ = ProductClass.objects.get_or_create(name="Tea", track_stock=False)
    product = Product.objects.create(title="teapot", product_class=kind)
    partner, _ = Partner.objects.get_or_create(name="us")
    StockRecord.objects.create(product=product, partner=partner, partner_sku=number, price=10)
    basket = Basket.objects.create()
    basket.strategy = Default()
    basket.add_product(product)
    price = Price("EUR", excl_tax=10, incl_tax=10)
    return creator().place_order(basket, price, Free(), price, order_number=number)


def test_an_order_of_oscar_is_announced_with_its_transaction(shop: Any) -> None:
    with pytest.raises(outbox.NoActiveTransaction):
        place_order(OrderCreator, "1")
    order = place_order(shop["shop.order.utils"].OrderCreator, "2")
    got = list[Any]()
    outbox.listener("order.placed")(lambda event: got.append(event.payload))
    assert outbox.drain() == 1
    assert got == [{"order": order.pk}]


def test_a_page_that_wagtail_publishes_on_time_is_announced(shop: Any) -> None:
    Locale.objects.get_or_create(language_code="en")
    root = Page.add_root(instance=Page(title="Root"))
    page_published.connect(announce_page)
    try:
        with pytest.raises(outbox.NoActiveTransaction):
            publish(publish_scheduled.Command, root)
        page = publish(shop["shop.management.commands.publish_scheduled"].Command, root)
    finally:
        page_published.disconnect(announce_page)
    assert [each.payload for each in OutboxEvent.objects.all()] == [f'{{"page":{page.pk}}}']


def publish(command: Any, root: Page) -> Page:
    """Have a command publish a page whose time has come."""
    Revision.objects.all().delete()
    page = root.add_child(instance=Page(title="Tea", live=False))
    ago = timezone.now() - timedelta(hours=1)
    page.save_revision(approved_go_live_at=ago)
    command().handle(dryrun=False, verbosity=0)
    assert Page.objects.get(pk=page.pk).live
    return page
