"""Deliver an event that a worker has taken: decode, route, call the listeners, decide."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import replace
from functools import lru_cache

from .. import hooks
from ..clocks import monotonic
from ..conf import Settings, current
from ..exceptions import PayloadError, UnroutableEvent
from ..listeners import registry
from ..listeners.outcomes import DONE, Decision, Status
from ..listeners.progress import NEW_ENTRY, entries
from ..listeners.queues import (
    may_be_batched,
    next_due,
    only_batch_listener,
    queue_of,
    route_is_async,
)
from ..listeners.registry import Listener
from .call import Call
from .decide import clean, dead, describe, failed, name
from .fanout import FanOut
from .interceptors import Escaping
from .lease import Lease
from .paused import PAUSED, is_paused
from .scope import EVERYTHING, Scope
from .timeouts import TimedCall

logger = logging.getLogger("django_outbox")


def may_continue(lease: Lease) -> bool:
    return True


def deliver(
    lease: Lease,
    *,
    alias: str,
    escaping: Escaping = (),
    between: Callable[[Lease], bool] = may_continue,
    scope: Scope = EVERYTHING,
) -> Decision:
    """Call the event's listeners and decide; what they raise is a result, unless ``escaping``.

    ``between`` is called after a listener, before another one or a fallback. It tidies up, and
    returns whether another listener may start. Listeners outside ``scope`` are not called.
    Raises ``CallAbandoned`` if a call returns after it was abandoned; see ``finish``.
    """
    settings = current()
    listeners = routed(lease, settings, scope)
    if isinstance(listeners, Decision):
        return listeners
    lease.waited = lease.waited or monotonic() - lease.claimed_at  # until its first listener
    if is_single(lease, listeners, scope):
        event = lease.event
        event.set_listener(listeners[0].title, alias)
        attempts = lease.attempts
        call = Call(
            lease,
            listeners[0],
            event,
            attempts,
            settings,
            alias,
            between,
            escaping,
            report=scope.report,
        )
        if call.timeout is None:
            decision = call.run()
        else:
            call.context = context = copy_context()
            decision = context.run(call.run)
        if decision.delay is not None:
            decision = in_queue_of(listeners[0], decision, lease)
    else:
        decision = FanOut(lease, listeners, settings, alias, between, escaping, scope).run()
    lease.drop_event()  # not if the call was abandoned: another thread has the lease then
    return decision


def finish(timed: TimedCall, *, between: Callable[[Lease], bool]) -> Decision:
    """Continue a delivery whose thread was abandoned in this call, which counts as failed.

    What it calls has its timeout, too, and may be abandoned in turn.
    """
    assert isinstance(timed.call, Call)
    call, fan_out = timed.call.copy_for_thread(between), timed.call.fan_out
    assert call.context is not None
    decision = call.context.run(call.finish, timed.seconds)
    if fan_out is not None:
        fan_out.between = between
        fan_out.record(call.listener.title, decision)
        decision = fan_out.run()
    else:
        decision = in_queue_of(call.listener, decision, call.lease)
    call.lease.drop_event()
    return decision


async def adeliver(
    lease: Lease,
    *,
    alias: str,
    between: Callable[[Lease], Awaitable[bool]],
    scope: Scope = EVERYTHING,
) -> Decision:
    """Await an event's listeners in ``scope``, all ``async def`` (see ``is_async``); decide."""
    settings = current()
    listeners = routed(lease, settings, scope)
    if isinstance(listeners, Decision):
        return listeners
    lease.waited = lease.waited or monotonic() - lease.claimed_at  # until its first listener
    try:
        if is_single(lease, listeners, scope):
            event = lease.event
            event.set_listener(listeners[0].title, alias)
            call = Call(
                lease,
                listeners[0],
                event,
                event.attempts,
                settings,
                alias,
                between,
                report=scope.report,
            )
            return in_queue_of(listeners[0], await call.arun(), lease)
        fan_out = FanOut(lease, listeners, settings, alias, between, scope=scope)
        for call in fan_out.calls():
            if fan_out.has_started and not await between(lease):
                break
            task = asyncio.create_task(call.arun(), name=call.listener.title)
            fan_out.record(call.listener.title, await task)
        return fan_out.decision
    finally:
        lease.drop_event()


