"""``manage.py outbox_purge``: delete rows past their retention now."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from typing import Any, Final

from django.core.management.base import CommandError
from django.db import DatabaseError

from ...conf import Settings, current
from ...models import OutboxEvent, OutboxInbox, OutboxOperation, OutboxStatistics, OutboxStream
from .. import arguments as cli
from ..command import INTERRUPTED, OutboxCommand

AGES: Final = {  # what an option gives the age of, and the setting that it overrides
    "done_older_than": ("done events", "RETENTION_DONE"),
    "dead_older_than": ("dead events", "RETENTION_DEAD"),
    "inbox_older_than": ("received messages", "RETENTION_INBOX"),
}
TABLES: Final[dict[str, Any]] = {
    "events": OutboxEvent,
    "idle streams": OutboxStream,
    "received messages": OutboxInbox,
}


class Command(OutboxCommand):
    help = (
        "Deletes finished events and received messages past their retention, idle streams and old "
        "statistics. Each batch commits by itself; after an interruption the next call continues."
    )
    examples = {
        "--done-older-than 7d": "delete delivered events after a week",
        "--dead-older-than 90d --dry-run": "count old dead events",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        cli.add_databases(parser, "purge")
        for name, (what, setting) in AGES.items():
            text = f'{what} (default: OUTBOX["{setting}"])'
            option = f"--{name.replace('_', '-')}"
            cli.add_options(parser, {option: (cli.retention, "DURATION", text)})
        cli.add_options(parser, {"--dry-run": "count, delete nothing"})

    def handle(self, *args: Any, **options: Any) -> None:
        ages = {setting: options[name] for name, (_, setting) in AGES.items()}
        given = {setting: age for setting, age in ages.items() if age is not None}
        settings = replace(current(), **given)
        verb = "would purge" if options["dry_run"] else "purged"
        aliases, faults = cli.chosen_aliases(options), []
        for alias in aliases:
            label = f"[{alias}] {verb}" if len(aliases) > 1 else verb
            try:
                self._purge(alias, settings, options, label)
            except DatabaseError as error:  # the other databases are purged all the same
                faults.append(f"{alias}: {error}")
        if faults:
            raise CommandError("\n".join(faults))

    def _purge(self, alias: str, settings: Settings, options: dict[str, Any], label: str) -> None:
        counts = dict.fromkeys(TABLES, 0)
        try:
            for kind, model in TABLES.items():
                rows = model.objects.using(alias).all()
                if options["dry_run"]:
                    counts[kind] = rows.expired(settings).count()
                else:
                    for number in rows.purge_batches(settings):
                        counts[kind] += number
        except KeyboardInterrupt as error:
            text = f"{_summary(label, counts)}, interrupted. The next call continues."
            raise CommandError(text, returncode=INTERRUPTED) from error
        if not options["dry_run"]:
            for each in (OutboxStatistics, OutboxOperation):
                sum(each.objects.using(alias).purge_batches())
        self.stdout.write(_summary(label, counts))


def _summary(label: str, counts: dict[str, int]) -> str:
    return f"{label} {', '.join(f'{kind}: {number}' for kind, number in counts.items())}"
