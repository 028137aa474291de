"""What type checkers know about the payload of an event; the check runs mypy on this file."""

from __future__ import annotations

from dataclasses import dataclass

import django_outbox as outbox


@dataclass
class OrderPlaced:
    order: int


@outbox.listener("order.placed")
def typed(event: outbox.Event[OrderPlaced]) -> None:
    event.payload.order.upper()  # type: ignore[attr-defined]


@outbox.listener("order.cancelled")
def untyped(event: outbox.Event) -> None:
    event.payload.order.upper()  # Any


def accepts_any(event: outbox.Event[object]) -> None:
    typed(event)  # type: ignore[arg-type]
    untyped(event)
    accepts_any(outbox.Event(event_type="order.placed", payload=OrderPlaced(order=7)))
