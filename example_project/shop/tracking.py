"""The state of each event of an order, with its calls and its effect, for the page of orders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.db.models import Model

from django_outbox.models import OutboxEvent
from example_project.partners.models import Call
from example_project.warehouse.models import Parcel, PickList

from .models import Order, Payment

STATES = {
    OutboxEvent.Status.NEW: "waiting",
    OutboxEvent.Status.DONE: "delivered",
    OutboxEvent.Status.RETRY: "will be tried again",
    OutboxEvent.Status.DEAD: "dead",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One event of an order."""

    event: OutboxEvent
    calls: Sequence[Call]
    effect: Model | None

    @property
    def status(self) -> OutboxEvent.Status:
        return OutboxEvent.Status(self.event.status)

    @property
    def state(self) -> str:
        return STATES[self.status]

    @property
    def is_dead(self) -> bool:
        return self.status == OutboxEvent.Status.DEAD

    @property
    def is_settled(self) -> bool:
        return self.is_dead or self.status == OutboxEvent.Status.DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedOrder:
    order: Order
    steps: Sequence[Step]


def follow(orders: Iterable[Order]) -> list[FollowedOrder]:
    """Find the events of these orders, in four queries for any number of orders."""
    # This is for demonstration only: finished events are purged after a week, and the table has no
    # index on the aggregate. In a real shop, query your own tables.
    events = OutboxEvent.objects.filter(
        aggregate_type=Order._meta.label, aggregate_id__in=[str(order.pk) for order in orders]
    ).order_by("event_id")
    ids = [event.pk for event in events]
    calls, effects = _calls(ids), _effects(ids)
    steps: defaultdict[str, list[Step]] = defaultdict(list)
    for event in events:
        step = Step(event=event, calls=calls[event.pk], effect=effects.get(event.pk))
        steps[event.aggregate_id].append(step)
    return [FollowedOrder(order=order, steps=steps[str(order.pk)]) for order in orders]


def _calls(ids: Sequence[str]) -> defaultdict[str, list[Call]]:
    calls: defaultdict[str, list[Call]] = defaultdict(list)
    for call in Call.objects.filter(idempotency_key__in=ids):
        calls[call.idempotency_key].append(call)
    return calls


def _effects(ids: Sequence[str]) -> dict[str, Model]:
    return {
        effect.event_id: effect
        for model in (PickList, Payment, Parcel)
        for effect in model._default_manager.filter(event_id__in=ids)
    }
