"""The listeners of a history: each does what the event's payload tells, and tells the oracle."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

import django_outbox as outbox
from django_outbox.listeners.registry import listeners
from tests.simulation.evidence import Call
from tests.simulation.oracle import Oracle
from tests.simulation.scheduler import scheduler

TIMEOUT = 1.0  # seconds; of listeners that may hang
TYPES = {  # the event types of each word that a kind of history uses
    "plain": "plain",
    "placed": "order.placed",
    "paid": "order.paid",
    "fan": "fan",
    "many": "many",
    "awaited": "awaited",
    "many awaited": "many.awaited",
    "mailed": "mailed",
    "hanging": "hanging",
    "hanging many": "hanging.many",
}


class Stage:
    """What the listeners of this history need to know."""

    oracle: Oracle
    mail_is_away = False  # what the queue "mail" sends to cannot be reached
    calls: Counter[tuple[str, str]] = Counter()  # by event and listener
    numbers = count(1)  # of all calls
    error = "planned"  # the text of what listeners raise


def act_of(event: outbox.Event, title: str) -> tuple[str, float]:
    """Return what this call is to do, and for how many seconds."""
    number = Stage.calls[event.event_id, title]
    Stage.calls[event.event_id, title] += 1
    act, seconds = event.payload["act"], event.payload["seconds"]
    if act == "failed":
        act = "done" if number else "failed"
    elif act == "failed twice":
        act = "done" if number > 1 else "failed"
    elif act == "always failed":
        act = "failed"
    elif act in ("deferred", "hung") and number:
        act = "done"
    if title.endswith("mail"):  # fails in an outage alone: else its breaker would open for minutes
        act = "failed" if Stage.mail_is_away else act if act == "deferred" else "done"
    return act, 4 * TIMEOUT if act == "hung" else seconds


def begin(events: Sequence[outbox.Event], title: str, timeout: float | None) -> list[Call]:
    worker, number = scheduler.current.process.values["worker"], next(Stage.numbers)
    calls = [
        Call(event_id=each.event_id, listener=title, worker=worker, timeout=timeout, number=number)
        for each in events
    ]
    for call in calls:
        scheduler.trace("call", call.event_id, title)
        Stage.oracle.begins(call)
    return calls


def end(calls: Sequence[Call], outcomes: Sequence[str]) -> None:
    for call, outcome in zip(calls, outcomes, strict=True):
        scheduler.trace("end", call.event_id, call.listener, outcome)
        Stage.oracle.ends(call, outcome)


def answer_to(act: str) -> Any:
    """Return what a listener returns, or an exception that it raises."""
    if act == "deferred":
        return outbox.Defer(0.5)
    if act == "final":
        return outbox.Unrecoverable(Stage.error)
    return ValueError(Stage.error) if act == "failed" else None


def poison(event: outbox.Event) -> None:
    if event.payload["act"] == "poison":
        Stage.oracle.kills(f"{event.event_id} {event.listener}")
        scheduler.kill(scheduler.current.process)


def one(title: str, *, timeout: float | None = None, seconds: float | None = None) -> Any:
    """Return a listener of one event."""

    def listener(event: outbox.Event) -> Any:
        act, pause = act_of(event, title)
        calls = begin([event], title, timeout)
        time.sleep(pause if seconds is None else min(pause, seconds))
        poison(event)
        end(calls, ["done" if act == "hung" else act])
        if isinstance(answer := answer_to(act), BaseException):
            raise answer
        return answer

    return listener


def awaited(title: str) -> Any:
    async def listener(event: outbox.Event) -> Any:
        act, pause = act_of(event, title)
        calls = begin([event], title, None)
        try:
            await asyncio.sleep(pause)
        except asyncio.CancelledError:
            end(calls, ["cancelled"])
            raise
        end(calls, ["done" if act == "hung" else act])
        if isinstance(answer := answer_to(act), BaseException):
            raise answer
        return answer

    return listener


def many(title: str, *, timeout: float | None = None) -> Any:
    """Return a batch listener; an event that fails fails the whole call, or only itself."""

    def listener(events: list[outbox.Event]) -> Any:
        acts, pause = acts_of(events, title)
        calls = begin(events, title, timeout)
        time.sleep(pause)
        return answers(events, calls, acts)

    return listener


def many_awaited(title: str) -> Any:
    async def listener(events: list[outbox.Event]) -> Any:
        acts, pause = acts_of(events, title)
        calls = begin(events, title, None)
        try:
            await asyncio.sleep(pause)
        except asyncio.CancelledError:
            end(calls, ["cancelled"] * len(calls))
            raise
        return answers(events, calls, acts)

    return listener


def acts_of(events: Sequence[outbox.Event], title: str) -> tuple[list[str], float]:
    found = [act_of(each, title) for each in events]
    return [act for act, _ in found], max(seconds for _, seconds in found)


def answers(events: Sequence[outbox.Event], calls: Sequence[Call], acts: Sequence[str]) -> Any:
    acts = ["done" if act == "hung" else act for act in acts]
    if "failed" in acts and events[0].payload["n"] % 2:
        end(calls, ["failed"] * len(acts))
        raise ValueError(Stage.error)
    end(calls, heard(events, acts))
    return [answer_to(each) for each in acts]


def heard(events: Sequence[outbox.Event], acts: Sequence[str]) -> list[str]:
    """Return what counts: behind an event that is not done, its key's answers are ignored."""
    found, stopped = [], set()
    for event, act in zip(events, acts, strict=True):
        found.append("ignored" if event.key in stopped else act)
        if event.key is not None and act != "done":
            stopped.add(event.key)
    return found


def register() -> None:
    """Register the listeners of all histories."""
    for each in ("plain", "order.placed", "order.paid", "fan"):
        outbox.listener(each)(one(each))
    outbox.listener("fan", name="mail", queue="mail")(one("fan mail"))
    outbox.listener("fan", name="log")(awaited("fan log"))
    outbox.listener("awaited")(awaited("awaited"))
    outbox.listener("mailed", queue="mail", name="mail")(one("mailed mail", seconds=0.1))
    outbox.listener("hanging", timeout=TIMEOUT)(one("hanging", timeout=TIMEOUT))
    outbox.listener("many", batch=5, within=0.05, per_key=2)(many("many"))
    outbox.listener("hanging.many", batch=3, timeout=TIMEOUT)(many("hanging.many", timeout=TIMEOUT))
    outbox.listener("many.awaited", batch=4)(many_awaited("many.awaited"))


def titles() -> tuple[dict[str, frozenset[str]], dict[str, str]]:
    """Return the listeners of each event type, and the queue of each."""
    by_type: dict[str, set[str]] = {}
    for each in listeners():
        for name in each.types:
            by_type.setdefault(name, set()).add(each.title)
    queues = {each.title: each.queue for each in listeners()}
    return {name: frozenset(found) for name, found in by_type.items()}, queues
