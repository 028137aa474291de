"""The views of ``outbox_status``: what each asks of a database, shows to people, and checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from django.db import connections

from ..conf import current
from ..inspection.listeners import describe_listeners, unrouted_types
from ..inspection.queues import queue_states
from ..inspection.relays import held_messages, relay_states
from ..inspection.status import Limits, Report, status, violations
from ..inspection.workers import workers
from ..relays.relay import Relay
from ..sql import dialect_of
from .command import in_thread, table

LISTED: Final = ("event_type", "aggregate_type", "name", "queue", "listener", "options")
SECTIONS: Final = {  # rows of the status report, and the columns that people see
    "queues": (
        *("queue", "due", "oldest_due_age", "workers", "configured"),
        *("paused", "breaker_until", "breaker_reason"),
    ),
    "blocked_streams": ("key", "event_type", "event_id", "status", "backlog", "next_try"),
    "pauses": ("kind", "name", "age", "until", "reason"),
    "workers": ("id", "heartbeat_age", "lost", "queues"),
    "dead": ("count", "event_type", "error"),
}

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """A database did not answer, and why."""

    text: str


Answers = Mapping[str, Any]  # what ``query`` returned, or ``NoAnswer``, by alias


class View:
    """One view of the outbox; ``query`` returns plain values."""

    def query(self, alias: str) -> Any:
        raise NotImplementedError

    def report(self, answers: Answers) -> Any:
        """Return all that programs get."""
        return answers

    def head(self) -> Iterator[str]:
        """Yield the lines above those of the databases."""
        yield from ()

    def lines(self, answer: Any) -> Iterator[str]:
        """Yield the lines of one database."""
        raise NotImplementedError

    def faults(self, answers: Answers) -> Iterator[str]:
        """Yield what ``--check`` finds wrong in these answers."""
        raise NotImplementedError


def text_lines(view: View, answers: Answers) -> Iterator[str]:
    yield from view.head()
    for alias, answer in answers.items():
        yield f"[{alias}]"
        if isinstance(answer, NoAnswer):
            yield f"no answer: {answer.text}"
        else:
            yield from view.lines(answer)


def plain_report(view: View, answers: Answers) -> Any:
    return view.report(
        {
            alias: {"no_answer": each.text} if isinstance(each, NoAnswer) else each
            for alias, each in answers.items()
        }
    )


class StatusView(View):
    """Events, streams, queues, pauses and workers."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def query(self, alias: str) -> Report:
        return status(alias)

    def faults(self, answers: Answers) -> Iterator[str]:
        for alias, report in answers.items():
            yield from (f"{alias}: {fault}" for fault in violations(report, self._limits))

    def lines(self, answer: Report) -> Iterator[str]:
        age = answer["oldest_due_age"]
        yield f"events   {', '.join(_counts(answer))}"
        yield f"due      {answer['due']}{f', the oldest for {age:.0f} s' if age else ''}"
        yield f"leased   {answer['leased']}"
        yield f"blocked  {answer['blocked']}"
        for section, names in SECTIONS.items():
            if rows := answer[section]:
                yield from ("", f"{section.replace('_', ' ')}:", *table(rows, names))


def _counts(report: Report) -> Iterator[str]:
    for name, count in report["counts"].items():
        is_estimate, is_part = name in report["estimated"], name in report["at_least"]
        word = "about " if is_estimate else "at least " if is_part else ""
        yield f"{word}{count} {name}"


class ListenersView(View):
    """The listeners of this code, and the event types in the table that none of them gets."""

    def __init__(self) -> None:
        self._listeners = describe_listeners()

    def query(self, alias: str) -> Rows:
        return [asdict(each) for each in unrouted_types(alias)]

    def report(self, answers: Answers) -> Any:
        return {"listeners": self._listeners, "missing": answers}

    def faults(self, answers: Answers) -> Iterator[str]:
        rows = (each for rows in answers.values() for each in rows)
        if found := {each["event_type"] for each in rows if each["unsettled"]}:
            yield f"no listener for {', '.join(sorted(found))}"

    def head(self) -> Iterator[str]:
        if not self._listeners:
            yield "No listener is registered."
        yield from table(self._listeners, LISTED)

    def lines(self, answer: Rows) -> Iterator[str]:
        if answer:
            yield "Without a listener, among the newest events and those due first:"
            yield from table(answer)
        else:
            yield "Every event type that was seen has a listener."


class RelaysView(View):
    """The relays of ``OUTBOX["RELAYS"]``, what waits for each, and with a check their brokers."""

    def __init__(self, timeout: float, *, asks_brokers: bool) -> None:
        known = [*current().relays.values()]
        self._faults = _broker_faults([*map(Relay, known)], timeout) if asks_brokers else {}
        self._relays = [
            {
                "relay": each.name,
                "backend": each.BACKEND,
                "events": [*each.EVENTS],
                "to": each.shown_to,
                "format": each.FORMAT,
                "queue": each.title,
                **({"broker": self._faults[each.name] or "ok"} if asks_brokers else {}),
            }
            for each in known
        ]

    def query(self, alias: str) -> Rows:
        now = dialect_of(connections[alias]).clock(connections[alias])
        rows = []
        for each in relay_states(queue_states(alias, workers(alias, now))):
            breaker, held = each.queue.breaker, held_messages(alias, each.settings, now)
            row = {name: each.queue.as_row()[name] for name in ("due", "oldest_due_age", "workers")}
            rows.append(
                {
                    "relay": each.settings.name,
                    **row,
                    "paused": each.queue.is_paused,
                    "away_since": breaker and breaker.paused_at,
                    "held": held.count if held else 0,
                    "held_age": held and held.age,
                    "reason": each.away_reason or (held.reason if held else ""),
                }
            )
        return rows

    def report(self, answers: Answers) -> Any:
        return {"relays": self._relays, "databases": answers}

    def faults(self, answers: Answers) -> Iterator[str]:
        yield from (f"{name}: {fault}" for name, fault in self._faults.items() if fault)

    def head(self) -> Iterator[str]:
        if not self._relays:
            yield 'OUTBOX["RELAYS"] names no relay.'
        yield from table(self._relays)

    def lines(self, answer: Rows) -> Iterator[str]:
        yield from table(answer)


def _broker_faults(relays: list[Relay], timeout: float) -> dict[str, str | None]:
    """Check all brokers at once; return what is wrong by name, None if nothing is."""
    results = {
        each.settings.name: in_thread("outbox-broker-check", partial(_check, each))
        for each in relays
    }
    wait(results.values(), timeout)
    found: dict[str, str | None] = {}
    for name, result in results.items():
        error = result.exception() if result.done() else f"no answer within {timeout:g} s"
        found[name] = None if error is None else str(error) or type(error).__name__
    return found


def _check(relay: Relay) -> None:
    try:
        relay.check()
    finally:
        relay.close()
