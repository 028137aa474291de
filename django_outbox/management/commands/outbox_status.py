"""``manage.py outbox_status``: how the outbox is doing, for people, monitors and probes."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, connections, router

from ...models import OutboxEvent, missing_table
from ...models.status import Limits, Report, faults, status

UNWELL, NO_ANSWER = 1, 2


class Command(BaseCommand):
    help = (
        "Tells what is in the outbox and who works on it. With --check the exit code is 0 if all "
        "is well, 1 if a limit is passed, 2 if the database gave no answer."
    )
    requires_system_checks = []  # a probe asks often

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--database", action="append", dest="databases", metavar="ALIAS",
            choices=tuple(connections), help="alias to ask; may be repeated",
        )  # fmt: skip
        parser.add_argument("--format", choices=("table", "json"), default="table")
        parser.add_argument("--check", action="store_true", help="compare with the limits")
        parser.add_argument(
            "--max-age", type=float, metavar="SECONDS", default=300.0,
            help="that the oldest due event may have waited (default: 300)",
        )  # fmt: skip
        parser.add_argument("--max-due", type=int, metavar="N", help="events and streams")
        parser.add_argument("--max-dead", type=int, metavar="N")
        parser.add_argument("--max-blocked", type=int, metavar="N", help="streams")
        parser.add_argument("--min-workers", type=int, metavar="N")

    def handle(self, *args: Any, **options: Any) -> None:
        aliases = options["databases"] or [router.db_for_write(OutboxEvent)]
        reports = {alias: _ask(alias) for alias in aliases}
        if options["format"] == "json":
            self.stdout.write(json.dumps(reports, indent=2))
        else:
            for alias, report in reports.items():
                self.stdout.write("\n".join([f"[{alias}]", *_lines(report)]))
        if options["check"]:
            limits = Limits(**{name: options[name] for name in Limits.__dataclass_fields__})
            found = [
                f"{alias}: {fault}"
                for alias, report in reports.items()
                for fault in faults(report, limits)
            ]
            if found:
                raise CommandError("\n".join(found), returncode=UNWELL)


def _ask(alias: str) -> Report:
    try:
        if missing := missing_table(alias):
            raise CommandError(missing, returncode=NO_ANSWER)
        return status(alias)
    except (DatabaseError, ImproperlyConfigured) as error:
        raise CommandError(f"{alias}: {error}", returncode=NO_ANSWER) from error


def _lines(report: Report) -> Iterator[str]:
    counts = ", ".join(f"{n} {name}" for name, n in report["counts"].items())
    newest = "" if report["counts_complete"] else " (of the newest events)"
    age, streams = report["oldest_pending_age"], report["streams"]
    yield f"events   {counts}{newest}"
    yield f"due      {report['due']}" + ("" if age is None else f", the oldest for {age:.0f} s")
    yield f"leased   {report['leased']}"
    yield f"streams  {streams['due']} due, {streams['leased']} leased, {streams['blocked']} blocked"
    for each in streams["heads"]:
        when = each["next_try"] or "when it is replayed or discarded"
        yield (
            f"  {each['key']}: {each['event_type']} {each['event_id']} {each['status']}, "
            f"{each['backlog']} wait, next try {when}"
        )
    yield f"workers  {len(report['workers'])}"
    for each in report["workers"]:
        yield f"  {each['id']} heartbeat {each['heartbeat_age']:.0f} s ago"
    for each in report["dead"]:
        yield f"dead     {each['count']} {each['event_type']}: {each['error'] or 'no error noted'}"
