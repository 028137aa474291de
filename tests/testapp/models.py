"""Orders, and the effects that listeners leave for tests to count."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    sku = models.CharField(max_length=64)
    quantity = models.PositiveIntegerField(default=1)
    created = models.DateTimeField(auto_now_add=True)


class Effect(models.Model):
    """One step of one delivery, written by a listener, often in another process."""

    event_id = models.CharField(max_length=36, db_index=True)
    worker = models.CharField(max_length=128, blank=True)
    pid = models.PositiveIntegerField()
    phase = models.CharField(max_length=32)  # "start", "end", or what the test calls it
    at = models.DateTimeField(auto_now_add=True)
