"""``manage.py outbox_pause``: pause an event type, listener, stream or queue; list pauses."""

from __future__ import annotations

import getpass
import json
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError
from django.db import connections

from ... import doorbell
from ...inspection.pauses import PausedBacklog, backlogs, unknown_name
from ...models import OutboxPause
from ...models.pause_queryset import pause_error
from ..arguments import add_format, columns
from ..examples import ExampleCommand
from ..pause_arguments import KINDS, add_names, checked_alias, named_pauses

Rows = list[tuple[OutboxPause, PausedBacklog]]


class Command(ExampleCommand):
    help = (
        "Keeps the events of a type, for a listener, of a stream or in a queue waiting until "
        "outbox_resume. Nothing is lost, and no attempt is counted."
    )
    examples = {
        '--event-type order.placed --reason "carrier down"': "hold one event type back",
        '--listener "order.placed mail"': "hold back what one of its listeners gets",
        "--list": "what is paused, and how much waits",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_names(parser, KINDS)
        parser.add_argument("--reason", default="", help="shown to people who find it paused")
        parser.add_argument(
            "--by",
            metavar="NAME",
            help="name of the person who pauses it (default: the system user)",
        )
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
        if options["list"] == bool(names) or (options["force"] and not names):
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
        by = _user() if options["by"] is None else options["by"]
        pauses = OutboxPause.objects.using(alias)
        for kind, name in names:
            if pauses.pause(kind, name, reason=options["reason"], by=by):
                self.stdout.write(f"paused {OutboxPause.Kind(kind).label} {name}")
            else:
                old = pauses.get(kind=kind, name=name)
                self.stdout.write(f"{old} is paused since {old.paused_at} by {old.paused_by!r}")
        doorbell.ring(connections[alias])


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""


def _table(rows: Rows) -> Iterator[str]:
    if not rows:
        yield "Nothing is paused."
        return
    cells = [
        (str(each.kind), each.name, f"{each.paused_at:%Y-%m-%d %H:%M:%S}Z", each.paused_by or "-",
         _waiting(found), _reason(each))
        for each, found in rows
    ]  # fmt: skip
    yield from columns([("KIND", "NAME", "SINCE", "BY", "WAITING", "REASON"), *cells])


def _reason(pause: OutboxPause) -> str:
    until = "" if pause.until is None else f"until {pause.until:%H:%M:%S}Z: "
    return f"{until}{' '.join(pause.reason.split()) or '-'}"


def _waiting(found: PausedBacklog) -> str:
    more = "" if found.is_all else "+"
    return f"{found.events}{more}" + (f", streams {found.streams}{more}" if found.streams else "")


def _described(pause: OutboxPause, found: PausedBacklog) -> dict[str, Any]:
    until = {} if pause.until is None else {"until": pause.until.isoformat()}
    return {
        **until,
        "kind": pause.kind,
        "name": pause.name,
        "reason": pause.reason,
        "paused_at": pause.paused_at.isoformat(),
        "paused_by": pause.paused_by,
        "events": found.events,
        "streams": found.streams,
        "complete": found.is_all,
    }
