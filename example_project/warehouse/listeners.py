"""What the warehouse does about an order: write a pick list, and book a parcel with the courier."""

from __future__ import annotations

import django_outbox as outbox
from example_project.partners import courier

from .models import Parcel, PickList


@outbox.listener("order.placed")
def write_pick_list(event: outbox.Event) -> None:
    # An event can arrive twice; because the event id is unique, the second time changes nothing.
    PickList.objects.get_or_create(
        event_id=event.event_id,
        defaults={"order_number": event.payload["order"], "lines": event.payload["lines"]},
    )


@outbox.listener("parcel.requested")
def book_parcel(event: outbox.Event) -> None:
    # The courier answers a repeated idempotency key with the same parcel, so a crash before the
    # next statement does no harm. We store one row per event id.
    tracking_number = courier.book(
        to=event.payload["to"], goods=event.payload["skus"], idempotency_key=event.event_id
    )
    Parcel.objects.get_or_create(
        event_id=event.event_id,
        defaults={"order_number": event.payload["order"], "tracking_number": tracking_number},
    )
