"""The queue of each listener, and which rows an event gets: one for each of its listeners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..conf import current
from ..events import UNROUTED_LANE, Event
from ..queue_settings import DEFAULT_QUEUE, parked_by
from . import registry
from .registry import Listener, until_registered


class Route(NamedTuple):
    """A row of an event: the delivery to one listener, or one that is not routed yet."""

    title: str | None  # of the listener; None: not routed
    digest: str
    queue: str
    lane: str
    former: tuple[str, ...] = ()  # digests of the titles that the listener had before

    @property
    def entry(self) -> str:
        """What a receipt has of it: all its digests, so that workers of before a rename know it."""
        return "/".join((self.digest, *self.former))


UNROUTED = Route(None, "", DEFAULT_QUEUE, UNROUTED_LANE)


def queue_of(listener: Listener) -> str:
    """Return a listener's queue; ``default`` if its own is not in ``OUTBOX["QUEUES"]``."""
    return listener.queue if listener.queue in _ranks() else DEFAULT_QUEUE


def expected_queue(title: str | None, queue: str) -> str:
    """Return the queue of a row: that of its listener if this process has it, else ``queue``."""
    if found := registry.by_title(title):
        return queue_of(found)
    return queue if parked_by(queue) is None else DEFAULT_QUEUE


def row_id(event_id: str, digest: str) -> str:
    """Return the id of a row that is not its event's first."""
    return f"{event_id}.{digest}"


@until_registered
def routes_of(aggregate_type: str, event_type: str) -> tuple[Route, ...]:
    """Return the rows of an event by the listeners of this process; without any, one not routed.

    ``default`` comes first, then the others in the order of ``OUTBOX["QUEUES"]``.
    """
    found = [
        Route(
            each.title,
            each.digest,
            queue_of(each),
            each.lane,
            tuple(registry.digest(title) for title in each.formerly),
        )
        for each in registry.route(aggregate_type, event_type)
    ]
    ranks = _ranks()
    return tuple(sorted(found, key=lambda each: ranks[each.queue])) or (UNROUTED,)


def routes_of_new(event: Event) -> tuple[Route, ...]:
    """Return the rows of an event that is written in this process."""
    settings = current()
    if settings.MODE == "writer_only" or settings.ROUTE == "worker":
        return (UNROUTED,)
    return routes_of(event.aggregate_type, event.event_type)


@until_registered
def receipt_of(aggregate_type: str, event_type: str) -> str:
    """Return the receipt in the rows of an event: the entries of its listeners, sorted."""
    return " ".join(sorted(each.entry for each in routes_of(aggregate_type, event_type))).strip()


@until_registered
def missing_of(aggregate_type: str, event_type: str, receipt: str) -> tuple[Route, ...]:
    """Return the rows that an event with this receipt has not been given, but should have."""
    given = {*receipt.replace("/", " ").split()}
    return tuple(
        each
        for each in routes_of(aggregate_type, event_type)
        if each.title is not None and given.isdisjoint((each.digest, *each.former))
    )


@until_registered
def published() -> Mapping[str, Any]:
    """Return what the row of a worker says of its listeners: their titles, and a digest of all."""
    titles = sorted(each.title for each in registry.listeners())
    former = sorted(title for each in registry.listeners() for title in each.formerly)
    return {
        "listeners": titles,
        "formerly": former,
        "registry": registry.digest("\n".join([*titles, "", *former])),
    }


def is_published(title: str, published_by: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether one of these workers has the listener with this title, or with it before."""
    return any(
        title in (*each.get("listeners", ()), *each.get("formerly", ())) for each in published_by
    )


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
def _ranks() -> Mapping[str, int]:
    return {name: rank for rank, name in enumerate(current().queues)}
