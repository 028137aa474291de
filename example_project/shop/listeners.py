"""Payments: the card processor is busy twice, then it takes the money."""

from __future__ import annotations

import django_outbox as outbox
from example_project.partners import cards

from .models import Payment


@outbox.listener("payment.requested")
def take_payment(event: outbox.Event) -> None:
    # An event can arrive twice: after a crash between the charge and the end of this function,
    # say. The processor charges once per idempotency key, our row is there once per event id.
    receipt = cards.charge(event.payload["amount_cents"], idempotency_key=event.event_id)
    Payment.objects.get_or_create(
        event_id=event.event_id,
        defaults={"order_id": event.payload["order"], "receipt": receipt},
    )
