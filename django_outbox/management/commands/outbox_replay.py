"""``manage.py outbox_replay``: make dead events due again, or give events to a new listener."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import datetime, timedelta
from typing import Any, Final

from django.core.management.base import CommandError
from django.db import connections

from ...listeners.registry import Listener
from ...models import OutboxEvent, OutboxOperation, operation
from ...models.deliver_to import deliver_parts, lacking, registered
from ...models.event_queryset import OutboxQuerySet
from ...models.replay import Spacing
from ...sql import dialect_of
from .. import arguments as cli
from ..command import INTERRUPTED, OutboxCommand

OPTIONS: Final[cli.Options] = {
    "--limit": (cli.positive_int, "N", "at most N events, by id upwards"),
    "--rate": (cli.rate, "RATE", "due one after the other: 100/m, 5/s (default: all at once)"),
    "--dry-run": "count, change nothing",
}
# With these, dead events alone.
OF_DEAD: Final = ("ids", "cause", "last_error__begins_with", "limit")


class Command(OutboxCommand):
    help = (
        "Makes dead events due again: the given ids, those that match all filters, or --all. "
        "With --listener, also gives that listener the stored events that it was never given, as "
        "one that was added later; --since and --until say when these occurred. "
        "Others are left alone. Each batch commits by itself; an event that dies again "
        "meanwhile is left to the next call."
    )
    examples = {
        "--event-type order.placed --since 2h": "replay what died in the last two hours",
        "--error ConnectionError --limit 10": "try ten first",
        "--error ConnectionError --rate 100/m": "then the others, 100 a minute",
        "--all --dry-run": "count all dead events",
        '--listener "order.placed ledger" --since 30d': "give a new listener the last 30 days",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        cli.add_choice(parser, "replay")
        cli.add_options(parser, OPTIONS)
        cli.add_by(parser, "replays them")
        cli.add_database(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        cli.check_choice(options)
        alias = cli.chosen_alias(options)
        now = dialect_of(connections[alias]).clock()
        listener = _may_lack_events(alias, options)
        verb = "would replay" if options["dry_run"] else "replayed"
        count, limit, dry = 0, options["limit"], options["dry_run"]
        spacing = options["rate"] and Spacing(options["rate"])
        rows, by = OutboxEvent.objects.using(alias), cli.person(options)
        chosen = cli.dead(rows, options, now)
        left = cli.naming_none(options["ids"], chosen)
        act = operation.acting(OutboxOperation.Kind.REPLAY, by, chosen)
        try:
            for batch in chosen.dead_batches(size=cli.BATCH_SIZE, until=now):
                some = batch.order_by("pk")[: limit - count] if limit else batch
                count += some.count() if dry else some.replay(by=act, rate=spacing)
                if count == limit:
                    break
        except KeyboardInterrupt as error:
            text = f"{verb} {count}, interrupted. {_how_to_continue(options, now)}"
            raise CommandError(text, returncode=INTERRUPTED) from error
        more = ""
        if listener is not None:
            rows = cli.filtered(rows, {**options, "listener": None}, now, at="occurred_at")
            more = _give(rows, listener, spacing, f"{verb} {count}", by=by, dry=dry)
        end = more + _end(spacing)
        if count == limit:  # other ids may be dead, too
            self.stdout.write(f"{verb} {count}{end}")
        else:
            self.stdout.write(cli.summary(verb, count, left, end))


def _may_lack_events(alias: str, options: dict[str, Any]) -> Listener | None:
    """Return the listener to be given what it lacks, if the options name one and choose by time.

    Raises ``CommandError`` for a title that neither the code nor a stored delivery has.
    """
    title = options["listener"]
    if title is None or any(options[name] not in (None, []) for name in OF_DEAD):
        return None
    try:
        return registered(title)
    except ValueError as error:  # a listener that was removed may have dead deliveries
        if OutboxEvent.objects.using(alias).filter(listener=title).exists():
            return None
        raise CommandError(str(error)) from error


def _give(
    rows: OutboxQuerySet,
    listener: Listener,
    spacing: Spacing | None,
    done: str,
    *,
    by: str,
    dry: bool,
) -> str:
    """Insert the deliveries that a listener lacks, part by part; return how many, as a text.

    ``done``: what the command has done before.
    """
    if dry:
        return f", would insert {sum(map(len, lacking(rows, listener)))}"
    count = 0
    try:
        for inserted in deliver_parts(rows, listener, spacing, by=by):
            count += inserted
    except KeyboardInterrupt as error:
        text = f"{done}, inserted {count}, interrupted. To continue, repeat the command"
        raise CommandError(text, returncode=INTERRUPTED) from error
    return f", inserted {count}"


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
