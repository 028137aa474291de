"""``manage.py outbox_worker``: deliver events until told to stop."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from ... import drain
from ...conf import current
from ...engine.supervisor import run, run_reloading
from ...models import missing_table


class Command(BaseCommand):
    help = (
        "Delivers events until SIGTERM or SIGINT. The first signal finishes what runs and releases "
        "the rest (exit code 0, or 1 if something had to be abandoned); a second one exits 1."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--database", action="append", dest="databases", metavar="ALIAS",
            choices=tuple(connections), help="alias to serve; may be repeated",
        )  # fmt: skip
        parser.add_argument("--workers", type=int, help="threads that run listeners")
        parser.add_argument("--poll-interval", type=float, metavar="SECONDS")
        parser.add_argument("--drain-timeout", type=float, metavar="SECONDS")
        parser.add_argument("--processes", type=int, help="worker processes under a supervisor")
        parser.add_argument(
            "--max-events", type=int, metavar="N", help="end after about N events (0: never)"
        )
        parser.add_argument("--reload", action="store_true", help="restart when code changes")
        parser.add_argument("--once", action="store_true", help="deliver what is due, then exit")
        parser.add_argument("--no-purge", action="store_true", help="leave purging to others")

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        # Django 6.1 asks every MySQL server otherwise; one that is down is to be waited for.
        return {"databases": []}

    def handle(self, *args: Any, **options: Any) -> None:
        if not current().ENABLED:
            self.stdout.write('OUTBOX["ENABLED"] is False: nothing is delivered.')
            return
        aliases = [*dict.fromkeys(options["databases"] or [None])]
        for alias in aliases:
            if problem := missing_table(alias):
                raise CommandError(problem)
        if options["once"]:
            count = sum(drain(using=alias) for alias in aliases)
            self.stdout.write(f"delivered {count}")
            return
        code = self._run(aliases, options)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a listener that is stuck in a thread must not hold the process

    def _run(self, aliases: list[str | None], options: dict[str, Any]) -> int:
        given: dict[str, Any] = {
            "max_events": options["max_events"] or None,
            "workers": options["workers"],
            "poll_interval": options["poll_interval"],
            "drain_timeout": options["drain_timeout"],
            "purge": not options["no_purge"],
        }
        if options["reload"]:
            return run_reloading(aliases, **given)
        return run(aliases, processes=options["processes"] or current().PROCESSES, **given)
