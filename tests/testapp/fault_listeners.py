"""Listeners of worker processes that tests break: each leaves a line in a file, come what may.

The file is the test's own witness: unlike a row, a line is there whatever becomes of the process,
its transaction or the database.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

from django.db import transaction

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests.fleet import POISONED, WITNESS
from tests.testapp.models import Effect


def testify(event: outbox.Event, phase: str, **facts: object) -> None:
    """Add one line to the witness; O_APPEND keeps the lines of several processes apart."""
    line = {
        "id": event.event_id,
        "type": event.event_type,
        "attempts": event.attempts,
        "source": event.source,
        "database": event.database,
        "phase": phase,
        "pid": os.getpid(),
        "at": time.time(),
        **facts,
    }
    witness = os.open(os.environ[WITNESS], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(witness, (json.dumps(line) + "\n").encode())
    finally:
        os.close(witness)


@outbox.listener("order.placed")
def place(event: outbox.Event) -> None:
    """Take ``seconds``; fail once, or write a follow-up, where the payload says so."""
    testify(event, "start")
    time.sleep(event.payload.get("seconds", 0))
    if event.payload.get("fails") and not event.attempts:
        with transaction.atomic():
            outbox.write("order.ghost")  # undone by the exception: nobody may ever see it
            testify(event, "failed")
            raise outbox.RetryAfter(0)
    if event.payload.get("follow"):
        with transaction.atomic():
            outbox.write("order.followed")
    testify(event, "end")


@outbox.listener("order.gated")
def wait_for_gate(event: outbox.Event) -> None:
    """Run until the file that the payload names is there."""
    testify(event, "start")
    gate = Path(event.payload["gate"])
    while not gate.exists():
        time.sleep(0.01)  # the listener's work
    testify(event, "end")


@outbox.listener("order.booked", atomic=True)
def book(event: outbox.Event) -> None:
    testify(event, "start")
    Effect.objects.create(event_id=event.event_id, pid=os.getpid(), phase="booked")
    testify(event, "end")


@outbox.listener("order.followed")
@outbox.listener("order.ghost")
def follow(event: outbox.Event) -> None:
    testify(event, "start")
    testify(event, "end")


@outbox.listener("order.counted")
def count(event: outbox.Event) -> None:
    """Say how many leases its worker holds while it runs."""
    testify(event, "start", held=held_beside(event))
    time.sleep(event.payload.get("seconds", 0))
    testify(event, "end")


@outbox.listener("order.poison")
def poison(event: outbox.Event) -> None:
    """End the process, as a crash in C code or the kernel's memory killer would."""
    testify(event, "start", held=held_beside(event))
    os._exit(POISONED)


def held_beside(event: outbox.Event) -> int:
    rows = OutboxEvent.objects.filter(pk=event.event_id).values("locked_by")
    return OutboxEvent.objects.filter(locked_by__in=rows).exclude(pk=event.event_id).count()


@outbox.listener("order.chaos")
def chaos(event: outbox.Event) -> outbox.Defer | None:
    """Fail now and then, defer more rarely; each start and each end is testified."""
    testify(event, "start")
    time.sleep(random.random() * 0.002)  # the listener's work
    luck = random.random()
    if luck < 0.05:
        raise ValueError("5 % of all runs fail")
    if luck < 0.06:
        return outbox.Defer(0.02)
    testify(event, "end")
    return None
