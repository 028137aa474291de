"""Listeners that do what the payload says, and testify to each start and each end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

from django.db import transaction

import django_outbox as outbox
from django_outbox.conf import current
from tests.faults import clock, receiver
from tests.faults.models import Booking, Intent
from tests.faults.witness import VARIABLE, healed, say, say_all, testify, troubled

SEVERAL = {"hooks", "mails"} <= current().queues.keys()  # a scenario with several queues

TIMEOUT = 0.5  # seconds
_follow_ups = iter(range(1_000_000))


async def _testified(event: outbox.Event, awaitable: Awaitable[Any]) -> Any:
    try:
        answer = await awaitable
    except BaseException:
        testify(event, "failed")
        raise
    testify(event, "end")
    return answer


def awaited(listener: Callable[[outbox.Event], Awaitable[Any]]) -> Any:
    """As ``testifying``, for listeners that are awaited."""

    @wraps(listener)
    async def wrapped(event: outbox.Event) -> Any:
        testify(event, "start")
        return await _testified(event, listener(event))

    return wrapped


def is_healed() -> bool:
    return healed(Path(os.environ[VARIABLE])).exists()


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
    if asked.get("ill") and not is_healed():
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
            event_id=event_id,
            kind="followed",
            writer=os.getpid(),
            n=next(_follow_ups),
            at=time.monotonic(),
        )


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


def fails(event: outbox.Event) -> bool:
    asked = event.payload
    return event.attempts < asked.get("fail", 0) or time.monotonic() < asked.get("until", 0)


def first_of_each_key(events: list[outbox.Event]) -> list[outbox.Event]:
    """Return the events that a failed call counts for: of each key the first."""
    keys = {event.key: event for event in reversed(events) if event.key is not None}
    return [event for event in events if event.key is None or keys[event.key] is event]


def say_failed(events: list[outbox.Event], size: int = 0) -> None:
    """Testify that a call of ``size`` events has failed."""
    say_all(events, "shared" if (size or len(events)) > 1 else "failed")


@outbox.listener("fault.bulk", batch=50, per_key=3)
def load(events: list[outbox.Event]) -> None:
    """Take some time for each event; fail for all, perhaps after a while, if one is to fail."""
    began = clock.now()
    if any(map(fails, events)):
        counted = first_of_each_key(events)
        say_all(counted, "start", began)
        time.sleep(max(event.payload.get("hold", 0) for event in events))
        say_failed(counted, len(events))
        raise ValueError("as one of them was asked to")
    for event in events:
        say(event, "start", began)
        time.sleep(event.payload.get("seconds", 0))
        testify(event, "end")


@outbox.listener("fault.answered", batch=50, within=0.05)
def answer(events: list[outbox.Event]) -> list[object]:
    """Tell of each event whether it failed."""
    began = clock.now()
    return [_answered(event, began) for event in events]


def _answered(event: outbox.Event, began: float) -> ValueError | None:
    say(event, "start", began)
    time.sleep(event.payload.get("seconds", 0))
    found = ValueError("as it was asked to") if fails(event) else None
    testify(event, "end" if found is None else "failed")
    return found


@outbox.listener("fault.staged", batch=50, per_key=3)
def stage(events: list[outbox.Event]) -> list[object]:
    """Tell of each event whether it failed; do nothing for those behind one of the same key."""
    began = clock.now()
    found: list[object] = []
    failed: set[str | None] = set()
    for event in events:
        found.append(None if event.key in failed else _answered(event, began))
        if found[-1] is not None and event.key is not None:
            failed.add(event.key)
    return found


@outbox.listener("fault.gathered", batch=50)
async def gather(events: list[outbox.Event]) -> list[object]:
    """As ``answer``, but awaited; the events take their time together."""
    say_all(events, "start", clock.now())
    await asyncio.sleep(max(event.payload.get("seconds", 0) for event in events))
    found = [ValueError("as it was asked to") if fails(event) else None for event in events]
    for event, each in zip(events, found, strict=True):
        testify(event, "end" if each is None else "failed")
    return [*found]


@outbox.listener("fault.ledger", batch=50, atomic=True)
def enter(events: list[outbox.Event]) -> None:
    """Leave something of each event in the same database: exactly once, whatever happens.

    It fails with everything written, which must be undone.
    """
    say_all(events, "start", clock.now())
    Booking.objects.bulk_create(Booking(event_id=each.event_id, pid=os.getpid()) for each in events)
    if any(map(fails, events)):
        say_failed(events)
        raise ValueError("as one of them was asked to")
    time.sleep(max(event.payload.get("seconds", 0) for event in events))
    say_all(events, "end")


@outbox.listener("fault.sifted.*", batch=500)
def sift(events: list[outbox.Event]) -> None:
    """Fail for all if one of them is bad."""
    say_all(events, "start", clock.now())
    kinds = {event.event_type for event in events}
    if bad := kinds & {"fault.sifted.bad", "fault.sifted.fatal"}:
        say_failed(events)
        raise outbox.Unrecoverable if "fault.sifted.fatal" in bad else ValueError("bad")
    say_all(events, "end")


@outbox.listener("fault.away", batch=500, retry=outbox.Fixed(delay=0.2, max_attempts=200))
def reach(events: list[outbox.Event]) -> None:
    """Call a partner who is away until everything is to end."""
    say_all(events, "start", clock.now())
    if not is_healed():
        say_failed(events)
        raise ConnectionError("the partner is away")
    say_all(events, "end")


@outbox.listener("fault.ends")
@testifying
def end_the_process(event: outbox.Event) -> None:
    """Take the whole process along, as a crash in C code or the memory killer would.

    Or all processes of its group, as where a container is killed as a whole.
    """
    if event.payload["how"] == "segv":
        import ctypes

        ctypes.string_at(0)
    if event.payload["how"] == "group":
        os.killpg(0, signal.SIGKILL)
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


@outbox.listener("fault.endless")
@testifying
def never_end(event: outbox.Event) -> None:
    """An endless loop; should it run again after ``until``, it has been mended."""
    if time.monotonic() < event.payload["until"]:
        threading.Event().wait()


@outbox.listener("fault.long")
@testifying
def last(event: outbox.Event) -> None:
    """Go on until everything is to end, as a job of an hour would."""
    while not is_healed():
        time.sleep(0.05)


@outbox.listener("fault.awaited")
@awaited
async def last_awaited(event: outbox.Event) -> None:
    while not is_healed():  # noqa: ASYNC110 - another process heals
        await asyncio.sleep(0.05)


@outbox.listener("fault.hangs", timeout=TIMEOUT)
@testifying
def hang(event: outbox.Event) -> None:
    """Hang for ``seconds``, or for ever, until it has been tried ``times`` times."""
    if event.attempts < event.payload["times"]:
        threading.Event().wait(event.payload["seconds"])


@outbox.listener("fault.charged", atomic=True, timeout=TIMEOUT)
@testifying
def charge(event: outbox.Event) -> None:
    """Leave something in the same database and hang; exactly once, whatever happens.

    The last try takes a while, too: what came before it may want to commit in that time.
    """
    Booking.objects.create(event_id=event.event_id, pid=os.getpid())
    hangs = event.attempts < event.payload["times"]
    time.sleep(event.payload["seconds"] if hangs else 0.8 * TIMEOUT)


@outbox.listener("fault.waits", timeout=TIMEOUT)
@awaited
async def wait(event: outbox.Event) -> None:
    if event.attempts < event.payload["times"]:
        await asyncio.sleep(3600)


@outbox.listener("fault.blocks")
@awaited
async def block(event: outbox.Event) -> None:
    """Do what no coroutine may: hold up the event loop."""
    time.sleep(event.payload["seconds"])  # noqa: ASYNC251 - that is the point


def take_time(event: outbox.Event) -> None:
    """Take ``seconds``, or hang until ``busy_until``; at most until everything is to end.

    Then call a partner, who may be away.
    """
    until = event.payload.get("busy_until", time.monotonic() + event.payload.get("seconds", 0))
    while (left := until - time.monotonic()) > 0 and not is_healed():
        time.sleep(min(left, 0.05))
    if event.payload.get("partner"):
        receiver.call(event.payload["partner"], event.event_id)


def be_in_trouble(event: outbox.Event) -> None:
    """Fail, hang and fail, or die for as long as the trouble lasts."""
    path = troubled(Path(os.environ[VARIABLE]))
    how = path.read_text() if path.exists() else ""
    if how == "hangs":
        threading.Event().wait(1.6 * TIMEOUT)  # its thread ends before others hang in its place
    if how:
        raise outbox.Unrecoverable(how) if how == "dies" else ValueError(how)


outbox.listener("fault.kin", name="ledger")(testifying(take_time))
for kind in ("fault.kin", "fault.kith"):
    outbox.listener(kind)(testifying(take_time))
    outbox.listener(
        kind, name="mail", timeout=TIMEOUT, retry=outbox.Fixed(0.2, max_attempts=10_000)
    )(testifying(be_in_trouble))

outbox.listener("fault.reminder")(work)
outbox.listener("fault.reminder", name="mail")(work)
outbox.listener("fault.slot")(work)

for options in json.loads(os.environ.get("FAULTS_LISTENERS", "[]")):  # of a release
    outbox.listener("fault.rolled.*", **options)(work)

if SEVERAL:  # a queue that is not configured is an error
    for name, where in {"store": "default", "mail": "mails"}.items():
        outbox.listener("fault.shared", name=name, queue=where)(work)
        outbox.listener("fault.spread", name=name, queue=where)(work)
    outbox.listener("fault.mailed", queue="mails")(work)
    outbox.listener("fault.spread", name="hook", queue="hooks")(testifying(take_time))
    outbox.listener("fault.hooked", queue="hooks")(testifying(take_time))
