"""Registered listeners, and a bounded scan for events that do not have a listener."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from .. import hooks
from ..conf import current
from ..listeners.outcomes import Status
from ..listeners.registry import ANY, Listener, listeners, location, qualified_name, route
from ..models import OutboxEvent

MAX_EVENTS: Final = 10_000  # newest events that a command scans, and as many of those due first


@dataclass(frozen=True, slots=True, kw_only=True)
class UnroutedType:
    """Events of one type that no listener of this process receives."""

    event_type: str
    aggregate_type: str
    events: int  # among those scanned
    unsettled: int  # of these: new, to be retried, or dead


def unrouted_types(alias: str, *, limit: int = MAX_EVENTS) -> list[UnroutedType]:
    """Return event types without a listener, among the newest events and those due first.

    Types with the most unsettled events come first. The scan is bounded: no index lists the types.
    """
    if current().MODE == "writer_only":  # another program reads the table
        return []
    events = OutboxEvent.objects.using(alias)
    newest = events.order_by("-pk")
    due_first = events.filter(available_at__isnull=False).order_by("available_at")
    rows = {
        row[0]: row[1:]
        for query in (newest, due_first)
        for row in query.values_list("pk", "event_type", "aggregate_type", "status")[:limit]
    }
    counts = Counter(row[:2] for row in rows.values())
    unsettled = Counter(row[:2] for row in rows.values() if row[2] != Status.DONE)
    found = [
        UnroutedType(event_type=kind, aggregate_type=of, events=n, unsettled=unsettled[kind, of])
        for (kind, of), n in counts.items()
        if not route(of, kind)
    ]
    return sorted(found, key=lambda each: (-each.unsettled, -each.events, each.event_type))


def describe_listeners() -> list[dict[str, Any]]:
    """Return the registered listeners as dicts, in the order of the event types."""
    found = [_describe(each) for each in listeners()]
    return sorted(
        found, key=lambda each: (each["event_type"], each["aggregate_type"], each["name"])
    )


def _describe(each: Listener) -> dict[str, Any]:
    batching = each.batching
    return {
        "event_type": each.event_type,
        "aggregate_type": "*" if each.aggregate_type is ANY else each.aggregate_type,
        "name": each.name,
        "queue": each.queue,
        "function": qualified_name(each.call),
        "place": location(each.call),
        "retry": repr(each.retry or hooks.retry_policy()),
        "own_retry": each.retry is not None,
        "timeout": each.timeout,
        "atomic": each.atomic,
        "is_async": each.is_async,
        "fallback": each.fallback and qualified_name(each.fallback),
        "batch": batching and batching.size,
        "within": batching and batching.within,
        "per_key": batching and batching.per_key,
    }


def listener_options(each: dict[str, Any]) -> Iterator[str]:
    """Yield the options of a described listener that differ from the defaults, as text."""
    if each["is_async"]:
        yield "async"
    if each["atomic"]:
        yield "atomic"
    if each["timeout"] is not None:
        yield f"timeout {each['timeout']:g} s"
    if each["batch"] is not None:
        yield f"batch {each['batch']}"
    if each["within"]:
        yield f"within {each['within']:g} s"
    if each["per_key"] is not None and each["per_key"] > 1:
        yield f"per key {each['per_key']}"
    if each["own_retry"]:
        yield f"retry {each['retry']}"
    if each["fallback"]:
        yield f"fallback {each['fallback']}"
