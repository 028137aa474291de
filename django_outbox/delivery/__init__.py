"""One event from taken to decided: decode, route, call, answer, decide."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import lru_cache

from .. import hooks, registry
from ..conf import Settings, current
from ..exceptions import PayloadError, UnroutableEvent
from ..outcomes import DONE, Decision, Status
from ..registry import Listener
from .call import Call
from .decide import clean, dead, decide, describe, failed
from .fanout import FanOut
from .intercept import Escaping
from .lease import Lease, take

__all__ = ["Lease", "adeliver", "decide", "deliver", "faulty", "is_async", "lost", "take"]

logger = logging.getLogger("django_outbox")

FAULT_DELAY = 5.0  # seconds until an event comes again after a fault of the worker's own


def may_go_on(lease: Lease) -> bool:
    return True


def deliver(
    lease: Lease,
    *,
    alias: str,
    escaping: Escaping = (),
    between: Callable[[Lease], bool] = may_go_on,
) -> Decision:
    """Call the event's listeners and decide; whatever they raise is an answer, or ``escaping``.

    ``between`` is called after a listener before another one, or a fallback, is: it tidies up, and
    says whether another listener may start.
    """
    settings = current()
    listeners = _listeners(lease, settings)
    if isinstance(listeners, Decision):
        return listeners
    try:
        if len(listeners) == 1 and lease.progress is None:
            event = lease.event
            event.called(listeners[0].title, alias)
            return Call(
                lease, listeners[0], event, event.attempts, settings, alias, between, escaping
            ).run()
        fan_out = FanOut(lease, listeners, settings, alias, between, escaping)
        for call in fan_out.calls():
            if fan_out.begun and not between(lease):
                break
            fan_out.note(call, copy_context().run(call.run))
        return fan_out.decision
    finally:
        lease.overdue_at = 0.0
        lease.forget()


async def adeliver(
    lease: Lease, *, alias: str, between: Callable[[Lease], Awaitable[bool]]
) -> Decision:
    """Call the listeners of an event that are all ``async def`` (``is_async``), and decide."""
    settings = current()
    listeners = _listeners(lease, settings)
    if isinstance(listeners, Decision):
        return listeners
    try:
        if len(listeners) == 1 and lease.progress is None:
            event = lease.event
            event.called(listeners[0].title, alias)
            call = Call(lease, listeners[0], event, event.attempts, settings, alias, between)
            return await call.arun()
        fan_out = FanOut(lease, listeners, settings, alias, between)
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


def _listeners(lease: Lease, settings: Settings) -> tuple[Listener, ...] | Decision:
    """Decode and route; what cannot be delivered at all is decided here."""
    try:
        lease.event.read()  # here, so that damaged text is dead and not retried
    except PayloadError as error:
        return dead(describe(error))
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
        return dead(describe(error))
    if lease.key is not None:
        _warn_of_hold(lease.key, event.event_type)
    wait = min(max(grace - lease.age, 0.1), grace / 20 + 1)
    return Decision(status=Status.NEW, delay=wait, error=clean(str(error)), outcome="deferred")


@lru_cache(maxsize=1000)  # what makes it warn once
def _warn_of_hold(key: str, event_type: str) -> None:
    logger.warning(
        "stream blocked: no listener for event_type=%s; what is behind it waits for "
        "UNROUTABLE_GRACE key=%s", event_type, key,
    )  # fmt: skip


def faulty() -> Decision:
    """Decide on a delivery that failed by no fault of its listeners: look again later."""
    return Decision(status=Status.NEW, delay=FAULT_DELAY, outcome="deferred")


def lost(rescues: int) -> Decision:
    """Decide on an event whose workers were lost again and again: it is not run any more."""
    return dead(f"lost {rescues} workers")
