"""What the warehouse does about orders; it stores their number, not a foreign key."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class PickList(models.Model):
    """Written by the listener of ``order.placed``."""

    order_number = models.BigIntegerField()
    event_id = models.CharField(max_length=36, unique=True)
    lines = models.JSONField()
    created_at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return "pick list: " + ", ".join(
            f"{line['quantity']} × {line['sku']}" for line in self.lines
        )


class Parcel(models.Model):
    """Written by the listener of ``parcel.requested``."""

    order_number = models.BigIntegerField()
    event_id = models.CharField(max_length=36, unique=True)
    tracking_number = models.CharField(max_length=40)
    booked_at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return f"parcel booked, tracking number {self.tracking_number}"
