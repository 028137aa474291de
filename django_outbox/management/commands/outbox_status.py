"""``manage.py outbox_status``: show the state of the outbox to people, monitors and probes."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import DatabaseError
from django.utils import timezone

from ...conf import current
from ...exceptions import InvalidEvent
from ...inspection import call_with_timeout, in_thread
from ...inspection.fate import fate
from ...inspection.listeners import (
    describe_listeners,
    different_listeners,
    live_registries,
    without_listener,
)
from ...inspection.overview import status
from ...inspection.problems import Limits
from ...inspection.queues import deferred_messages, load_backlog
from ...inspection.workers import clock_and_workers
from ...models import missing_table
from ...relays.relay import Relay
from .. import arguments as cli
from ..command import OutboxCommand, text_lines

UNWELL, NO_ANSWER = 1, 2  # exit codes
NO_ANSWER_KEY: Final = "no_answer"  # of a database; why
CLEAR: Final = "\x1b[H\x1b[2J"  # cursor home, screen empty
LIMITS: Final[cli.Options] = {
    "--max-lag": (cli.duration, "DURATION", "that the oldest due event has waited (default: 1m)"),
    "--max-held": (cli.duration, "DURATION", "that an event has been held (default: 15m)"),
    "--max-dead-share": (cli.share, "PERCENT", "of what ended in the last 5 minutes (default: 10)"),
    "--max-due": (cli.non_negative_int, "N", "events and streams that are due"),
    "--max-dead": (cli.non_negative_int, "N", "dead events"),
    "--max-blocked": (cli.non_negative_int, "N", "streams that are blocked"),
    "--min-workers": (cli.non_negative_int, "N", "live workers"),
}
VIEWS: Final[cli.Options] = {
    "--listeners": "show the listeners of this code, what has none, and where workers differ",
    "--relays": "show the relays, and what waits for each",
    "--event": (str, "EVENT_ID", "show for each listener what became of this event, or delivery"),
}
CHECK: Final = (
    "exit with 1 if a limit is exceeded; with --listeners if an event that is not done has none, "
    "or waits for one that no live worker has; "
    "with --relays if a broker, which is then asked, takes no messages"
)


class Command(OutboxCommand):
    help = (
        "Shows what is in the outbox and which workers are alive; or the listeners; or the relays; "
        "or what became of one event. "
        "With --check the exit code is 0 if all is well, 1 if something is wrong, 2 if a database "
        "gave no answer."
    )
    examples = {
        "": "what waits, what is dead, which workers are alive",
        "--check --max-dead 0": "for an alert: exit with 1 if something is wrong",
        "--listeners --check": "in a deploy: fail if an event waits for a listener that is gone",
        "--relays --check": "connect to each broker, and send nothing",
        "--event 01KAW3J5Q8ZV7N2M4X6R9T0BCD": "what became of an event, and what holds it back",
    }
    requires_system_checks = []  # probes run this often

    def add_arguments(self, parser: ArgumentParser) -> None:
        cli.add_databases(parser, "ask")
        cli.add_format(parser)
        views = parser.add_mutually_exclusive_group()
        cli.add_options(views, VIEWS)
        cli.add_options(parser, {"--check": CHECK, **LIMITS})
        kind, add = cli.positive_duration, parser.add_argument
        text = "how long to wait for each database, and for the brokers (default: 10s)"
        add("--timeout", type=kind, default=10.0, metavar="DURATION", help=text)
        text = "refresh at this interval, such as 2s, until Ctrl-C"
        add("--watch", nargs="?", type=kind, const=2.0, metavar="DURATION", help=text)

    def handle(self, *args: Any, **options: Any) -> None:
        _check_options(options)
        try:
            view, aliases = _view(options), cli.chosen_aliases(options)
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=NO_ANSWER) from error
        if options["watch"]:
            self._watch(view, aliases, options)
            return
        found = self._show(view, aliases, options)
        given = {alias: each for alias, each in found.items() if NO_ANSWER_KEY not in each}
        silent = [f"{a}: {each[NO_ANSWER_KEY]}" for a, each in found.items() if a not in given]
        is_asked = options["check"] or options["event"] is not None
        faults = [*silent, *(view.faults(given) if is_asked else ())]
        if faults:
            raise CommandError("\n".join(faults), returncode=NO_ANSWER if silent else UNWELL)

    def _show(self, view: View, aliases: list[str], options: dict[str, Any]) -> Answers:
        """Ask each database and print the answers: one that gives none does not hide others."""
        answers: dict[str, Row] = {}
        query = partial(_query, view)
        for alias in aliases:
            try:
                answers[alias] = call_with_timeout(options["timeout"], query, alias)
            except (DatabaseError, ImproperlyConfigured, TimeoutError) as error:
                answers[alias] = {NO_ANSWER_KEY: str(error)}
        report = {**view.head, "databases": answers}
        self.print(options["format"], report, text_lines(report))
        return answers

    def _watch(self, view: View, aliases: list[str], options: dict[str, Any]) -> None:
        """Print the view until Ctrl-C. Go on if a database does not answer: it may next time."""
        is_page = options["format"] == "table"
        given = options if is_page else {**options, "format": "line"}
        try:
            while True:
                if is_page:
                    clear = CLEAR if self.stdout.isatty() else ""
                    self.stdout.write(f"{clear}{timezone.localtime():%H:%M:%S}")
                self._show(view, aliases, given)
                self.stdout.flush()
                time.sleep(options["watch"])
        except KeyboardInterrupt:
            return


def _check_options(options: dict[str, Any]) -> None:
    for name in ("watch", "event"):
        if options[name] and options["check"]:
            raise CommandError(f"--check and --{name} cannot be combined.")
    names = [name for name in Limits.__dataclass_fields__ if options[name] is not None]
    given = [f"--{name.replace('_', '-')}" for name in names]
    if given and (options["listeners"] or options["relays"] or not options["check"]):
        raise CommandError(
            f"{', '.join(given)}: expected together with --check, and without --listeners and "
            "--relays."
        )


def _view(options: dict[str, Any]) -> View:
    if options["event"] is not None:
        return event_view(options["event"])
    if options["listeners"]:
        return listeners_view()
    if options["relays"]:
        return relays_view(options["timeout"], asks_brokers=options["check"])
    given = {name: options[name] for name in Limits.__dataclass_fields__}
    return status_view(Limits(**{k: v for k, v in given.items() if v is not None}))


def _query(view: View, alias: str) -> Row:
    missing = missing_table(alias)
    return {NO_ANSWER_KEY: missing} if missing else view.query(alias)


# -- views: what each asks of a database, and what its check finds wrong ---------------------------


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
            yield cli.unknown_ids([event_id])

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
