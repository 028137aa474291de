"""Placing an order: everything it changes and everything it announces, in one transaction."""

from __future__ import annotations

from collections.abc import Mapping

from django.db import router, transaction
from django.db.models import F

import django_outbox as outbox

from .models import Order, OrderLine, Product


class OutOfStock(Exception):
    """Somebody was faster; nothing of the order has happened."""

    def __init__(self, product: Product) -> None:
        self.product = product
        super().__init__(f"There is not enough of “{product}” left.")


def place(customer: str, quantities: Mapping[Product, int]) -> Order:
    """Store the order with its events; ``OutOfStock`` undoes all of it, the events included."""
    # atomic() does not ask the router. Where the order is written, the outbox is, too.
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
    """Write one event for each thing that somebody else has to do about the order."""
    lines = [
        {"sku": line.product.sku, "quantity": line.quantity}
        for line in order.lines.select_related("product")
    ]
    outbox.write("order.placed", {"order": order.pk, "lines": lines}, aggregate=order)
    outbox.write(
        "payment.requested",
        {"order": order.pk, "amount_cents": order.total_cents},
        aggregate=order,
    )
    outbox.write(
        "parcel.requested",
        {"order": order.pk, "to": order.customer, "skus": [line["sku"] for line in lines]},
        aggregate=order,
    )


def take_from_stock(quantities: Mapping[Product, int]) -> None:
    # Last, so that the rows of popular products are locked only shortly, and by primary key, so
    # that two orders for the same products never wait for each other in a circle.
    for product in sorted(quantities, key=lambda product: product.pk):
        wanted = quantities[product]
        left = Product.objects.filter(pk=product.pk, stock__gte=wanted)
        if not left.update(stock=F("stock") - wanted):
            raise OutOfStock(product)
