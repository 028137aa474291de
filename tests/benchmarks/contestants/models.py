"""The business row that every contestant's transaction writes."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    sku = models.CharField(max_length=64)
    quantity = models.PositiveIntegerField(default=1)
    created = models.DateTimeField(auto_now_add=True)
