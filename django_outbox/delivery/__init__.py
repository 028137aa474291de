"""One event from taken to decided: decode, route, call, answer, decide."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from .. import hooks, registry
from ..conf import Settings, current
from ..exceptions import PayloadError, UnroutableEvent
from ..outcomes import DONE, LOST, Decision, Status
from ..registry import Listener
from .call import Call, Escaping
from .decide import clean, dead, decide, describe, failed
from .fanout import Progress
from .lease import Lease, take

__all__ = ["Lease", "adeliver", "decide", "deliver", "faulty", "is_async", "lost", "take"]


FAULT_DELAY = 5.0  # seconds until an event comes again after a fault of the worker's own


def deliver(lease: Lease, *, alias: str, escaping: Escaping = ()) -> Decision:
    """Call the event's listeners and decide; whatever they raise is an answer, or ``escaping``."""
    settings = current()
    listeners = _listeners(lease, settings)
    if isinstance(listeners, Decision):
        return listeners
    started = time.monotonic()
    try:
        if len(listeners) == 1 and lease.progress is None:
            one = Call(lease, listeners[0], lease.event.attempts, settings, alias, escaping)
            return one.run(write=one.write_decision)
        return _fan_out(lease, listeners, settings, alias, escaping)
    finally:
        lease.duration = time.monotonic() - started
        lease.forget()


async def adeliver(lease: Lease, *, alias: str) -> Decision:
    """Call the one ``async def`` listener of an event (``is_async``) and decide."""
    settings = current()
    listeners = _listeners(lease, settings)
    if isinstance(listeners, Decision):
        return listeners
    started = time.monotonic()
    try:
        return await Call(lease, listeners[0], lease.event.attempts, settings, alias).arun()
    finally:
        lease.duration = time.monotonic() - started
        lease.forget()


def is_async(lease: Lease) -> bool:
    """Say whether the event belongs on the event loop: one listener, ``async def``."""
    listeners = registry.route(lease.aggregate_type, lease.event_type)
    return (
        len(listeners) == 1
        and listeners[0].is_async
        and not listeners[0].atomic
        and lease.progress is None
    )


def _listeners(lease: Lease, settings: Settings) -> tuple[Listener, ...] | Decision:
    """Decode and route; what cannot be delivered at all is decided here."""
    try:
        lease.event.read()  # here, so that damaged text is dead and not retried
    except PayloadError as error:
        return dead(describe(error))
    listeners = registry.route(lease.aggregate_type, lease.event_type)
    return listeners or unroutable(lease, settings)


def _fan_out(
    lease: Lease,
    listeners: tuple[Listener, ...],
    settings: Settings,
    alias: str,
    escaping: Escaping,
) -> Decision:
    """Run every listener whose time has come; one that failed does not keep the others."""
    progress, error, started = Progress(lease.progress), None, time.monotonic()

    def now() -> datetime:
        return lease.now + timedelta(seconds=time.monotonic() - started)

    for listener in listeners:
        if progress.waits(listener.title, now()):
            continue
        attempts = progress.attempts(listener.title)
        call = Call(lease, listener, attempts, settings, alias, escaping)

        def write(decision: Decision, call: Call = call) -> bool:
            progress.note(call.listener.title, decision, now())
            return call.write_progress(progress.text)

        decision = call.run(write=write)
        if decision is LOST:
            return decision
        error = decision.error or error
        if not decision.written:
            progress.note(listener.title, decision, now())
    return progress.decision([each.title for each in listeners], lease.event, now(), error)


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
    wait = min(max(grace - lease.age, 0.1), grace / 20 + 1)
    return Decision(status=Status.NEW, delay=wait, error=clean(str(error)), outcome="deferred")


def faulty() -> Decision:
    """Decide on a delivery that failed by no fault of its listeners: look again later."""
    return Decision(status=Status.NEW, delay=FAULT_DELAY, outcome="deferred")


def lost(rescues: int) -> Decision:
    """Decide on an event whose workers were lost again and again: it is not run any more."""
    return dead(f"lost {rescues} workers")
