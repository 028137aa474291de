"""What business transactions intend, and what listeners leave in the same database."""

from __future__ import annotations

from django.db import models


class Intent(models.Model):
    """An event that its transaction has written: it commits with the event, or goes with it."""

    event_id = models.CharField(max_length=36, primary_key=True)
    kind = models.CharField(max_length=32)
    key = models.CharField(max_length=64, null=True)
    writer = models.PositiveIntegerField()  # process id
    n = models.PositiveIntegerField()  # counts up in its writer
    at = models.FloatField()  # monotonic, shortly before the commit
    due = models.FloatField(default=0.0)  # monotonic; 0: at once
    begun = models.FloatField(default=0.0)  # monotonic, before the write; only of delayed ones
    cancelled = models.PositiveIntegerField(default=0)  # deliveries, by committed cancels


class Booking(models.Model):
    """What an atomic listener leaves; the same event twice would be a broken promise."""

    event_id = models.CharField(max_length=36, db_index=True)
    pid = models.PositiveIntegerField()


class Account(models.Model):
    """Somebody for a booking to refer to: a transaction that refers to nobody must fail."""


class Charge(models.Model):
    account = models.ForeignKey(Account, on_delete=models.CASCADE)
