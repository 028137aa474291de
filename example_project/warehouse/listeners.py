"""The warehouse hears of orders: one listener always works, one depends on the courier's mood."""

from __future__ import annotations

import django_outbox as outbox
from example_project.partners import courier

from .models import Parcel, PickList


@outbox.listener("order.placed")
def write_pick_list(event: outbox.Event) -> None:
    # An event can arrive twice; the unique event id makes the second time change nothing.
    PickList.objects.get_or_create(
        event_id=event.event_id,
        defaults={
            "order_number": event.payload["order"],
            "lines": event.payload["lines"],
        },
    )


@outbox.listener("parcel.requested")
def book_parcel(event: outbox.Event) -> None:
    # The courier knows our idempotency key and answers a repetition with the same parcel, so that
    # a crash before the next statement costs nothing; our row is there once per event id.
    tracking_number = courier.book(
        to=event.payload["to"], goods=event.payload["skus"], idempotency_key=event.event_id
    )
    Parcel.objects.get_or_create(
        event_id=event.event_id,
        defaults={"order_number": event.payload["order"], "tracking_number": tracking_number},
    )
