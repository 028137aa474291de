"""``manage.py outbox_replay``: make dead events due again, batch by batch."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import datetime, timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import connections, router

from ...models import OutboxEvent, OutboxQuerySet
from ...models.event_queryset import BATCH_SIZE
from ...models.fields import begins_with
from ...sql import dialect_of
from ..arguments import INTERRUPTED, instant, positive_int
from ..progress import Progress

FILTERS = {
    "event_types": "event_type__in",
    "aggregate_type": "aggregate_type",
    "aggregate_id": "aggregate_id",
    "tenant": "tenant_id",
    "key": "key",
    "since": "done_at__gte",
    "until": "done_at__lt",
}


class Command(BaseCommand):
    help = (
        "Makes dead events due again: the given ids, those that match all filters, or --all. "
        "Others are left alone. Each batch commits by itself; an event that dies again "
        "meanwhile is left to the next call."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("ids", nargs="*", metavar="EVENT_ID", help="events to replay")
        add("--all", action="store_true", help="every dead event")
        add("--event-type", action="append", dest="event_types", metavar="TYPE",
            help="of this type; may be repeated")  # fmt: skip
        add("--aggregate-type", metavar="TYPE")
        add("--aggregate-id", metavar="ID")
        add("--tenant", metavar="ID")
        add("--key", metavar="KEY")
        add("--error", metavar="TEXT", help="whose last error begins with this, as its class does")
        add(
            "--since",
            type=instant,
            metavar="TIME",
            help="that died since then: 2026-03-01T08:30, 2h",
        )
        add("--until", type=instant, metavar="TIME", help="that died before then")
        add("--limit", type=positive_int, metavar="N", help="at most N events, by id upwards")
        add("--after", default="", metavar="EVENT_ID",
            help="start after this id, to continue an earlier call")  # fmt: skip
        add("--batch-size", type=positive_int, default=BATCH_SIZE, metavar="N",
            help=f"events per transaction (default: {BATCH_SIZE})")  # fmt: skip
        add("--dry-run", action="store_true", help="count, change nothing")
        add("--database", choices=tuple(connections), help="default: the router's")

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        return {"databases": []}  # otherwise Django 6.1 queries every MySQL server

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"] or router.db_for_write(OutboxEvent)
        now = dialect_of(connections[alias]).clock(connections[alias])
        rows = _chosen(OutboxEvent.objects.using(alias), options, now)
        verb = "would replay" if options["dry_run"] else "replayed"
        progress, at = Progress(self.stderr, verb=verb), options["after"]
        try:
            for batch in rows.dead_batches(size=options["batch_size"], after=at, until=now):
                left = options["limit"] and options["limit"] - progress.count
                some = batch.order_by("pk")[:left] if left else batch
                progress.add(some.count() if options["dry_run"] else some.replay())
                at = batch.order_by("-pk").values_list("pk", flat=True).first()
                if options["limit"] and progress.count >= options["limit"]:
                    break
        except KeyboardInterrupt as error:
            progress.close()
            text = f"{verb} {progress.count}, interrupted. {_how_to_continue(options, at, now)}"
            raise CommandError(text, returncode=INTERRUPTED) from error
        progress.close()
        named = len(set(options["ids"]))
        others = (
            f"; {named - progress.count} of the given ids are unknown or not dead"
            if named > progress.count
            else ""
        )
        self.stdout.write(f"{verb} {progress.count}{others}")


def _chosen(rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> OutboxQuerySet:
    """Return the requested events; ``CommandError`` stops a forgotten filter from replaying all."""
    wanted = {
        column: options[name] for name, column in FILTERS.items() if options[name] is not None
    }
    if options["ids"]:
        wanted["pk__in"] = options["ids"]
    error = options["error"]
    is_chosen = bool(wanted) or error is not None
    if not is_chosen and not options["all"]:
        raise CommandError("Expected ids, a filter, or --all for every dead event.")
    if is_chosen and options["all"]:
        raise CommandError("--all cannot be combined with ids or filters.")
    for name, value in wanted.items():
        if isinstance(value, timedelta):
            wanted[name] = now - value
    rows = rows.filter(**wanted)
    return rows if error is None else rows.filter(begins_with("last_error", error))


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
