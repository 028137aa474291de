"""Registered listeners, events that do not have one, and whether a name of either is known."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from django.utils.translation import gettext

from ..conf import current
from ..events import stream_of
from ..listeners.callables import location, qualified_name
from ..listeners.outcomes import UNSETTLED, Status
from ..listeners.queues import published
from ..listeners.registry import ANY, Listener, by_title, listeners, route
from ..models import OutboxEvent, OutboxStream
from ..sql.values import CLOSING_KINDS
from .workers import WorkerInfo, clock_and_workers

KIND: Final = ("event_type", "aggregate_type", "listener")
MAX_EVENTS: Final = 10_000  # newest events that a command scans, and as many of those due first


def live_registries(alias: str) -> list[WorkerInfo]:
    """Return the live workers that say which listeners they have."""
    _now, known = clock_and_workers(alias)
    return [each for each in known if not each.is_silent and each.listeners is not None]


def without_listener(
    alias: str, live: Sequence[WorkerInfo], *, limit: int = MAX_EVENTS
) -> list[dict[str, Any]]:
    """Return what has no listener here, among the newest events and those due first.

    And what waits for a listener that no live worker has, if there are any. Each row has the number
    of deliveries among those scanned, and of these, the unsettled ones: new, to be retried, or
    dead. What has the most of them comes first. The scan is bounded: no index lists the types.
    """
    if current().MODE == "writer_only":  # another program reads the table
        return []
    events = OutboxEvent.objects.using(alias)
    newest = events.order_by("-pk")
    due_first = events.filter(available_at__isnull=False).order_by("available_at")
    rows = {
        row[0]: row[1:]
        for query in (newest, due_first)
        for row in query.values_list("pk", *KIND, "status")[:limit]
    }
    counts = Counter(row[:3] for row in rows.values())
    unsettled = Counter(row[:3] for row in rows.values() if row[3] != Status.DONE)
    pending = {row[:3] for row in rows.values() if row[3] in UNSETTLED}
    of_workers = {title for each in live for title in (*(each.listeners or ()), *each.formerly)}
    found = []
    for kind, events_found in counts.items():
        event_type, aggregate_type, title = kind
        here = bool(route(aggregate_type, event_type)) if title is None else by_title(title)
        is_served = not live or title is None or title in of_workers or kind not in pending
        if (here and is_served) or (title is not None and not unsettled[kind]):
            continue
        found.append(
            {
                **dict(zip(KIND, kind, strict=True)),
                "events": events_found,
                "unsettled": unsettled[kind],
                "is_here": bool(here),
            }
        )
    return sorted(found, key=lambda row: (-row["unsettled"], -row["events"], row["event_type"]))


def different_listeners(live: Sequence[WorkerInfo]) -> list[dict[str, Any]]:
    """Return the listeners that not all have: neither this process nor each of the live workers."""
    if {each.registry for each in live} <= {published()["registry"]}:
        return []
    here = {each.title for each in listeners()}
    found = []
    for title in sorted(here.union(*(each.listeners or () for each in live))):
        has = [each.id for each in live if title in (each.listeners or ())]
        lacks = [each.id for each in live if each.id not in has]
        if lacks or title not in here:
            found.append(
                {"listener": title, "is_here": title in here, "has_it": has, "lacks_it": lacks}
            )
    return found


def describe_listeners() -> list[dict[str, Any]]:
    """Return the registered listeners as plain values, in the order of the event types."""
    found = [_describe(each) for each in listeners()]
    return sorted(
        found, key=lambda each: (each["event_type"], each["aggregate_type"], each["name"])
    )


def _describe(each: Listener) -> dict[str, Any]:
    return {
        "event_type": each.event_type,
        "aggregate_type": "*" if each.aggregate_type is ANY else each.aggregate_type,
        "name": each.name,
        "queue": each.queue,
        "listener": qualified_name(each.call),
        "place": location(each.call),
        "options": [*_options(each)],
    }


def _options(each: Listener) -> Iterator[str]:
    """Yield the options of a listener that differ from the defaults."""
    yield from (name for name, on in (("async", each.is_async), ("atomic", each.atomic)) if on)
    if each.timeout is not None:
        yield f"timeout {each.timeout:g} s"
    if each.batching is not None:
        yield f"batch {each.batching.size}"
        if each.batching.within:
            yield f"within {each.batching.within:g} s"
        if each.batching.per_key > 1:
            yield f"per key {each.batching.per_key}"
    if each.retry is not None:
        yield f"retry {each.retry!r}"
    if each.formerly:
        yield f"formerly {', '.join(each.formerly)}"
    if each.fallback:
        yield f"fallback {qualified_name(each.fallback)}"


def _known_types(alias: str) -> set[str]:
    newest = OutboxEvent.objects.using(alias).order_by("-pk").values_list("event_type", flat=True)
    registered = (each for listener in listeners() for each in listener.types)
    return {*newest[:MAX_EVENTS], *(each for each in registered if "*" not in each)}


def unknown_name(alias: str, kind: str, name: str) -> str | None:
    """Return why the name is not known: neither registered nor seen. It may still appear."""
    if kind == "stream":
        known = OutboxStream.objects.using(alias).filter(pk=stream_of("", name)).exists()
        message = gettext("No event with the key %(name)r was written lately.")
        return None if known else message % {"name": name}
    if kind == "listener":
        found = listeners()
        message = gettext("No listener %(name)r is registered here.")
        named = [each.title for each in found if name in (each.name, qualified_name(each.call))]
        return _fault_unless_known(name, [t for each in found for t in each.titles], message, named)
    if kind in CLOSING_KINDS:  # pause_error() knows the queues
        return None
    message = gettext("No event type %(name)r is registered here or was seen lately.")
    return _fault_unless_known(name, sorted(_known_types(alias)), message)


def _fault_unless_known(
    name: str, known: list[str], message: str, near: list[str] | None = None
) -> str | None:
    if name in known:
        return None
    near = near or difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = [gettext("Did you mean %s?") % ", ".join(map(repr, near))] if near else []
    return " ".join([message % {"name": name}, *hint])
