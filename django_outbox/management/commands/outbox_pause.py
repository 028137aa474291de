"""``manage.py outbox_pause``: pause event types, listeners, streams, queues; list and end it."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from datetime import datetime, time, timedelta
from typing import Any, Final

from django.core.management.base import CommandError
from django.db import connections
from django.utils.dateparse import parse_time
from django.utils.timezone import localtime, make_aware

from ... import doorbell
from ...inspection.listeners import unknown_name
from ...models import OutboxPause
from ...models.pause_queryset import pause_error, until_error
from ...sql import dialect_of
from ...sql.values import CLOSING_KINDS
from .. import arguments as cli
from ..command import OutboxCommand, cell, table

KINDS: Final = {
    "event_type": ("--event-type", "TYPE", "the events of this type"),
    "listener": ("--listener", "TITLE", 'what this listener gets: its event type and name, "x y"'),
    "stream": ("--stream", "KEY", "the events with this key, in their order"),
    "queue": ("--queue", "NAME", "what waits in this queue"),
    "breaker": ("--breaker", "QUEUE", "with --end: the open circuit breaker of this queue"),
}
COLUMNS: Final = ("kind", "name", "paused_at", "until", "paused_by", "reason")
TIME_OF_DAY: Final = re.compile(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?")

Names = list[tuple[str, str]]  # kind and name of pauses


def end_time(text: str) -> datetime | time:
    """Return an instant, or a time of day; both are in ``TIME_ZONE`` unless they have an offset."""
    try:
        found = parse_time(text) if TIME_OF_DAY.fullmatch(text) else cli.instant(text)
    except (ValueError, ArgumentTypeError) as error:
        raise ArgumentTypeError(f"{text!r} is not a time: {error}") from error
    if found is None or isinstance(found, timedelta):
        raise ArgumentTypeError(f"{text!r} is a duration; use --for, or give a time.")
    return found


ENDS: Final[cli.Options] = {
    "--until": (end_time, "TIME", "a worker ends it then: 09:00 (the next), or 2026-11-26T09:00"),
    "--for": (cli.retention, "DURATION", "a worker ends it after this time: 45m, 2h, 1d"),
}
OPTIONS: Final[cli.Options] = {
    "--reason": (str, "TEXT", "shown to people who find it paused"),
    "--end": "end these pauses; what waited is due now",
    "--all": "with --end: every pause, and every open circuit breaker",
    "--force": "pause unknown names too, such as a type that comes with the next deploy",
}


class Command(OutboxCommand):
    help = (
        "Keeps the events of a type, for a listener, of a stream or in a queue waiting until you "
        "end the pause, or until the time you give. Nothing is lost, and no attempt is counted. "
        "Without a name it lists what is paused."
    )
    examples = {
        "": "what is paused, since when, until when and why",
        '--event-type order.placed --reason "carrier down"': "hold one event type back",
        "--queue webhooks --until 09:00": "hold a queue back until nine in the morning",
        '--listener "order.placed mail"': "hold back what one of its listeners gets",
        "--end --event-type order.placed": "deliver this event type again",
        "--end --all": "end every pause and circuit breaker",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        for kind, (option, metavar, text) in KINDS.items():
            cli.add_many(parser, option, kind, metavar, text)
        cli.add_options(parser, OPTIONS)
        cli.add_options(parser.add_mutually_exclusive_group(), ENDS)
        cli.add_by(parser, "pauses or resumes it")
        cli.add_format(parser)
        cli.add_database(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        names = [(kind, name) for kind in KINDS for name in options[kind]]
        _check(names, options)
        alias = cli.chosen_alias(options)
        if options["end"]:
            self._end(alias, names, cli.person(options))
        elif names:
            self._pause(alias, names, options)
        else:
            pauses = list(OutboxPause.objects.using(alias).order_by("paused_at", "pk"))
            rows = [{name: getattr(each, name) for name in COLUMNS} for each in pauses]
            self.print(options["format"], rows, table(rows) if rows else ["Nothing is paused."])

    def _pause(self, alias: str, names: Names, options: dict[str, Any]) -> None:
        if unknown := [text for each in names if (text := unknown_name(alias, *each))]:
            if not options["force"]:
                text = "Nothing was paused. To pause an unknown name, add --force."
                raise CommandError(" ".join([*unknown, text]))
            self.stderr.write("\n".join(f"warning: {text}" for text in unknown))
        until, pauses = _pause_end(options, alias), OutboxPause.objects.using(alias)
        reason, by = options["reason"] or "", cli.person(options)
        for kind, name in names:
            label = f"{OutboxPause.Kind(kind).label} {name}"
            if pauses.pause(kind, name, reason=reason, by=by, until=until):
                self.stdout.write(f"paused {label}{_until(until)}")
            elif (old := pauses.filter(kind=kind, name=name).first()) is not None:
                since = f"since {cell(old.paused_at)} by {old.paused_by!r}"
                self.stdout.write(f"{label} has been paused {since}{_until(old.until)}")
        doorbell.ring(connections[alias])

    def _end(self, alias: str, names: Names, by: str) -> None:
        pauses, missing = OutboxPause.objects.using(alias), []
        for kind, name in names or list(pauses.order_by("pk").values_list("kind", "name")):
            label = f"{OutboxPause.Kind(kind).label} {name}"
            done = pauses.filter(kind=kind, name=name).resume(by=by)
            doorbell.ring(connections[alias])
            if not done.pauses:
                missing.append(label)
            elif kind in CLOSING_KINDS:  # its rows stayed as they were
                self.stdout.write(f"resumed {label}: workers claim from it again")
            else:
                due = f"{done.events} events and {done.streams} streams are due"
                self.stdout.write(f"resumed {label}: {due}")
        if missing:
            raise CommandError(f"Not paused: {', '.join(missing)}. outbox_pause lists what is.")


def _check(names: Names, options: dict[str, Any]) -> None:
    """Raise ``CommandError`` for options that do not fit together, before anything is paused."""
    needs_names = [each for each in ("until", "for", "reason", "force") if options[each]]
    kinds = ", ".join(option for option, *_ in KINDS.values())
    if options["end"]:
        if needs_names:
            raise CommandError("--end cannot be combined with the options of a new pause.")
        if options["all"] == bool(names):
            raise CommandError(f"Say which pauses to end: {kinds}; or --all alone.")
        return
    if options["all"] or options["breaker"]:
        raise CommandError("--all and --breaker: expected together with --end.")
    if needs_names and not names:
        raise CommandError(f"Say what to pause: {kinds.rpartition(',')[0]}.")
    if faults := [fault for each in names if (fault := pause_error(*each))]:
        raise CommandError(" ".join(faults))


def _pause_end(options: dict[str, Any], alias: str) -> datetime | None:
    """Return when the pause ends; None: not by itself. ``CommandError`` for a time in the past."""
    given, seconds = options["until"], options["for"]
    if given is None and seconds is None:
        return None
    now = localtime(dialect_of(connections[alias]).clock())
    if seconds is not None:
        given = now + timedelta(seconds=seconds)
    until = next_time(given, now) if isinstance(given, time) else given
    if fault := until_error(until, now):
        raise CommandError(fault)
    return until


def next_time(at: time, now: datetime) -> datetime:
    """Return when it is next ``at`` in the time zone of ``now``."""
    today = make_aware(datetime.combine(now.date(), at))
    tomorrow = make_aware(datetime.combine(now.date() + timedelta(days=1), at))
    return today if today > now else tomorrow


def _until(instant: datetime | None) -> str:
    return "" if instant is None else f" until {cell(instant)}"
