"""Place an order: its rows and its events commit in one transaction."""

from __future__ import annotations

from collections.abc import Mapping

from django.db import router, transaction
from django.db.models import F

import django_outbox as outbox

from .models import Order, OrderLine, Product


class OutOfStock(Exception):
    """Another customer was faster; nothing of the order was stored."""

    def __init__(self, product: Product) -> None:
        self.product = product
        super().__init__(f"There is not enough of “{product}” left.")


def place(customer: str, quantities: Mapping[Product, int]) -> Order:
    """Store the order and its events; ``OutOfStock`` rolls back both."""
    # atomic() does not ask the router, so name the database of the order, where the outbox is too.
    with transaction.atomic(using=router.db_for_write(Order)):
        order = Order.objects.create(customer=customer)
        OrderLine.objects.bulk_create(
            OrderLine(
                order=order, product=product, quantity=quantity, price_cents=product.price_cents
            )
            for product, quantity in quantities.items()
        )
        announce(order)
        take_from_stock(quantities)
    return order


def announce(order: Order) -> None:
    """Write one event for each thing that another part of the system has to do."""
    lines = [
        {"sku": line.product.sku, "quantity": line.quantity}
        for line in order.lines.select_related("product")
    ]
    outbox.write("order.placed", {"order": order.pk, "lines": lines}, aggregate=order)
    outbox.write(
        "payment.requested", {"order": order.pk, "amount_cents": order.total_cents}, aggregate=order
    )
    outbox.write(
        "parcel.requested",
        {"order": order.pk, "to": order.customer, "skus": [line["sku"] for line in lines]},
        aggregate=order,
    )


def take_from_stock(quantities: Mapping[Product, int]) -> None:
    # This comes last, so that rows of popular products are locked only briefly, and in the order of
    # primary keys, so that two orders for the same products cannot deadlock.
    for product in sorted(quantities, key=lambda product: product.pk):
        wanted = quantities[product]
        left = Product.objects.filter(pk=product.pk, stock__gte=wanted)
        if not left.update(stock=F("stock") - wanted):
            raise OutOfStock(product)
