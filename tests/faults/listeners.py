"""Listeners that do what the payload says, and testify to each start and each end."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from django.db import transaction

import django_outbox as outbox
from tests.faults import receiver
from tests.faults.models import Booking, Intent
from tests.faults.witness import VARIABLE, healed, testify

_follow_ups = iter(range(1_000_000))


def testifying(listener: Callable[[outbox.Event], Any]) -> Callable[[outbox.Event], Any]:
    """Have a listener testify to its start, and to its end if it did not do so itself."""

    @wraps(listener)
    def wrapped(event: outbox.Event) -> Any:
        testify(event, "start")
        try:
            answer = listener(event)
        except BaseException:
            testify(event, "failed")
            raise
        testify(event, "deferred" if isinstance(answer, outbox.Defer) else "end")
        return answer

    return wrapped


@outbox.listener("fault.plain")
@testifying
def work(event: outbox.Event) -> outbox.Defer | None:
    """Take ``seconds``; fail as it is asked to; now and then defer; write a follow-up."""
    asked = event.payload
    time.sleep(asked.get("seconds", 0))
    if asked.get("ill") and not healed(Path(os.environ[VARIABLE])).exists():
        raise outbox.Unrecoverable("ill")
    if time.monotonic() < asked.get("until", 0):
        raise ValueError("too early")
    if event.attempts < asked.get("fail", 0):
        raise outbox.RetryAfter(0.01) if asked.get("later") else ValueError("as it was asked to")
    if asked.get("defer") and random.random() < 0.5:
        return outbox.Defer(0.02)
    if asked.get("follow"):
        follow(event)
    if asked.get("calls"):
        receiver.call(asked["calls"], event.event_id)
    return None


def follow(event: outbox.Event) -> None:
    """Write an event in the process that delivers: it takes the hot route."""
    with transaction.atomic():
        event_id = outbox.write("fault.followed", {"after": event.event_id})
        Intent.objects.create(
            event_id=event_id, kind="followed", writer=os.getpid(), n=next(_follow_ups),
            at=time.monotonic(),
        )  # fmt: skip


@outbox.listener("fault.followed")
@testifying
def note(event: outbox.Event) -> None:
    """Do nothing: that it was called is what counts."""


@outbox.listener("fault.booked", atomic=True)
@testifying
def book(event: outbox.Event) -> None:
    """Leave something in the same database: exactly once, whatever happens."""
    Booking.objects.create(event_id=event.event_id, pid=os.getpid())
    time.sleep(event.payload.get("seconds", 0))


@outbox.listener("fault.ends")
@testifying
def end_the_process(event: outbox.Event) -> None:
    """Take the whole process along, as a crash in C code or the memory killer would."""
    if event.payload["how"] == "segv":
        import ctypes

        ctypes.string_at(0)
    os._exit(23)


@outbox.listener("fault.raises")
@testifying
def fail(event: outbox.Event) -> None:
    how = event.payload["how"]
    if how == "memory":
        raise MemoryError
    if how == "exit":
        raise SystemExit(3)
    if how == "nul":
        raise ValueError("a \0 and a lone \ud800 in the text")
    raise ValueError(how)


@outbox.listener("fault.endless", timeout=0.5)
@testifying
def never_end(event: outbox.Event) -> None:
    """An endless loop; should it run again after ``until``, it has been mended."""
    if time.monotonic() < event.payload["until"]:
        threading.Event().wait()
