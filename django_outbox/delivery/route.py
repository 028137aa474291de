"""Routes: which listener an event is for, its payload as that listener gets it, or why not now."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache

from .. import hooks
from ..conf import Settings, current
from ..exceptions import PayloadError, UnroutableEvent
from ..listeners import registry
from ..listeners.outcomes import DISCARDED, DONE, Decision, Status
from ..listeners.queues import is_published
from ..listeners.registry import Listener
from ..models import live_workers
from ..models.pause_queryset import holding
from ..sql.values import Pauses
from .call import ends_drain
from .decide import clean, dead, describe, failed, name
from .lease import Lease

logger = logging.getLogger("django_outbox")

# For an event that a worker had claimed when the pause began: the poll after this parks it.
PAUSED = Decision(status=Status.NEW, delay=1.0, outcome="deferred")  # seconds


def batch_listener(lease: Lease) -> Listener | None:
    """Return the event's listener if it takes batches, else None."""
    found = registry.by_title(lease.listener)
    return found if found is not None and found.batching is not None else None


def batch_size(listener: Listener, lease: Lease) -> int:
    """Return in how large a batch a batch listener may get this event."""
    assert listener.batching is not None
    if lease.rescues:  # it may have killed a worker
        return 1
    if not lease.attempts:
        return listener.batching.size
    policy = listener.retry or hooks.retry_policy()
    most = policy.max_attempts or current().MAX_ATTEMPTS
    return listener.batching.size_after(lease.attempts, most)


def is_async(lease: Lease) -> bool:
    """Return whether to deliver on the event loop: its listener is ``async def``, not atomic."""
    found = registry.by_title(lease.listener)
    return found is not None and found.is_awaited


def routed(
    lease: Lease, settings: Settings, pauses: Pauses, alias: str, *, check_only: bool = False
) -> Listener | Decision:
    """Decode and route; return a decision for what cannot be delivered, or not now.

    ``check_only``: check that the payload can be decoded, and leave that to its first access.
    """
    if pauses and holding(pauses, lease.event_type, lease.listener, lease.key) is not None:
        return PAUSED
    event = lease.event
    try:
        # Here, so that damaged JSON is dead, and not retried.
        event.read_row(check_only=check_only)
    except PayloadError as error:
        return dead(describe(error), kind=name(error))
    return registry.by_title(lease.listener) or unroutable(lease, settings, alias)


def prepare(lease: Lease, listener: Listener, alias: str) -> BaseException | None:
    """Have an event as its listener gets it; return an error if its payload does not fit."""
    event = lease.event
    event.set_listener(listener.title, alias)
    if listener.payload_type is None:
        return None
    try:
        event.convert_payload(listener.payload_type)
    except BaseException as error:  # the class runs its own code
        if ends_drain(error):
            raise
        return error
    return None


def unroutable(lease: Lease, settings: Settings, alias: str) -> Decision:
    """Decide on an event that has no listener, or one that this process does not have.

    Within the grace period it is deferred: in a rolling deploy only newer processes may know it. It
    does not end while a live worker has its listener. Afterwards it is dead if no other listener
    was given the event, and else discarded: it is what a removed listener did not get.
    """
    title, error = lease.listener, UnroutableEvent(_no_listener(lease, settings))
    decision = dead(describe(error), kind=name(error))
    if settings.UNROUTABLE == "ignore":
        decision = DONE
    elif settings.UNROUTABLE == "retry":
        policy, executions = hooks.retry_policy(), lease.attempts + 1
        decision = failed(error, executions, policy, settings.MAX_ATTEMPTS)
    elif lease.age < settings.UNROUTABLE_GRACE:
        return _deferred(lease, error, settings.UNROUTABLE_GRACE)
    if decision.delay is not None or title is None:
        return decision
    if is_published(title, live_workers(alias)):
        return _deferred(lease, error, settings.UNROUTABLE_GRACE)
    if decision is DONE or len((lease.routes or "").split()) == 1:
        return decision
    text = clean(f"{DISCARDED} {decision.error}")
    return replace(decision, status=Status.DONE, error=text, outcome="discarded")


def _no_listener(lease: Lease, settings: Settings) -> str:
    kind, where = lease.event_type, f"a module named {settings.LISTENER_MODULE!r}"
    near = f"Registered nearby: {registry.similar_types(kind)}."
    if lease.listener is None:
        return (
            f"No listener for event type {kind!r} of aggregate type {lease.aggregate_type!r}. "
            f"{near} Expected a listener in {where} of an installed app."
        )
    return (
        f"No listener {lease.listener!r}, which this event of type {kind!r} is for. {near} "
        f"Expected it in {where} of an installed app; if it was renamed, add formerly="
        f"[{lease.listener!r}] to the listener."
    )


def _deferred(lease: Lease, error: UnroutableEvent, grace: float) -> Decision:
    """Decide to wait for a worker that has the listener; ``grace`` is in seconds."""
    if lease.key is not None and lease.stream is not None:
        _warn_of_blocked_stream(lease.key, lease.event_type, lease.listener, lease.event_id)
    left, longest = grace - lease.age, grace / 20 + 1
    delay = min(max(left, 0.1), longest) if left > 0 else longest
    return Decision(
        status=Status.NEW,
        delay=delay,
        error=clean(str(error)),
        kind=name(error),
        outcome="deferred",
    )


@lru_cache(maxsize=1000)  # so that it warns once
def _warn_of_blocked_stream(key: str, event_type: str, listener: str | None, event_id: str) -> None:
    logger.warning(
        "stream blocked: its first event has no listener and waits for UNROUTABLE_GRACE "
        "event_id=%s event_type=%s listener=%r",
        event_id,
        event_type,
        listener,
    )


def dead_after_rescues(rescues: int) -> Decision:
    """Decide on an event that too many workers were lost with: it is dead."""
    reason = f"lost {rescues} workers"
    return dead(reason, kind=reason)
