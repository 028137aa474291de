"""One event from taken to decided: decode, route, call, answer, decide."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import lru_cache

from .. import hooks, registry
from ..conf import Settings, current
from ..dialects.vocabulary import Pauses
from ..exceptions import PayloadError, UnroutableEvent
from ..outcomes import DONE, Decision, Status
from ..registry import Listener
from .call import Call
from .decide import clean, dead, decide, describe, failed, name
from .fanout import FanOut
from .intercept import Escaping
from .lease import Lease, take
from .pausing import PAUSED, is_paused, paused_listeners

__all__ = [
    "PAUSED",
    "Lease",
    "adeliver",
    "decide",
    "deliver",
    "faulty",
    "is_async",
    "is_paused",
    "lost",
    "take",
]

logger = logging.getLogger("django_outbox")

NOTHING: Pauses = frozenset()
FAULT_DELAY = 5.0  # seconds until an event comes again after a fault of the worker's own


def may_go_on(lease: Lease) -> bool:
    return True


def deliver(
    lease: Lease,
    *,
    alias: str,
    escaping: Escaping = (),
    between: Callable[[Lease], bool] = may_go_on,
    pauses: Pauses = NOTHING,
) -> Decision:
    """Call the event's listeners and decide; whatever they raise is an answer, or ``escaping``.

    ``between`` is called after a listener before another one, or a fallback, is: it tidies up, and
    says whether another listener may start. What ``pauses`` names is not called, and waits.
    """
    settings = current()
    listeners = _listeners(lease, settings, pauses)
    if isinstance(listeners, Decision):
        return listeners
    lease.waited = time.monotonic() - lease.taken_at
    try:
        if len(listeners) == 1 and lease.progress is None:
            event = lease.event
            event.called(listeners[0].title, alias)
            return Call(
                lease, listeners[0], event, event.attempts, settings, alias, between, escaping
            ).run()
        titles = paused_listeners(pauses)
        fan_out = FanOut(lease, listeners, settings, alias, between, escaping, titles)
        for call in fan_out.calls():
            if fan_out.begun and not between(lease):
                break
            fan_out.note(call, copy_context().run(call.run))
        return fan_out.decision
    finally:
        lease.overdue_at = 0.0
        lease.forget()


async def adeliver(
    lease: Lease, *, alias: str, between: Callable[[Lease], Awaitable[bool]],
    pauses: Pauses = NOTHING,
) -> Decision:  # fmt: skip
    """Call the listeners of an event that are all ``async def`` (``is_async``), and decide."""
    settings = current()
    listeners = _listeners(lease, settings, pauses)
    if isinstance(listeners, Decision):
        return listeners
    lease.waited = time.monotonic() - lease.taken_at
    try:
        if len(listeners) == 1 and lease.progress is None:
            event = lease.event
            event.called(listeners[0].title, alias)
            call = Call(lease, listeners[0], event, event.attempts, settings, alias, between)
            return await call.arun()
        titles = paused_listeners(pauses)
        fan_out = FanOut(lease, listeners, settings, alias, between, paused=titles)
        for call in fan_out.calls():
            if fan_out.begun and not await between(lease):
                break
            fan_out.note(call, await asyncio.create_task(call.arun()))
        return fan_out.decision
    finally:
        lease.forget()


def is_async(lease: Lease) -> bool:
    """Say whether the event belongs on the event loop: all its listeners are ``async def``."""
    return registry.route_is_async(lease.aggregate_type, lease.event_type)


def _listeners(lease: Lease, settings: Settings, pauses: Pauses) -> tuple[Listener, ...] | Decision:
    """Decode and route; what cannot be delivered, or not now, is decided here."""
    if pauses and is_paused(
        pauses, lease.event_type, lease.aggregate_type, lease.progress, lease.key
    ):
        return PAUSED
    try:
        lease.event.read()  # here, so that damaged text is dead and not retried
    except PayloadError as error:
        return dead(describe(error), kind=name(error))
    listeners = registry.route(lease.aggregate_type, lease.event_type)
    return listeners or unroutable(lease, settings)


def unroutable(lease: Lease, settings: Settings) -> Decision:
    """Decide on an event that nobody listens to.

    Within the grace it is deferred: in a rolling deploy only a newer process may know its type.
    """
    event, grace = lease.event, settings.UNROUTABLE_GRACE
    if settings.UNROUTABLE == "ignore":
        return DONE
    error = UnroutableEvent(
        f"No listener for event type {event.event_type!r} of aggregate type "
        f"{event.aggregate_type!r}. Registered nearby: {registry.nearby(event.event_type)}. "
        f"Expected a listener in a module named {settings.LISTENER_MODULE!r} of an installed app."
    )
    if settings.UNROUTABLE == "retry":
        return failed(error, event.attempts + 1, hooks.retry_policy(), settings.MAX_ATTEMPTS)
    if lease.age >= grace:
        return dead(describe(error), kind=name(error))
    if lease.key is not None:
        _warn_of_hold(lease.key, event.event_type, event.event_id)
    wait = min(max(grace - lease.age, 0.1), grace / 20 + 1)
    return Decision(
        status=Status.NEW, delay=wait, error=clean(str(error)), kind=name(error), outcome="deferred"
    )


@lru_cache(maxsize=1000)  # what makes it warn once
def _warn_of_hold(key: str, event_type: str, event_id: str) -> None:
    logger.warning(
        "stream blocked, for nobody listens to its head; the rest waits for UNROUTABLE_GRACE "
        "event_id=%s event_type=%s", event_id, event_type,
    )  # fmt: skip


def faulty() -> Decision:
    """Decide on a delivery that failed by no fault of its listeners: look again later."""
    return Decision(status=Status.NEW, delay=FAULT_DELAY, outcome="deferred")


def lost(rescues: int) -> Decision:
    """Decide on an event whose workers were lost again and again: it is not run any more."""
    reason = f"lost {rescues} workers"
    return dead(reason, kind=reason)
