"""``manage.py outbox_purge``: delete events and received messages past their retention, now."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.db import DEFAULT_DB_ALIAS, connections

from ...models import OutboxEvent, OutboxInbox


class Command(BaseCommand):
    help = "Deletes finished events and received messages past their retention, batch by batch."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, choices=tuple(connections))
        parser.add_argument("--dry-run", action="store_true", help="count, delete nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        events = OutboxEvent.objects.using(options["database"])
        inbox = OutboxInbox.objects.using(options["database"])
        if options["dry_run"]:
            verb, counts = "would purge", (events.expired().count(), inbox.expired().count())
        else:
            verb, counts = "purged", (events.purge(), inbox.purge())
        self.stdout.write("{} events: {}, received messages: {}".format(verb, *counts))
