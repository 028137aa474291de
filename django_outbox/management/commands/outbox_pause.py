"""``manage.py outbox_pause``: pause an event type, listener, stream or queue; list pauses."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.core.management.base import CommandError
from django.db import connections

from ... import doorbell
from ...inspection.pauses import PausedBacklog, backlogs, unknown_name
from ...models import OutboxPause
from ...models.pause_queryset import pause_error
from ..arguments import add_by, add_format, columns, person
from ..examples import ExampleCommand
from ..pause_arguments import KINDS, add_end, add_names, checked_alias, named_pauses, pause_end

Rows = list[tuple[OutboxPause, PausedBacklog]]


class Command(ExampleCommand):
    help = (
        "Keeps the events of a type, for a listener, of a stream or in a queue waiting until "
        "outbox_resume, or until the time you give. Nothing is lost, and no attempt is counted."
    )
    examples = {
        '--event-type order.placed --reason "carrier down"': "hold one event type back",
        "--queue webhooks --until 09:00": "hold a queue back until nine in the morning",
        '--listener "order.placed mail"': "hold back what one of its listeners gets",
        "--list": "what is paused, and how much waits",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_names(parser, KINDS)
        add_end(parser)
        parser.add_argument("--reason", default="", help="shown to people who find it paused")
        add_by(parser, "pauses it")
        parser.add_argument(
            "--force",
            action="store_true",
            help="pause unknown names too, such as a type that comes with the next deploy",
        )
        parser.add_argument("--list", action="store_true", help="show what is paused")
        add_format(parser)

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        return {"databases": []}  # otherwise Django 6.1 queries every MySQL server

    def handle(self, *args: Any, **options: Any) -> None:
        names, alias = named_pauses(options, KINDS), checked_alias(options["database"])
        needs_names = options["force"] or options["until"] or options["length"]
        if options["list"] == bool(names) or (needs_names and not names):
            raise CommandError(
                "Say what to pause: --event-type, --listener, --stream or --queue; or --list alone."
            )
        if names:
            self._pause(alias, names, options)
            return
        pauses = list(OutboxPause.objects.using(alias).order_by("paused_at", "pk"))
        found = backlogs(alias, pauses)
        rows = [(each, found[each.pk]) for each in pauses]
        if options["format"] == "json":
            self.stdout.write(json.dumps([_described(*row) for row in rows], indent=2))
        else:
            self.stdout.write("\n".join(_table(rows)))

    def _pause(self, alias: str, names: list[tuple[str, str]], options: dict[str, Any]) -> None:
        if faults := [fault for each in names if (fault := pause_error(*each))]:
            raise CommandError(" ".join(faults))  # before anything is paused
        if unknown := [text for each in names if (text := unknown_name(alias, *each))]:
            if not options["force"]:
                text = "Nothing was paused. To pause an unknown name, add --force."
                raise CommandError(" ".join([*unknown, text]))
            self.stderr.write("\n".join(f"warning: {text}" for text in unknown))
        until = pause_end(options, alias)
        end = "" if until is None else f" until {until.isoformat(timespec='seconds')}"
        by = person(options)
        pauses = OutboxPause.objects.using(alias)
        for kind, name in names:
            if pauses.pause(kind, name, reason=options["reason"], by=by, until=until):
                self.stdout.write(f"paused {OutboxPause.Kind(kind).label} {name}{end}")
            elif (old := pauses.filter(kind=kind, name=name).first()) is not None:
                end = "" if old.until is None else f", until {old.until}"
                self.stdout.write(
                    f"{old} is paused since {old.paused_at} by {old.paused_by!r}{end}"
                )
        doorbell.ring(connections[alias])


def _table(rows: Rows) -> Iterator[str]:
    if not rows:
        yield "Nothing is paused."
        return
    cells = [
        (
            str(each.kind),
            each.name,
            _instant(each.paused_at),
            _instant(each.until),
            each.paused_by or "-",
            _waiting(found),
            " ".join(each.reason.split()) or "-",
        )
        for each, found in rows
    ]
    yield from columns([("KIND", "NAME", "SINCE", "UNTIL", "BY", "WAITING", "REASON"), *cells])


def _instant(instant: datetime | None) -> str:
    return "-" if instant is None else f"{instant:%Y-%m-%d %H:%M:%S}Z"


def _waiting(found: PausedBacklog) -> str:
    more = "" if found.is_all else "+"
    return f"{found.events}{more}" + (f", streams {found.streams}{more}" if found.streams else "")


def _described(pause: OutboxPause, found: PausedBacklog) -> dict[str, Any]:
    return {
        "kind": pause.kind,
        "name": pause.name,
        "reason": pause.reason,
        "paused_at": pause.paused_at.isoformat(),
        "until": pause.until and pause.until.isoformat(),
        "paused_by": pause.paused_by,
        "events": found.events,
        "streams": found.streams,
        "complete": found.is_all,
    }
