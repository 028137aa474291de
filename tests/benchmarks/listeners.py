"""Listeners of the benchmarks: they do nothing but say that they were called."""

from __future__ import annotations

from typing import Any

from django.dispatch import receiver

import django_outbox as outbox
from django_outbox.signals import relay_published

from .witness import Testifying

testifying = Testifying()
SEVERAL = (1, 3, 10)  # listeners of the events of one type


@outbox.listener("benchmark.count")
def count(event: outbox.Event) -> None:
    testifying.count()


for number in SEVERAL:
    for each in range(number):
        outbox.listener(f"benchmark.count_{number}", name=f"listener_{each}")(count)


@outbox.listener("benchmark.bulk", batch=500)
def bulk(events: list[outbox.Event]) -> None:
    testifying.count(len(events))


@outbox.listener("benchmark.tell")
def tell(event: outbox.Event) -> None:
    testifying.tell(event.aggregate_id)


@outbox.listener("benchmark.tell_all", batch=500)
def tell_all(events: list[outbox.Event]) -> None:
    for event in events:
        testifying.tell(event.aggregate_id)


@receiver(relay_published)
def note(*, published: int, **batch: Any) -> None:
    """Say how many events a broker has confirmed."""
    if published:
        testifying.tell(published)
