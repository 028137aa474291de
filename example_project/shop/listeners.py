"""Charge the customer's card when an order asks for payment."""

from __future__ import annotations

import django_outbox as outbox
from example_project.partners import cards

from .models import Payment


@outbox.listener("payment.requested")
def take_payment(event: outbox.Event) -> None:
    # An event can arrive twice, for example after a crash between the charge and the end of this
    # function. The processor charges once per idempotency key, and we store one row per event id.
    receipt = cards.charge(event.payload["amount_cents"], idempotency_key=event.event_id)
    Payment.objects.get_or_create(
        event_id=event.event_id, defaults={"order_id": event.payload["order"], "receipt": receipt}
    )
