"""``manage.py outbox_worker``: deliver events until told to stop."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError

from ... import drain
from ...conf import current
from ...models import missing_table
from ...worker.main import run, run_reloading
from ...worker.probes import Probes
from ..arguments import (
    add_databases,
    duration,
    host_and_port,
    non_negative_int,
    positive_duration,
    positive_int,
)
from ..examples import ExampleCommand
from ..observability import log_as_json, metrics_at
from ..queue_arguments import add_queues, chosen_queues


class Command(ExampleCommand):
    help = (
        "Delivers events until SIGTERM or SIGINT. The first signal finishes what runs and releases "
        "the rest (exit code 0, or 1 if something had to be abandoned); a second one exits 1."
    )
    examples = {
        "": "deliver until SIGTERM",
        "--processes 4 --queue webhooks": "four processes for one queue",
        "--once": "for cron: deliver what is due, and exit",
        "--health-port 8001": "with /live and /ready for Kubernetes",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_databases(parser, "serve")
        add_queues(parser)
        add = parser.add_argument
        add("--workers", type=positive_int, metavar="N", help="threads that run listeners")
        add(
            "--processes",
            type=positive_int,
            metavar="N",
            help="worker processes under a supervisor",
        )
        add(
            "--poll-interval",
            type=positive_duration,
            metavar="DURATION",
            help="longest time between polls",
        )
        add(
            "--drain-timeout",
            type=duration,
            metavar="DURATION",
            help="how long a stop waits for the listeners that run",
        )
        add(
            "--max-events",
            type=non_negative_int,
            metavar="N",
            help="end after about N events (0: never); with --processes a fresh one takes over, "
            "with --once no event more is delivered",
        )
        add(
            "--health-port",
            type=host_and_port,
            metavar="[ADDRESS:]PORT",
            help="answer /live and /ready there; address: 127.0.0.1, or 0.0.0.0 for all interfaces",
        )
        add(
            "--metrics-port",
            type=host_and_port,
            metavar="[ADDRESS:]PORT",
            help="answer Prometheus there; needs the app django_outbox.contrib.prometheus",
        )
        add(
            "--heartbeat-file",
            type=Path,
            metavar="PATH",
            help="touched about once a second while the worker lives",
        )
        add(
            "--format",
            choices=("text", "json"),
            default="text",
            help="json: log one JSON object a line on standard error, whatever LOGGING says",
        )
        add("--reload", action="store_true", help="restart when code changes, for development")
        add("--once", action="store_true", help="deliver what is due, then exit")
        add("--no-purge", action="store_true", help="leave purging to others")

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        # Otherwise Django 6.1 queries every MySQL server; a worker must wait for one that is down.
        return {"databases": []}

    def handle(self, *args: Any, **options: Any) -> None:
        if not current().ENABLED:
            self.stdout.write('OUTBOX["ENABLED"] is False: nothing is delivered.')
            return
        queues = chosen_queues(options)
        aliases = [*dict.fromkeys(options["databases"] or [None])]
        for alias in aliases:
            if problem := missing_table(alias):
                raise CommandError(problem)
        if options["once"]:
            delivered = self._drain(aliases, options["max_events"], queues)
            self.stdout.write(f"delivered {delivered}")
            return
        if options["format"] == "json":
            log_as_json()
        try:
            code = self._run(aliases, queues, options)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a listener stuck in a thread must not keep the process alive

    def _drain(self, aliases: list[str | None], most: int | None, queues: list[str] | None) -> int:
        """Deliver due events, at most ``most`` over all databases; return how many."""
        delivered = 0
        for alias in aliases:
            limit = most - delivered if most else None
            delivered += drain(using=alias, limit=limit, queues=queues)
        return delivered

    def _run(
        self, aliases: list[str | None], queues: list[str] | None, options: dict[str, Any]
    ) -> int:
        processes = options["processes"] or current().PROCESSES
        given: dict[str, Any] = {
            "max_events": options["max_events"] or None,
            "workers": options["workers"],
            "poll_interval": options["poll_interval"],
            "drain_timeout": options["drain_timeout"],
            "queues": queues,
            "purge": not options["no_purge"],
            "probes": Probes(
                health_port=options["health_port"], heartbeat_file=options["heartbeat_file"]
            ),
            "metrics": metrics_at(options["metrics_port"], processes=processes),
        }
        if options["reload"]:
            return run_reloading(aliases, **given)
        return run(aliases, processes=processes, **given)
