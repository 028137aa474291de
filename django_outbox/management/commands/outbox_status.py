"""``manage.py outbox_status``: show the state of the outbox to people, monitors and probes."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import DatabaseError, router
from django.utils import timezone

from ...conf import current
from ...inspection.status import Limits, Report, status, violations
from ...models import OutboxEvent, missing_table
from ..arguments import (
    add_databases,
    add_format,
    duration,
    non_negative_int,
    positive_duration,
    share,
)
from ..deadline import call_with_timeout
from ..examples import ExampleCommand

UNWELL, NO_ANSWER = 1, 2
MAX_AGE = 60.0  # seconds that the oldest due event may have waited
CLEAR = "\x1b[H\x1b[2J"  # cursor home, screen empty

Reports = dict[str, Report]  # by alias


class Command(ExampleCommand):
    help = (
        "Shows what is in the outbox and which workers are alive. With --check the exit code is "
        "0 if all is well, 1 if a limit is passed or a worker was lost in the last 5 minutes, 2 if "
        "the database gave no answer."
    )
    examples = {
        "": "what waits, what is dead, which workers are alive",
        "--check --max-dead 0": "for an alert: exit with 1 if something is wrong",
    }
    requires_system_checks = []  # probes run this often

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_databases(parser, "ask")
        add_format(parser)
        add = parser.add_argument
        add("--check", action="store_true", help="compare with the limits")
        add(
            "--max-lag",
            "--max-age",
            dest="max_age",
            type=duration,
            metavar="DURATION",
            help="that the oldest due event may have waited (default: 1m)",
        )
        add(
            "--max-dead-share",
            type=share,
            metavar="PERCENT",
            help="of the events that ended in the last 5 minutes (default: 10)",
        )
        add("--max-due", type=non_negative_int, metavar="N", help="events and streams that are due")
        add("--max-dead", type=non_negative_int, metavar="N", help="dead events")
        add("--max-blocked", type=non_negative_int, metavar="N", help="streams that are blocked")
        add("--min-workers", type=non_negative_int, metavar="N", help="live workers")
        add(
            "--timeout",
            type=positive_duration,
            default=10.0,
            metavar="DURATION",
            help="how long to wait for an answer (default: 10s)",
        )
        add(
            "--watch",
            nargs="?",
            type=positive_duration,
            const=2.0,
            metavar="DURATION",
            help="refresh at this interval, such as 2s, until Ctrl-C",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["watch"] and options["check"]:
            raise CommandError("--check and --watch cannot be combined.")
        limits = {name: options[name] for name in Limits.__dataclass_fields__}
        given = {name: value for name, value in limits.items() if value is not None}
        if given and not options["check"]:
            names = ", ".join(f"--{each.replace('_', '-')}" for each in given)
            raise CommandError(f"{names}: expected together with --check, which compares.")
        aliases = [*dict.fromkeys(options["databases"] or [router.db_for_write(OutboxEvent)])]
        if options["watch"]:
            self._watch(aliases, options)
            return
        reports = {alias: _fetch(alias, options["timeout"]) for alias in aliases}
        self.stdout.write(_text(reports, options["format"]))
        if options["check"]:
            expected = Limits(**{"max_age": MAX_AGE, **given})
            found = [
                f"{alias}: {fault}"
                for alias, report in reports.items()
                for fault in violations(report, expected)
            ]
            if found:
                raise CommandError("\n".join(found), returncode=UNWELL)

    def _watch(self, aliases: list[str], options: dict[str, Any]) -> None:
        """Print the status until Ctrl-C. Go on if a database does not answer: it may next time."""
        is_page = options["format"] == "table"
        clear = CLEAR if is_page and self.stdout.isatty() else ""
        try:
            while True:
                try:
                    reports = {alias: _fetch(alias, options["timeout"]) for alias in aliases}
                    text = _text(reports, options["format"] if is_page else "line")
                except CommandError as error:
                    text = f"no answer: {error}" if is_page else json.dumps({"error": str(error)})
                head = f"{timezone.localtime():%H:%M:%S}\n" if is_page else ""
                self.stdout.write(f"{clear}{head}{text}")
                self.stdout.flush()
                time.sleep(options["watch"])
        except KeyboardInterrupt:
            return


def _fetch(alias: str, timeout: float) -> Report:
    try:
        return call_with_timeout(timeout, _report, alias)
    except (DatabaseError, ImproperlyConfigured, TimeoutError) as error:
        raise CommandError(f"{alias}: {error}", returncode=NO_ANSWER) from error


def _report(alias: str) -> Report:
    if missing := missing_table(alias):
        raise CommandError(missing, returncode=NO_ANSWER)
    return status(alias)


def _text(reports: Reports, form: str) -> str:
    if form != "table":
        return json.dumps(reports, indent=2 if form == "json" else None)
    return "\n".join(
        line for alias, report in reports.items() for line in (f"[{alias}]", *_lines(report))
    )


def _lines(report: Report) -> Iterator[str]:
    age, streams = report["oldest_pending_age"], report["streams"]
    yield f"events   {', '.join(_counts(report))}"
    yield f"due      {report['due']}" + ("" if age is None else f", the oldest for {age:.0f} s")
    yield f"leased   {report['leased']}"
    yield f"streams  {streams['due']} due, {streams['leased']} leased, {streams['blocked']} blocked"
    for each in streams["heads"]:
        when = each["next_try"] or "when it is replayed or discarded"
        yield (
            f"  {each['key']}: {each['event_type']} {each['event_id']} {each['status']}, "
            f"{each['backlog']} wait, next try {when}"
        )
    yield from _queue_lines(report["queues"])
    for each in report["paused"]:
        end = f" until {each['until']}" if each["until"] else ""
        reason = f": {each['reason']}" if each["reason"] else ""
        yield f"paused   {each['kind']} {each['name']} for {each['age']:.0f} s{end}{reason}"
    lease, lost = current().LEASE, report["lost_workers"]
    running = [each for each in report["workers"] if each["heartbeat_age"] <= lease]
    expected = f" of {len(running) + len(lost)} expected" if lost else ""
    yield f"workers  {len(running)}{expected}"
    for each in [*running, *lost]:
        yield f"  {each['id']} heartbeat {each['heartbeat_age']:.0f} s ago"
    for each in report["dead"]:
        yield f"dead     {each['count']} {each['event_type']}: {each['error'] or 'no error text'}"


def _queue_lines(queues: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each queue, unless ``default`` is the only one and is open."""
    if len(queues) == 1 and not any(
        {"paused", "breaker"} & each.keys() for each in queues.values()
    ):
        return
    for name, each in queues.items():
        yield f"queue    {name}: {', '.join(_queue_facts(each))}"


def _queue_facts(each: dict[str, Any]) -> Iterator[str]:
    age, breaker = each["oldest_due_age"], each.get("breaker")
    yield f"{each['due']} due" + ("" if age is None else f", the oldest for {age:.0f} s")
    yield "no live worker serves it" if each["unserved"] else f"workers {each['workers']}"
    if "configured" in each:
        yield 'not in OUTBOX["QUEUES"]'
    if "paused" in each:
        yield "paused"
    if breaker:
        yield f"breaker open until {breaker['until']}: {breaker['reason']}"


def _counts(report: Report) -> Iterator[str]:
    for name, count in report["counts"].items():
        is_estimate, is_part = name in report["estimated"], name in report["at_least"]
        word = "about " if is_estimate else "at least " if is_part else ""
        yield f"{word}{count} {name}"
