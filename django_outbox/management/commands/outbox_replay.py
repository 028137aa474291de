"""``manage.py outbox_replay``: make dead events due again, or give events to a new listener."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import datetime, timedelta
from typing import Any, Final

from django.core.management.base import CommandError
from django.db import connections

from ...models import OutboxEvent
from ...models.deliver_to import deliver_parts, lacking, registered
from ...models.replay import Spacing
from ...sql import dialect_of
from .. import arguments as cli
from ..command import INTERRUPTED, OutboxCommand

VALUES: Final[cli.Values] = {
    "--limit": (cli.positive_int, "N", "at most N events, by id upwards"),
    "--rate": (cli.rate, "RATE", "due one after the other: 100/m, 5/s (default: all at once)"),
    "--new-listener": (
        str,
        "TITLE",
        "give this new listener older events; --since and --until: when they occurred",
    ),
}
OF_DEAD: Final = ("ids", "listener", "cause", "error", "limit", "by")  # not with a new listener


class Command(OutboxCommand):
    help = (
        "Makes dead events due again: the given ids, those that match all filters, or --all. "
        "With --new-listener, gives stored events to a listener that was added later. "
        "Others are left alone. Each batch commits by itself; an event that dies again "
        "meanwhile is left to the next call."
    )
    examples = {
        "--event-type order.placed --since 2h": "replay what died in the last two hours",
        "--error ConnectionError --limit 10": "try ten first",
        "--error ConnectionError --rate 100/m": "then the others, 100 a minute",
        "--all --dry-run": "count all dead events",
        '--new-listener "order.placed ledger" --since 30d': "give a new listener the last 30 days",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        cli.add_choice(parser, "replay")
        cli.add_values(parser, VALUES)
        cli.add_by(parser, "replays them")
        cli.add_flags(parser, {"--dry-run": "count, change nothing"})
        cli.add_database(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        cli.check_choice(options)
        alias = cli.chosen_alias(options)
        now = dialect_of(connections[alias]).clock()
        if options["new_listener"] is not None:
            self._give(alias, options, now)
            return
        verb = "would replay" if options["dry_run"] else "replayed"
        count, limit, dry = 0, options["limit"], options["dry_run"]
        spacing, by = options["rate"] and Spacing(options["rate"]), cli.person(options)
        rows = OutboxEvent.objects.using(alias)
        left = cli.count_left(rows, options, now)
        try:
            for batch in cli.dead_batches(rows, options, now):
                some = batch.order_by("pk")[: limit - count] if limit else batch
                count += some.count() if dry else some.replay(by=by, rate=spacing)
                if count == limit:
                    break
        except KeyboardInterrupt as error:
            text = f"{verb} {count}, interrupted. {_how_to_continue(options, now)}"
            raise CommandError(text, returncode=INTERRUPTED) from error
        end = _end(spacing)
        if count == limit:  # other ids may be dead, too
            self.stdout.write(f"{verb} {count}{end}")
        else:
            self.stdout.write(cli.summary(verb, count, left, end))

    def _give(self, alias: str, options: dict[str, Any], now: datetime) -> None:
        """Insert the deliveries that a new listener lacks, part by part."""
        if given := [name for name in OF_DEAD if options[name] not in (None, [])]:
            text = ", ".join("ids" if each == "ids" else f"--{each}" for each in given)
            raise CommandError(f"--new-listener cannot be combined with {text}.")
        try:
            listener = registered(options["new_listener"])
        except ValueError as error:
            raise CommandError(str(error)) from error
        rows = cli.filtered(OutboxEvent.objects.using(alias), options, now, at="occurred_at")
        if options["dry_run"]:
            self.stdout.write(f"would insert {sum(map(len, lacking(rows, listener)))}")
            return
        count, spacing = 0, options["rate"] and Spacing(options["rate"])
        try:
            for inserted in deliver_parts(rows, listener, spacing):
                count += inserted
        except KeyboardInterrupt as error:
            text = f"inserted {count}, interrupted. To continue, repeat the command"
            raise CommandError(text, returncode=INTERRUPTED) from error
        self.stdout.write(f"inserted {count}{_end(spacing)}")


def _end(spacing: Spacing | None) -> str:
    last = spacing.last_at if spacing else None
    return "" if last is None else f"; the last is due at {last.isoformat(' ', 'seconds')}"


def _how_to_continue(options: dict[str, Any], now: datetime) -> str:
    """Return the options that continue this replay, without events that died since.

    They give instants, because ``2h`` ago is later in the next call.
    """
    instead, since = ", without --all," if options["all"] else "", options["since"]
    more = f"--until {now.isoformat()}"
    if since is not None:
        more += f" --since {(now - since if isinstance(since, timedelta) else since).isoformat()}"
    return f"To continue, repeat the command{instead} with {more}"
