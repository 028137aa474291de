"""``manage.py outbox_purge``: delete events and received messages past their retention, now."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand
from django.db import connections, router

from ...models import OutboxEvent, OutboxInbox, OutboxStream


class Command(BaseCommand):
    help = "Deletes finished events and received messages past their retention, batch by batch."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--database", choices=tuple(connections), help="alias to purge; default: the router's"
        )
        parser.add_argument("--dry-run", action="store_true", help="count, delete nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        models: Sequence[Any] = (OutboxEvent, OutboxStream, OutboxInbox)
        named = options["database"]
        tables = [each.objects.using(named or router.db_for_write(each)) for each in models]
        if options["dry_run"]:
            verb, counts = "would purge", [each.expired().count() for each in tables]
        else:
            verb, counts = "purged", [each.purge() for each in tables]
        self.stdout.write(
            "{} events: {}, idle streams: {}, received messages: {}".format(verb, *counts)
        )
