"""``manage.py outbox_dead``: list, show, export, discard and skip events from the shell."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from datetime import datetime
from typing import Any, Final

from django.core.management.base import CommandError
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connections, router

from ...inspection.causes import MAX_TEXTS, Cause, load_causes
from ...inspection.event_lines import as_json, columns_of
from ...models import OutboxEvent, OutboxQuerySet
from ...models.event_queryset import BATCH_SIZE
from ...sql import dialect_of
from ..arguments import add_format, columns, positive_int
from ..dead_arguments import (
    FILTERS,
    add_choice,
    add_database,
    add_filters,
    chosen,
    dead_batches,
    filtered,
    text_about_others,
)
from ..examples import ExampleCommand

MAX_CAUSES: Final = 20  # causes that the list shows unless told otherwise
MAX_TYPES: Final = 3  # event types that it names of a cause


class Command(ExampleCommand):
    help = (
        "Lists dead events by cause, shows, exports or discards them, and skips events that block "
        "their stream. outbox_replay makes dead events due again."
    )
    examples = {
        "list": "what is dead, by cause",
        "show 01KAW3J5Q8ZV7N2M4X6R9T0BCD": "everything about one event",
        "export --event-type order.placed": "print them as JSON lines, to keep before a discard",
        "discard --error ValidationError --dry-run": "count what would be deleted",
        "discard --cause 3f2a91c07be4d518": "delete the events of one cause of the list",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(
            dest="action",
            required=True,
            metavar="ACTION",
            help="what to do; each has its own --help",
        )
        action = actions.add_parser("list", help="count dead events by cause")
        add_filters(action)
        action.add_argument(
            "--limit",
            type=positive_int,
            default=MAX_CAUSES,
            metavar="N",
            help=f"show at most N causes (default: {MAX_CAUSES})",
        )
        add_format(action)
        add_database(action)
        action = actions.add_parser("show", help="show everything about events, dead or not")
        action.add_argument("ids", nargs="+", metavar="EVENT_ID", help="events to show")
        add_format(action)
        add_database(action)
        action = actions.add_parser("export", help="write dead events as JSON lines")
        add_choice(action, "export")
        add_database(action)
        action = actions.add_parser("discard", help="delete dead events for good")
        add_choice(action, "discard")
        action.add_argument("--dry-run", action="store_true", help="count, delete nothing")
        add_database(action)
        action = actions.add_parser(
            "skip", help="make pending events with a key dead, so that those behind them go on"
        )
        action.add_argument("ids", nargs="+", metavar="EVENT_ID", help="events to skip")
        add_database(action)

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        return {"databases": []}  # otherwise Django 6.1 queries every MySQL server

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"] or router.db_for_write(OutboxEvent)
        rows = OutboxEvent.objects.using(alias)
        now = dialect_of(connections[alias]).clock(connections[alias])
        getattr(self, f"_{options['action']}")(rows, options, now)

    def _list(self, rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> None:
        """Print the causes of the dead events, the most frequent first."""
        is_filtered = any(options[each] is not None for each in (*FILTERS, "error"))
        some = filtered(rows, options, now) if is_filtered else None
        limit = options["limit"] if options["cause"] is None else MAX_TEXTS
        found = load_causes(rows.db, limit, rows=some)
        causes = [each for each in found.causes if options["cause"] in (None, each.digest)]
        if options["format"] == "json":
            texts = [*map(_cause_as_json, causes)]
            self.stdout.write(json.dumps(texts, indent=2, cls=DjangoJSONEncoder))
            return
        if not causes:
            self.stdout.write("No event is dead.")
            return
        heads = ("events", "error", "event types", "last death", "newest event", "cause")
        self.stdout.write("\n".join(columns([heads, *map(_cells, causes)])))
        if found.others:
            self.stdout.write(f"further causes: {found.others}; show more with --limit")
        if not found.is_exact:
            self.stdout.write(
                f"not counted: {found.unread} of {found.total} dead events, because their errors "
                f"have more than {MAX_TEXTS} different texts; the counts are at least so many"
            )

    def _show(self, rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> None:
        """Print all columns of the named events."""
        found = {each.pk: each for each in rows.filter(pk__in=options["ids"])}
        if unknown := [each for each in options["ids"] if each not in found]:
            raise CommandError(f"Unknown: {', '.join(unknown)}. Expected ids of stored events.")
        events = [found[each] for each in options["ids"]]
        if options["format"] == "json":
            self.stdout.write("\n".join(as_json(dict(columns_of(each))) for each in events))
            return
        texts = (
            "\n".join(f"{name:15}{value}" for name, value in columns_of(each)) for each in events
        )
        self.stdout.write("\n\n".join(texts))

    def _export(self, rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> None:
        """Write one line for each event, batch by batch."""
        for batch in dead_batches(chosen(rows, options, now), options, size=BATCH_SIZE, until=now):
            for event in batch.order_by("pk"):
                self.stdout.write(as_json(dict(columns_of(event))))

    def _discard(self, rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> None:
        """Delete dead events, batch by batch; each batch commits by itself."""
        verb, count = "would discard" if options["dry_run"] else "discarded", 0
        for batch in dead_batches(chosen(rows, options, now), options, size=BATCH_SIZE, until=now):
            count += batch.count() if options["dry_run"] else batch.discard()
        others = text_about_others(options, count)
        if others and not count:
            raise CommandError(f"{verb} 0{others}")
        self.stdout.write(f"{verb} {count}{others}")

    def _skip(self, rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> None:
        """Make pending events with a key dead."""
        ids = {*options["ids"]}
        count = rows.filter(pk__in=ids).skip()
        text = f"skipped {count}"
        if count < len(ids):
            text += (
                f"; {len(ids) - count} of the given ids are unknown, finished, without a key, or "
                "in a stream that a worker has leased"
            )
        if not count:
            raise CommandError(text)
        self.stdout.write(text)


def _cells(cause: Cause) -> tuple[str, ...]:
    """Return what the table shows of a cause."""
    types = [f"{name} {count}" for name, count in [*cause.types.items()][:MAX_TYPES]]
    if further := len(cause.types) - len(types):
        types.append(f"and {further} more")
    last = cause.newest.isoformat(timespec="seconds") if cause.newest else ""
    known = cause.acknowledged
    note = f" (known until {known.until.isoformat(timespec='minutes')})" if known else ""
    return (
        f"{cause.count}{'+' * cause.is_bounded}",
        f"{cause.title or 'no error text'}{note}",
        ", ".join(types),
        last,
        cause.newest_id,
        cause.digest,
    )


def _cause_as_json(cause: Cause) -> dict[str, Any]:
    known = cause.acknowledged
    return {
        "cause": cause.digest,
        "error": cause.error,
        "message": cause.message,
        "example": cause.example,
        "count": cause.count,
        "is_bounded": cause.is_bounded,
        "event_types": cause.types,
        "listeners": sorted(cause.listeners),
        "first": cause.oldest,
        "last": cause.newest,
        "event_id": cause.newest_id,
        "acknowledged": {"until": known.until, "by": known.by} if known else None,
    }
