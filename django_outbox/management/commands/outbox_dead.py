"""``manage.py outbox_dead``: list, show, export, discard and skip events from the shell."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from datetime import datetime
from typing import Any, Final

from django.core.management.base import CommandError
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connections

from ...inspection.causes import MAX_GROUPS, load_causes
from ...models import OutboxEvent, OutboxQuerySet
from ...sql import dialect_of
from .. import arguments as cli
from ..command import OutboxCommand, table

MAX_CAUSES: Final = 20  # causes that the list shows unless told otherwise
JSON_COLUMNS: Final = ("payload", "headers")  # written as the JSON that is stored


class Command(OutboxCommand):
    help = (
        "Lists dead events by cause, shows, exports or discards them, and skips events that block "
        "their stream. outbox_replay makes dead events due again."
    )
    examples = {
        "list": "what is dead, by cause",
        "show 01KAW3J5Q8ZV7N2M4X6R9T0BCD": "everything about one event, each delivery by itself",
        "export --event-type order.placed": "print them as JSON lines, to keep before a discard",
        "discard --error ValidationError --dry-run": "count what would be deleted",
        "discard --cause 3f2a91c07be4d518": "delete the events of one cause of the list",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        text = "what to do; each has its own --help"
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", help=text)
        listing = actions.add_parser("list", help="count dead events by cause")
        cli.add_filters(listing)
        text = f"show at most N causes (default: {MAX_CAUSES})"
        listing.add_argument("--limit", type=cli.positive_int, default=MAX_CAUSES, help=text)
        show = actions.add_parser("show", help="show everything about events, dead or not")
        cli.add_ids(show, "show")
        export = actions.add_parser("export", help="write dead events as JSON lines")
        cli.add_choice(export, "export")
        discard = actions.add_parser("discard", help="delete dead events for good")
        cli.add_choice(discard, "discard")
        cli.add_options(discard, {"--dry-run": "count, delete nothing"})
        text = "make pending events with a key dead, so that those behind them go on"
        skip = actions.add_parser("skip", help=text)
        cli.add_ids(skip, "skip")
        for action in (listing, show):
            cli.add_format(action)
        for action in (listing, show, export, discard, skip):
            cli.add_database(action)
        cli.add_by(discard, "discards them")
        cli.add_by(skip, "skips them")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] in ("export", "discard"):
            cli.check_choice(options)
        alias = cli.chosen_alias(options)
        rows = OutboxEvent.objects.using(alias)
        now = dialect_of(connections[alias]).clock()
        getattr(self, f"_{options['action']}")(rows, options, now)

    def _list(self, rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> None:
        """Print the causes of the dead events, the most frequent first."""
        some = cli.filtered(rows, options, now) if cli.is_filtered(options) else None
        limit = options["limit"] if options["cause"] is None else MAX_GROUPS
        found = load_causes(rows.db, limit, rows=some)
        causes = [each for each in found.causes if options["cause"] in (None, each.digest)]
        listed = [each.as_row() for each in causes]
        others = f"further causes: {found.others}; show more with --limit"
        lines = [*table(listed)] or ["No event is dead."]
        self.print(options["format"], listed, lines + [others] * bool(found.others))

    def _show(self, rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> None:
        """Print all columns of the named events, each delivery by itself."""
        chosen = rows.with_ids(options["ids"]).order_by("pk")
        if unknown := cli.naming_none(options["ids"], chosen):
            raise CommandError(cli.unknown_ids(unknown))
        for number, event in enumerate(chosen):
            values = _columns_of(event)
            if options["format"] == "json":
                self.stdout.write(_json_line(values))
            else:
                lines = [f"{name:15}{value}" for name, value in values.items()]
                self.stdout.write("\n".join([""] * bool(number) + lines))

    def _export(self, rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> None:
        """Write one line for each delivery, batch by batch."""
        for batch in cli.dead(rows, options, now).dead_batches(size=cli.BATCH_SIZE, until=now):
            for event in batch.order_by("pk"):
                self.stdout.write(_json_line(_columns_of(event)))

    def _discard(self, rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> None:
        """Delete dead events, batch by batch; each batch commits by itself."""
        chosen = cli.dead(rows, options, now)
        left = cli.naming_none(options["ids"], chosen)
        if options["dry_run"]:
            self.stdout.write(cli.summary("would discard", chosen.count(), left))
        else:
            count = sum(chosen.discard_batches(size=cli.BATCH_SIZE, by=cli.person(options)))
            self.stdout.write(cli.summary("discarded", count, left))

    def _skip(self, rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> None:
        """Make pending events with a key dead."""
        chosen = rows.with_ids(options["ids"])
        left = cli.naming_none(options["ids"], chosen.skippable())
        count = chosen.skip(by=cli.person(options))
        text = f"skipped {count}"
        if left:
            text += (
                f"; {len(left)} of the given ids are unknown, finished, without a key, or in a "
                "stream that a worker has leased"
            )
        if not count:
            raise CommandError(text)
        self.stdout.write(text)


def _columns_of(event: OutboxEvent) -> dict[str, Any]:
    """Return each column that has a value, by name; of the status, its name."""
    found = {field.name: getattr(event, field.attname) for field in event._meta.concrete_fields}
    found["status"] = OutboxEvent.Status(event.status).name
    return {name: value for name, value in found.items() if value is not None}


def _json_line(values: dict[str, Any]) -> str:
    """Return columns as one line, payload and headers as they are stored."""
    texts = [
        f"{json.dumps(name)}: {_json_text(values[name])}" for name in JSON_COLUMNS if name in values
    ]
    others = {name: each for name, each in values.items() if name not in JSON_COLUMNS}
    rest = json.dumps(others, cls=DjangoJSONEncoder, ensure_ascii=False)
    return f"{rest[:-1]}, {', '.join(texts)}}}"


def _json_text(text: str) -> str:
    """Return JSON text on one line, unchanged otherwise; other text as a JSON string."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text)
    return text.replace("\r", " ").replace("\n", " ")  # others may be in a string
