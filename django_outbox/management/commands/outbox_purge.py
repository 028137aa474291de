"""``manage.py outbox_purge``: delete rows past their retention now."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from django.core.management.base import CommandError
from django.db import router

from ...conf import Settings, current
from ...models import OutboxEvent, OutboxInbox, OutboxStatistics, OutboxStream
from ..arguments import INTERRUPTED, add_databases, positive_int, retention
from ..examples import ExampleCommand
from ..progress import Progress

SETTINGS_OF_OPTIONS = {  # option: the setting that it overrides
    "done_older_than": "RETENTION_DONE",
    "dead_older_than": "RETENTION_DEAD",
    "inbox_older_than": "RETENTION_INBOX",
    "batch_size": "PURGE_BATCH_SIZE",
}
TABLES: dict[str, Any] = {
    "events": OutboxEvent,
    "idle streams": OutboxStream,
    "received messages": OutboxInbox,
}


class Command(ExampleCommand):
    help = (
        "Deletes finished events and received messages past their retention, idle streams and old "
        "statistics. Each batch commits by itself; after an interruption the next call continues."
    )
    examples = {
        "--done-older-than 7d": "delete delivered events after a week",
        "--dead-older-than 90d --dry-run": "count old dead events",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_databases(parser, "purge")
        add = parser.add_argument
        add(
            "--done-older-than",
            type=retention,
            metavar="DURATION",
            help='done events (default: OUTBOX["RETENTION_DONE"])',
        )
        add(
            "--dead-older-than",
            type=retention,
            metavar="DURATION",
            help='dead events (default: OUTBOX["RETENTION_DEAD"])',
        )
        add(
            "--inbox-older-than",
            type=retention,
            metavar="DURATION",
            help='received messages (default: OUTBOX["RETENTION_INBOX"])',
        )
        add(
            "--event-type",
            action="append",
            dest="event_types",
            metavar="TYPE",
            help="only events of this type, and nothing else; may be repeated",
        )
        add(
            "--batch-size",
            type=positive_int,
            metavar="N",
            help="rows that one transaction examines",
        )
        add("--dry-run", action="store_true", help="count, delete nothing")

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        return {"databases": []}  # otherwise Django 6.1 queries every MySQL server

    def handle(self, *args: Any, **options: Any) -> None:
        given = {
            setting: options[name]
            for name, setting in SETTINGS_OF_OPTIONS.items()
            if options[name] is not None
        }
        settings = replace(current(), **given)
        verb = "would purge" if options["dry_run"] else "purged"
        aliases = dict.fromkeys(options["databases"] or [None])
        for alias in aliases:
            progress = Progress(self.stderr, verb=verb)
            counts = dict.fromkeys(TABLES, 0)
            label = f"[{alias}] {verb}" if len(aliases) > 1 else verb
            try:
                for kind, number in _purge(alias, settings, options):
                    counts[kind] += number
                    progress.add(number)
            except KeyboardInterrupt as error:
                progress.close()
                text = f"{_summary(label, counts)}, interrupted. The next call continues."
                raise CommandError(text, returncode=INTERRUPTED) from error
            progress.close()
            self.stdout.write(_summary(label, counts))


def _purge(
    alias: str | None, settings: Settings, options: dict[str, Any]
) -> Iterator[tuple[str, int]]:
    """Yield the kind of rows that was deleted, or in a dry run would be, and how many."""
    types = options["event_types"]
    for kind, model in TABLES.items():
        rows = model.objects.using(alias or router.db_for_write(model))
        if types and model is not OutboxEvent:
            continue
        rows = rows.filter(event_type__in=types) if types else rows.all()
        if options["dry_run"]:
            yield kind, rows.expired(settings).count()
        else:
            yield from ((kind, number) for number in rows.purge_batches(settings))
    if not (types or options["dry_run"]):
        OutboxStatistics.objects.using(alias or router.db_for_write(OutboxStatistics)).purge()


def _summary(label: str, counts: dict[str, int]) -> str:
    return f"{label} {', '.join(f'{kind}: {number}' for kind, number in counts.items())}"
