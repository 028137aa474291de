"""``manage.py outbox_replay``: make dead events due again, batch by batch."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import datetime, timedelta
from typing import Any

from django.core.management.base import CommandError
from django.db import connections, router

from ...models import OutboxEvent
from ...models.event_queryset import BATCH_SIZE
from ...models.replay import Spacing
from ...sql import dialect_of
from ..arguments import INTERRUPTED, add_by, person, positive_int, rate
from ..dead_arguments import add_choice, add_database, chosen, dead_batches, text_about_others
from ..examples import ExampleCommand
from ..progress import Progress


class Command(ExampleCommand):
    help = (
        "Makes dead events due again: the given ids, those that match all filters, or --all. "
        "Others are left alone. Each batch commits by itself; an event that dies again "
        "meanwhile is left to the next call."
    )
    examples = {
        "--event-type order.placed --since 2h": "replay what died in the last two hours",
        "--error ConnectionError --limit 10": "try ten first",
        "--error ConnectionError --rate 100/m": "then the others, 100 a minute",
        "--all --dry-run": "count all dead events",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_choice(parser, "replay")
        add = parser.add_argument
        add("--limit", type=positive_int, metavar="N", help="at most N events, by id upwards")
        add(
            "--rate",
            type=rate,
            metavar="RATE",
            help="due one after the other: 100/m, 5/s (default: all at once)",
        )
        add_by(parser, "replays them")
        add(
            "--after",
            default="",
            metavar="EVENT_ID",
            help="start after this id, to continue an earlier call",
        )
        add(
            "--batch-size",
            type=positive_int,
            default=BATCH_SIZE,
            metavar="N",
            help=f"events per transaction (default: {BATCH_SIZE})",
        )
        add("--dry-run", action="store_true", help="count, change nothing")
        add_database(parser)

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        return {"databases": []}  # otherwise Django 6.1 queries every MySQL server

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"] or router.db_for_write(OutboxEvent)
        now = dialect_of(connections[alias]).clock(connections[alias])
        rows = chosen(OutboxEvent.objects.using(alias), options, now)
        verb = "would replay" if options["dry_run"] else "replayed"
        progress, at = Progress(self.stderr, verb=verb), options["after"]
        spacing, by = options["rate"] and Spacing(options["rate"]), person(options)
        try:
            size = options["batch_size"]
            for batch in dead_batches(rows, options, size=size, after=at, until=now):
                left = options["limit"] and options["limit"] - progress.count
                some = batch.order_by("pk")[:left] if left else batch
                is_dry = options["dry_run"]
                progress.add(some.count() if is_dry else some.replay(by=by, rate=spacing))
                at = batch.order_by("-pk").values_list("pk", flat=True).first()
                if options["limit"] and progress.count >= options["limit"]:
                    break
        except KeyboardInterrupt as error:
            progress.close()
            text = f"{verb} {progress.count}, interrupted. {_how_to_continue(options, at, now)}"
            raise CommandError(text, returncode=INTERRUPTED) from error
        progress.close()
        is_cut = options["limit"] and progress.count >= options["limit"]
        others = "" if is_cut else text_about_others(options, progress.count)
        if others and not progress.count:
            raise CommandError(f"{verb} 0{others}")
        last = spacing.last_at if spacing else None
        end = "" if last is None else f"; the last is due at {last.isoformat(' ', 'seconds')}"
        self.stdout.write(f"{verb} {progress.count}{end}{others}")


def _how_to_continue(options: dict[str, Any], at: str, now: datetime) -> str:
    """Return the options that continue this replay, without events that died since.

    They give instants, because ``2h`` ago is later in the next call.
    """
    instead = ", without --all," if options["all"] else ""
    since = options["since"]
    if isinstance(since, timedelta):
        since = now - since
    more = f"--after {at or repr('')} --until {now.isoformat()}"
    if since is not None:
        more += f" --since {since.isoformat()}"
    return f"To continue, repeat the command{instead} with {more}"
