"""``manage.py outbox_listeners``: list the listeners, and the events that have none."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError
from django.db import DatabaseError, router

from ...inspection.listeners import (
    UnroutedType,
    describe_listeners,
    listener_options,
    unrouted_types,
)
from ...models import OutboxEvent, missing_table
from ..arguments import add_databases, add_format, columns
from ..examples import ExampleCommand

MISSING, NO_ANSWER = 1, 2

Missing = dict[str, list[UnroutedType]]  # by alias


class Command(ExampleCommand):
    help = (
        "Lists the listeners of this code, and the event types in the table that none of them "
        "gets. With --check the exit code is 1 if events wait for, or died of, a missing "
        "listener, 2 if the database gave no answer."
    )
    examples = {
        "": "every listener of this code, and event types without one",
        "--check": "in a deploy: fail if an event waits for a listener that is gone",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_databases(parser, "check")
        add_format(parser)
        parser.add_argument(
            "--check",
            action="store_true",
            help="exit with 1 if an event that is not done has no listener",
        )

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        return {"databases": []}  # otherwise Django 6.1 queries every MySQL server

    def handle(self, *args: Any, **options: Any) -> None:
        listeners = describe_listeners()
        aliases = options["databases"] or [router.db_for_write(OutboxEvent)]
        missing = {alias: _fetch(alias) for alias in dict.fromkeys(aliases)}
        if options["format"] == "json":
            found = {alias: [asdict(each) for each in rows] for alias, rows in missing.items()}
            self.stdout.write(json.dumps({"listeners": listeners, "missing": found}, indent=2))
        else:
            self.stdout.write("\n".join([*_listed(listeners), *_missing(missing)]))
        waiting = [each for rows in missing.values() for each in rows if each.unsettled]
        if options["check"] and waiting:
            types = ", ".join(sorted({each.event_type for each in waiting}))
            raise CommandError(f"no listener for {types}", returncode=MISSING)


def _fetch(alias: str) -> list[UnroutedType]:
    try:
        if missing := missing_table(alias):
            raise CommandError(missing, returncode=NO_ANSWER)
        return unrouted_types(alias)
    except DatabaseError as error:
        raise CommandError(f"{alias}: {error}", returncode=NO_ANSWER) from error


def _listed(listeners: list[dict[str, Any]]) -> Iterator[str]:
    if not listeners:
        yield "No listener is registered."
        return
    titles = ("EVENT TYPE", "AGGREGATE TYPE", "NAME", "QUEUE", "LISTENER", "OPTIONS")
    names = ("event_type", "aggregate_type", "name", "queue", "function")
    rows = [
        (*(each[name] or "-" for name in names), ", ".join(listener_options(each)) or "-")
        for each in listeners
    ]
    yield from columns([titles, *rows])


def _missing(missing: Missing) -> Iterator[str]:
    for alias, rows in missing.items():
        yield ""
        if not rows:
            yield f"[{alias}] Every event type that was seen has a listener."
            continue
        yield f"[{alias}] Without a listener, among the newest events and those due first:"
        titles = ("EVENT TYPE", "AGGREGATE TYPE", "EVENTS", "NOT DONE")
        cells = [
            (each.event_type, each.aggregate_type, str(each.events), str(each.unsettled))
            for each in rows
        ]
        yield from columns([titles, *cells])
