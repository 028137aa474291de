"""The views of ``outbox_status``: what each asks of a database, and what its check finds wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..conf import current
from ..exceptions import InvalidEvent
from ..inspection import in_thread
from ..inspection.fate import fate
from ..inspection.listeners import (
    describe_listeners,
    different_listeners,
    live_registries,
    without_listener,
)
from ..inspection.overview import status
from ..inspection.problems import Limits
from ..inspection.queues import deferred_messages, load_backlog
from ..inspection.workers import clock_and_workers
from ..relays.relay import Relay
from .arguments import unknown_ids

Row = dict[str, Any]
Answers = Mapping[str, Row]  # by alias


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One view of the outbox, as plain values."""

    query: Callable[[str], Row]  # asks the database with this alias
    faults: Callable[[Answers], Iterable[str]]  # what ``--check`` finds wrong
    head: Row = field(default_factory=dict)  # what does not depend on a database


def status_view(limits: Limits) -> View:
    """Return the view of events, streams, queues, pauses and workers."""

    def faults(answers: Answers) -> Iterator[str]:
        for alias, report in answers.items():
            # Without any worker, delivery may be up to "outbox_worker --once".
            bad = [each for each in report["problems"] if each.get("is_bad")]
            yield from (f"{alias}: {each['text']}" for each in bad if each["kind"] != "no_worker")

    return View(query=lambda alias: status(alias, limits), faults=faults)


def listeners_view() -> View:
    """Return the view of this code's listeners, of what none of them gets, and of the workers'."""

    def query(alias: str) -> Row:
        live = live_registries(alias)
        return {
            "without_listener": without_listener(alias, live),
            "different_listeners": different_listeners(live),
        }

    def faults(answers: Answers) -> Iterator[str]:
        rows = [row for answer in answers.values() for row in answer["without_listener"]]
        for is_here, text in ((False, "no listener for"), (True, "no live worker has")):
            found = {
                each["listener"] or each["event_type"]
                for each in rows
                if each["unsettled"] and each["is_here"] is is_here
            }
            if found:
                yield f"{text} {', '.join(sorted(found))}"

    return View(query=query, faults=faults, head={"listeners": describe_listeners()})


def event_view(event_id: str) -> View:
    """Return the view of one event; its fault is that no database has it."""

    def query(alias: str) -> Row:
        try:
            return {"deliveries": [each.as_row() for each in fate(event_id, using=alias)]}
        except InvalidEvent:  # no event has this id
            return {"deliveries": []}

    def faults(answers: Answers) -> Iterator[str]:
        if not any(each["deliveries"] for each in answers.values()):
            yield unknown_ids([event_id])

    return View(query=query, faults=faults, head={"event": event_id})


def relays_view(timeout: float, *, asks_brokers: bool) -> View:
    """Return the view of the relays, of what waits for each, and, if asked, of their brokers."""
    known = [*current().relays.values()]
    broken = _broker_faults([*map(Relay, known)], timeout) if asks_brokers else {}
    relays = [
        {
            "relay": each.name,
            "backend": each.BACKEND,
            "events": [*each.EVENTS],
            "to": each.shown_to,
            "format": each.FORMAT,
            "queue": each.title,
            **({"broker": broken[each.name] or "ok"} if asks_brokers else {}),
        }
        for each in known
    ]
    faults = [f"{name}: {fault}" for name, fault in broken.items() if fault]
    return View(query=_relay_rows, faults=lambda answers: faults, head={"relays": relays})


def _relay_rows(alias: str) -> Row:
    now, known = clock_and_workers(alias)
    rows, queues = [], {each.name: each for each in load_backlog(alias, now, known).queues}
    for each in [each for each in current().relays.values() if each.title in queues]:
        queue, row = queues[each.title], deferred_messages(alias, each, now)
        breaker = queue.holds.get("breaker")
        away = breaker.reason.removeprefix(f"{each.title}: ") if breaker else ""
        rows.append(
            {
                "relay": each.name,
                "due": queue.due,
                "oldest_due_age": queue.oldest_due_age,
                "workers": queue.workers,
                "paused": "queue" in queue.holds,
                "away_since": breaker and breaker.since,
                "held": queue.held,
                **row,
                "reason": away or row["reason"],
            }
        )
    return {"waiting": rows}


def _broker_faults(relays: list[Relay], timeout: float) -> dict[str, str | None]:
    """Check all brokers at once; return what is wrong by name, None if nothing is."""
    checks = {
        each.settings.name: in_thread("outbox-broker-check", partial(_check, each))
        for each in relays
    }
    wait(checks.values(), timeout)
    found: dict[str, str | None] = {}
    for name, result in checks.items():
        error = result.exception() if result.done() else f"no answer within {timeout:g} s"
        found[name] = None if error is None else str(error) or type(error).__name__
    return found


def _check(relay: Relay) -> None:
    try:
        relay.check()
    finally:
        relay.close()
