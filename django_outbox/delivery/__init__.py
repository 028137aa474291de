"""One event from taken to decided: decode, route, call, answer, decide."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from asgiref.sync import async_to_sync

from .. import hooks, registry
from ..conf import Settings, current
from ..exceptions import PayloadError, UnroutableEvent
from ..outcomes import DONE, Decision, Status
from ..registry import Listener
from ..signals import announce, event_started
from .decide import clean, dead, decide, describe, failed
from .fanout import Progress
from .lease import Lease, take

__all__ = ["Lease", "decide", "deliver", "lost", "take"]

Escaping = tuple[type[BaseException], ...]


def deliver(lease: Lease, *, alias: str, escaping: Escaping = ()) -> Decision:
    """Call the event's listeners and decide; whatever they raise is an answer, or ``escaping``."""
    settings = current()
    try:
        if lease.fault is not None:
            raise lease.fault
        _ = lease.event.payload  # decoded here, so that damaged text is dead and not retried
    except PayloadError as error:
        return dead(describe(error))
    listeners = registry.route(lease.event.aggregate_type, lease.event.event_type)
    if not listeners:
        return unroutable(lease, settings)
    started = time.monotonic()
    try:
        if len(listeners) == 1 and lease.progress is None:
            attempts = lease.event.attempts
            return _call(lease, listeners[0], attempts, settings, alias, escaping)
        return _fan_out(lease, listeners, settings, alias, escaping)
    finally:
        lease.duration = time.monotonic() - started


def _fan_out(
    lease: Lease,
    listeners: tuple[Listener, ...],
    settings: Settings,
    alias: str,
    escaping: Escaping,
) -> Decision:
    """Run every listener whose time has come; one that failed does not keep the others."""
    progress, error, started = Progress(lease.progress), None, time.monotonic()

    def now() -> Any:
        return lease.now + timedelta(seconds=time.monotonic() - started)

    for listener in listeners:
        if progress.waits(listener.title, now()):
            continue
        attempts = progress.attempts(listener.title)
        decision = _call(lease, listener, attempts, settings, alias, escaping)
        error = decision.error or error
        progress.note(listener.title, decision, now())
    return progress.decision([each.title for each in listeners], lease.event, now(), error)


def _call(
    lease: Lease,
    listener: Listener,
    attempts: int,
    settings: Settings,
    alias: str,
    escaping: Escaping,
) -> Decision:
    announce(event_started, sender=alias, event=lease.event, listener=listener)
    answer: Any
    try:
        call = async_to_sync(listener.call) if listener.is_async else listener.call
        answer = call(lease.event)
    except escaping:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit too: no listener ends the worker
        answer = error
    return decide(
        answer,
        attempts=attempts,
        policy=listener.retry or hooks.retry_policy(),
        max_attempts=settings.MAX_ATTEMPTS,
        age=lease.age,
        defer_limit=settings.DEFER_LIMIT,
    )


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


def lost(rescues: int) -> Decision:
    """Decide on an event whose workers were lost again and again: it is not run any more."""
    return dead(f"lost {rescues} workers")