def batch_listener(lease: Lease, scope: Scope = EVERYTHING) -> Listener | None:
    """Return the batch listener to be called next with this event; None if it is an ordinary one.

    Only listeners in the queues of ``scope``, and not paused, are considered.
    """
    if not may_be_batched(lease.aggregate_type, lease.event_type):
        return None
    only = only_batch_listener(lease.aggregate_type, lease.event_type)
    if only is not None and lease.progress is None:
        return only
    here = [
        each
        for each in registry.route(lease.aggregate_type, lease.event_type)
        if scope.may_call(each)
    ]
    found = next_due(here, entries(lease.progress) or {}, lease.database_now)
    return found[0] if found is not None and found[0].batching is not None else None


def batch_size(listener: Listener, lease: Lease) -> int:
    """Return in how large a batch a batch listener may get this event."""
    assert listener.batching is not None
    if lease.rescues:  # it may have killed a worker
        return 1
    attempts = lease.attempts
    if attempts and lease.progress is not None:
        attempts = (entries(lease.progress) or {}).get(listener.title, NEW_ENTRY).attempts
    if not attempts:
        return listener.batching.size
    policy = listener.retry or hooks.retry_policy()
    return listener.batching.size_after(attempts, policy.max_attempts or current().MAX_ATTEMPTS)


def is_async(lease: Lease) -> bool:
    """Return whether to deliver on the event loop: all listeners are ``async def``, not atomic."""
    return route_is_async(lease.aggregate_type, lease.event_type, lease.queue)


def in_queue_of(listener: Listener, decision: Decision, lease: Lease) -> Decision:
    """Return the decision; if the event is due again, with its queue, unless the row has it."""
    if decision.delay is None or queue_of(listener) == lease.queue_in_row:
        return decision
    return replace(decision, queue=queue_of(listener))


def is_single(lease: Lease, listeners: tuple[Listener, ...], scope: Scope) -> bool:
    """Return whether the event has one listener only, which is to be called here and now."""
    return len(listeners) == 1 and lease.progress is None and scope.includes(listeners[0])


def routed(
    lease: Lease, settings: Settings, scope: Scope, *, check_only: bool = False
) -> tuple[Listener, ...] | Decision:
    """Decode and route; return a decision for what cannot be delivered, or not now.

    ``check_only``: check that the payload can be decoded, and leave that to its first access.
    """
    pauses = scope.pauses
    if pauses and is_paused(
        pauses, lease.event_type, lease.aggregate_type, lease.progress, lease.key
    ):
        # What its listeners did before it came to this queue is not in its row yet.
        is_kept = lease.progress == lease.progress_in_row
        return PAUSED if is_kept else replace(PAUSED, progress=lease.progress)
    try:
        # Here, so that damaged JSON is dead, and not retried.
        lease.event.check_row() if check_only else lease.event.decode_row()
    except PayloadError as error:
        return dead(describe(error), kind=name(error))
    listeners = registry.route(lease.aggregate_type, lease.event_type)
    return listeners or unroutable(lease, settings)


def unroutable(lease: Lease, settings: Settings) -> Decision:
    """Decide on an event without a listener.

    Within the grace period it is deferred: in a rolling deploy only newer processes may know it.
    """
    event, grace = lease.event, settings.UNROUTABLE_GRACE
    if settings.UNROUTABLE == "ignore":
        return DONE
    error = UnroutableEvent(
        f"No listener for event type {event.event_type!r} of aggregate type "
        f"{event.aggregate_type!r}. Registered nearby: {registry.similar_types(event.event_type)}. "
        f"Expected a listener in a module named {settings.LISTENER_MODULE!r} of an installed app."
    )
    if settings.UNROUTABLE == "retry":
        return failed(error, event.attempts + 1, hooks.retry_policy(), settings.MAX_ATTEMPTS)
    if lease.age >= grace:
        return dead(describe(error), kind=name(error))
    if lease.key is not None:
        _warn_of_blocked_stream(lease.key, event.event_type, event.event_id)
    wait = min(max(grace - lease.age, 0.1), grace / 20 + 1)
    return Decision(
        status=Status.NEW, delay=wait, error=clean(str(error)), kind=name(error), outcome="deferred"
    )


@lru_cache(maxsize=1000)  # so that it warns once
def _warn_of_blocked_stream(key: str, event_type: str, event_id: str) -> None:
    logger.warning(
        "stream blocked: its first event has no listener and waits for UNROUTABLE_GRACE "
        "event_id=%s event_type=%s",
        event_id,
        event_type,
    )


def dead_after_rescues(rescues: int) -> Decision:
    """Decide on an event that too many workers were lost with: it is dead."""
    reason = f"lost {rescues} workers"
    return dead(reason, kind=reason)
