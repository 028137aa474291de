"""Listeners of the benchmarks: they do nothing but say that they were called."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from django.dispatch import receiver

import django_outbox as outbox
from django_outbox.conf import current
from django_outbox.signals import relay_published

from .witness import Testifying

testifying = Testifying()

WAIT = 0.01  # seconds that a listener of ``listeners.py`` takes, as a call over a network does


@outbox.listener("benchmark.count")
def count(event: outbox.Event) -> None:
    testifying.count()


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


if "slow" in (current().QUEUES or {}):  # the part about queues has it

    @outbox.listener("benchmark.hang", queue="slow")
    def hang(event: outbox.Event) -> None:
        time.sleep(3600)  # the listener hangs

    @outbox.listener("benchmark.shared", name="fast")
    def fast(event: outbox.Event) -> None:
        testifying.tell(event.aggregate_id)

    @outbox.listener("benchmark.shared", name="slow", queue="slow")
    def slow(event: outbox.Event) -> None:
        time.sleep(0.2)  # the listener's work

    @outbox.listener("benchmark.limited", queue="slow")
    def limited(event: outbox.Event) -> None:
        testifying.tell("limited")


@outbox.listener("benchmark.wait")
def wait(event: outbox.Event) -> None:
    testifying.count()
    time.sleep(WAIT)  # the listener's work: a call that is waited for


@outbox.listener("benchmark.await")
async def await_(event: outbox.Event) -> None:
    testifying.count()
    await asyncio.sleep(WAIT)


@receiver(relay_published)
def note(*, published: int, **batch: Any) -> None:
    """Say how many events a broker has confirmed."""
    if published:
        testifying.tell(published)
