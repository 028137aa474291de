"""Listeners of the benchmarks: they do nothing but say that they were called."""

from __future__ import annotations

import asyncio
import time

import django_outbox as outbox

from .witness import Testifying

testifying = Testifying()

WAIT = 0.01  # seconds that a listener of ``listeners.py`` takes, as a call over a network does


@outbox.listener("benchmark.count")
def count(event: outbox.Event) -> None:
    testifying.count()


@outbox.listener("benchmark.tell")
def tell(event: outbox.Event) -> None:
    testifying.tell(event.aggregate_id)


@outbox.listener("benchmark.wait")
def wait(event: outbox.Event) -> None:
    testifying.count()
    time.sleep(WAIT)  # the listener's work: a call that is waited for


@outbox.listener("benchmark.await")
async def await_(event: outbox.Event) -> None:
    testifying.count()
    await asyncio.sleep(WAIT)
