"""Products, orders and payments."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


def euros(cents: int) -> str:
    return f"€ {cents / 100:,.2f}"


class Product(models.Model):
    sku = models.SlugField(unique=True)
    name = models.CharField(max_length=80)
    description = models.CharField(max_length=200)
    price_cents = models.PositiveIntegerField()
    stock = models.PositiveIntegerField()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def price(self) -> str:
        return euros(self.price_cents)


class Order(models.Model):
    customer = models.CharField(max_length=80)
    placed_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"order {self.pk}"

    @property
    def total_cents(self) -> int:
        return sum(line.quantity * line.price_cents for line in self.lines.all())

    @property
    def total(self) -> str:
        return euros(self.total_cents)


class OrderLine(models.Model):
    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="lines")
    product = models.ForeignKey(Product, on_delete=models.PROTECT)
    quantity = models.PositiveIntegerField()
    price_cents = models.PositiveIntegerField()  # as it was when the order was placed

    def __str__(self) -> str:
        return f"{self.quantity} × {self.product}"


class Payment(models.Model):
    """Written by the listener of ``payment.requested``."""

    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="payments")
    event_id = models.CharField(max_length=36, unique=True)
    receipt = models.CharField(max_length=40)
    paid_at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return f"paid, receipt {self.receipt}"
