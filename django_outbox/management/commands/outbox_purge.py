"""``manage.py outbox_purge``: delete rows past their retention now."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from django.core.management.base import CommandError
from django.db import DatabaseError

from ...conf import Settings, current
from ...models import OutboxEvent, OutboxInbox, OutboxStatistics, OutboxStream
from ..arguments import add_databases, add_flags, add_many, add_values, chosen_aliases, retention
from ..command import INTERRUPTED, OutboxCommand, Progress

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
        add_databases(parser, "purge")
        for name, (what, setting) in AGES.items():
            text = f'{what} (default: OUTBOX["{setting}"])'
            add_values(parser, {f"--{name.replace('_', '-')}": (retention, "DURATION", text)})
        text = "only events of this type, and nothing else"
        add_many(parser, "--event-type", "event_types", "TYPE", text)
        add_flags(parser, {"--dry-run": "count, delete nothing"})

    def handle(self, *args: Any, **options: Any) -> None:
        ages = {setting: options[name] for name, (_, setting) in AGES.items()}
        given = {setting: age for setting, age in ages.items() if age is not None}
        settings = replace(current(), **given)
        verb = "would purge" if options["dry_run"] else "purged"
        aliases, faults = chosen_aliases(options), []
        for alias in aliases:
            label = f"[{alias}] {verb}" if len(aliases) > 1 else verb
            try:
                self._purge(alias, settings, options, label)
            except DatabaseError as error:  # the other databases are purged all the same
                faults.append(f"{alias}: {error}")
        if faults:
            raise CommandError("\n".join(faults))

    def _purge(self, alias: str, settings: Settings, options: dict[str, Any], label: str) -> None:
        progress, counts = Progress(self.stderr, verb=label), dict.fromkeys(TABLES, 0)
        try:
            for kind, number in _purged(alias, settings, options):
                counts[kind] += number
                progress.add(number)
        except KeyboardInterrupt as error:
            text = f"{_summary(label, counts)}, interrupted. The next call continues."
            raise CommandError(text, returncode=INTERRUPTED) from error
        finally:
            progress.close()
        self.stdout.write(_summary(label, counts))


def _purged(alias: str, settings: Settings, options: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the kind of rows that was deleted, or in a dry run would be, and how many."""
    types = options["event_types"]
    for kind, model in TABLES.items():
        rows = model.objects.using(alias)
        if types and model is not OutboxEvent:
            continue
        rows = rows.filter(event_type__in=types) if types else rows.all()
        if options["dry_run"]:
            yield kind, rows.expired(settings).count()
        else:
            yield from ((kind, number) for number in rows.purge_batches(settings))
    if not (types or options["dry_run"]):
        OutboxStatistics.objects.using(alias).purge()


def _summary(label: str, counts: dict[str, int]) -> str:
    return f"{label} {', '.join(f'{kind}: {number}' for kind, number in counts.items())}"
