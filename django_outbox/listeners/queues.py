"""The queue that an event waits in: that of the listener to be called next."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from ..conf import current
from ..events import stored_instant
from ..queue_settings import DEFAULT_QUEUE
from . import registry
from .progress import NEW_ENTRY, Entry, entries
from .registry import Listener, until_registered

NO_QUEUES: frozenset[str] = frozenset()


def queue_of(listener: Listener) -> str:
    """Return a listener's queue; ``default`` if its own is not in ``OUTBOX["QUEUES"]``."""
    return listener.queue if listener.queue in _ranks() else DEFAULT_QUEUE


def route_in(
    aggregate_type: str, event_type: str, queue: str | None = None
) -> tuple[Listener, ...]:
    """Return an event's listeners that belong to ``queue``; None: all of them."""
    found = registry.route(aggregate_type, event_type)
    return found if queue is None else tuple(each for each in found if queue_of(each) == queue)


@until_registered
def route_is_async(aggregate_type: str, event_type: str, queue: str) -> bool:
    """Return whether the listeners of an event in ``queue`` can be awaited on the event loop.

    Batch listeners do not count: each of their calls is a delivery of its own.
    """
    found = [each for each in route_in(aggregate_type, event_type, queue) if not each.batching]
    return bool(found) and all(map(can_be_awaited, found))


def can_be_awaited(listener: Listener) -> bool:
    """Return whether a listener can be awaited on the event loop."""
    return listener.is_async and not listener.atomic


@until_registered
def may_be_batched(aggregate_type: str, event_type: str) -> bool:
    """Return whether any listener of this event is a batch listener."""
    return any(each.batching for each in registry.route(aggregate_type, event_type))


@until_registered
def only_batch_listener(aggregate_type: str, event_type: str) -> Listener | None:
    """Return the listener of this event if it has one only, and that is a batch listener."""
    found = registry.route(aggregate_type, event_type)
    return found[0] if len(found) == 1 and found[0].batching else None


@until_registered
def batch_room(queue: str) -> int:
    """Return how many events make a whole batch for each batch listener of a queue, at least 1."""
    sizes = [
        each.batching.size
        for each in registry.listeners()
        if each.batching and queue_of(each) == queue
    ]
    return max(sum(sizes), 1)


@until_registered
def has_only_batches(queue: str) -> bool:
    """Return whether all listeners of a queue are batch listeners."""
    return all(each.batching for each in registry.listeners() if queue_of(each) == queue)


@until_registered
def queues_of(aggregate_type: str, event_type: str) -> tuple[str, ...]:
    """Return the queues of an event's listeners, the one to begin with first.

    ``default`` comes first, then the others in the order of ``OUTBOX["QUEUES"]``.
    """
    found = {queue_of(each) for each in registry.route(aggregate_type, event_type)}
    return tuple(sorted(found, key=_ranks().__getitem__)) or (DEFAULT_QUEUE,)


def first_queue(aggregate_type: str, event_type: str) -> str:
    """Return the queue that a new event waits in."""
    return queues_of(aggregate_type, event_type)[0]


def next_queue(
    aggregate_type: str,
    event_type: str,
    progress: str | None,
    now: Any,
    closed: Collection[str] = NO_QUEUES,
) -> str:
    """Return the queue that a due event belongs to, with its ``progress`` as stored.

    ``now`` is the database's clock, as its driver returns it. ``closed`` queues are paused, so they
    come last.
    """
    queues = queues_of(aggregate_type, event_type)
    if len(queues) == 1:
        return queues[0]
    listeners = registry.route(aggregate_type, event_type)
    found = next_due(listeners, entries(progress) or {}, stored_instant(now), closed)
    return queue_of(found[0]) if found else queues[0]


def next_due(
    listeners: Sequence[Listener],
    reached: Mapping[str, Entry],
    now: datetime | None,
    closed: Collection[str] = NO_QUEUES,
) -> tuple[Listener, datetime | None] | None:
    """Return the listener to be called next, and when; None as the time: it is due by ``now``.

    Of those that are due, it is one of the first queue. Return None if there is none left.
    """
    left = [
        (each, entry)
        for each in listeners
        if (entry := reached.get(each.title, NEW_ENTRY)).state == "due"
    ]
    left = [each for each in left if queue_of(each[0]) not in closed] or left
    ranks = _ranks()
    due = [each for each, entry in left if entry.at is None or now is None or entry.at <= now]
    if due:
        return min(due, key=lambda each: ranks[queue_of(each)]), None
    times = [(entry.at, ranks[queue_of(each)], each) for each, entry in left if entry.at]
    if not times:
        return None
    at, _, following = min(times, key=lambda each: each[:2])
    return following, at


@until_registered
def _ranks() -> Mapping[str, int]:
    return {name: rank for rank, name in enumerate(current().queues)}
