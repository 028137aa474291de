"""``manage.py outbox_resume``: end pauses, and make the events that waited due."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import connections

from ... import doorbell
from ...models import OutboxPause
from ...sql.values import CLOSING_KINDS
from ..examples import ExampleCommand
from ..pause_arguments import RESUMABLE, add_names, checked_alias, named_pauses


class Command(ExampleCommand):
    help = "Ends pauses, and makes the events that waited due now."
    examples = {
        "--event-type order.placed": "deliver this event type again",
        "--all": "end every pause and circuit breaker",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_names(parser, RESUMABLE)
        parser.add_argument(
            "--all", action="store_true", help="every pause, and every open circuit breaker"
        )

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        return {"databases": []}  # otherwise Django 6.1 queries every MySQL server

    def handle(self, *args: Any, **options: Any) -> None:
        names, alias = named_pauses(options, RESUMABLE), checked_alias(options["database"])
        if options["all"] == bool(names):
            raise CommandError(
                "Say what to resume: --event-type, --listener, --stream, --queue or --breaker; or "
                "--all alone. outbox_pause --list shows what is paused."
            )
        pauses = OutboxPause.objects.using(alias)
        if options["all"]:
            names = list(pauses.order_by("pk").values_list("kind", "name"))
        missing = [each for each in names if not self._resume(alias, *each)]
        if missing:
            found = ", ".join(f"{OutboxPause.Kind(kind).label} {name!r}" for kind, name in missing)
            raise CommandError(f"Not paused: {found}. outbox_pause --list shows what is paused.")

    def _resume(self, alias: str, kind: str, name: str) -> bool:
        done = OutboxPause.objects.using(alias).filter(kind=kind, name=name).resume()
        doorbell.ring(connections[alias])
        if done.pauses:
            result = f"{done.events} events and {done.streams} streams are due"
            if kind in CLOSING_KINDS:  # its rows stayed as they were
                result = "workers claim from it again"
            self.stdout.write(f"resumed {OutboxPause.Kind(kind).label} {name}: {result}")
        return bool(done.pauses)
