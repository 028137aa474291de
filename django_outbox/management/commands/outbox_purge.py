"""``manage.py outbox_purge``: delete finished events past their retention, now."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.db import DEFAULT_DB_ALIAS, connections

from ...models import OutboxEvent


class Command(BaseCommand):
    help = "Deletes finished events past their retention, batch by batch."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, choices=tuple(connections))
        parser.add_argument("--dry-run", action="store_true", help="count, delete nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        rows = OutboxEvent.objects.using(options["database"])
        if options["dry_run"]:
            self.stdout.write(f"would purge {rows.expired().count()}")
        else:
            self.stdout.write(f"purged {rows.purge()}")
