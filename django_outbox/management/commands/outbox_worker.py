"""``manage.py outbox_worker``: deliver events until told to stop."""

from __future__ import annotations

import logging
import os
import socket
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError

from ... import drain
from ...conf import current
from ...contrib import prometheus
from ...contrib.logs import JSONFormatter
from ...listeners import registry
from ...models import missing_table
from ...process.main import Metrics, run, run_reloading
from ...process.probes import Probes
from .. import arguments as cli
from ..command import OutboxCommand, text_lines

LOOPBACK: Final = "127.0.0.1"
PORT: Final = "[ADDRESS:]PORT"
DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"


def host_and_port(text: str) -> tuple[str, int]:
    """Return host and port of ``8001``, ``0.0.0.0:8001`` or ``[::]:8001``; loopback by default.

    As with ``runserver``, other hosts cannot reach a port given without a host.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535 and not text.startswith(":")):
        raise ArgumentTypeError(
            f"{text!r} is not an address; expected a port, as in 8001, or an address of this host "
            "and a port, as in 0.0.0.0:8001 (every interface) or [::1]:8001."
        )
    return host.strip("[]") or LOOPBACK, int(port)


OPTIONS: Final[cli.Options] = {
    "--workers": (cli.positive_int, "N", "threads that run listeners"),
    "--processes": (cli.positive_int, "N", "worker processes under a supervisor"),
    "--poll-interval": (cli.positive_duration, "DURATION", "longest time between polls"),
    "--drain-timeout": (cli.duration, "DURATION", "how long a stop waits for running listeners"),
    "--max-events": (cli.non_negative_int, "N", "end after about N events; exactly with --once"),
    "--health-port": (host_and_port, PORT, "answer /live and /ready there"),
    "--metrics-port": (host_and_port, PORT, "answer Prometheus there; needs contrib.prometheus"),
    "--heartbeat-file": (Path, "PATH", "touched about once a second while the worker lives"),
    "--reload": "restart when code changes, for development",
    "--once": "deliver what is due, then exit",
    "--no-purge": "leave purging to others",
}


class Command(OutboxCommand):
    help = (
        "Delivers events until SIGTERM, SIGINT or SIGHUP. The first signal finishes what runs and "
        "releases the rest (exit code 0, or 1 if something had to be abandoned); a second one "
        "exits 1."
    )
    examples = {
        "": "deliver until SIGTERM",
        "--processes 4 --queue webhooks": "four processes for one queue",
        "--once": "for cron: deliver what is due, and exit",
        "--health-port 8001": "with /live and /ready for Kubernetes",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        cli.add_databases(parser, "serve")
        cli.add_many(parser, "--queue", "queues", "NAME", "serve only this queue (default: all)")
        cli.add_many(parser, "--exclude-queue", "excluded_queues", "NAME", "not this queue")
        cli.add_options(parser, OPTIONS)
        text = "json: log one JSON object a line on standard error, whatever LOGGING says"
        parser.add_argument("--format", choices=("text", "json"), default="text", help=text)

    def handle(self, *args: Any, **options: Any) -> None:
        if not current().ENABLED:
            self.stdout.write('OUTBOX["ENABLED"] is False: nothing is delivered.')
            return
        queues, aliases = chosen_queues(options), cli.chosen_aliases(options)
        for alias in aliases:
            if problem := missing_table(alias):
                raise CommandError(problem)
        log_to_console(as_json=options["format"] == "json")
        if options["once"]:
            delivered, most = 0, options["max_events"] or None
            for alias in aliases:
                delivered += drain(using=alias, limit=most and most - delivered, queues=queues)
            self.stdout.write(f"delivered {delivered}")
            return
        if options["format"] == "text":
            self.stdout.write("\n".join(banner(aliases, queues, options["poll_interval"])))
            self.stdout.flush()
        try:
            code = self._run(aliases, queues, options)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        with suppress(OSError):  # their reader has ended
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # a listener stuck in a thread must not keep the process alive

    def _run(self, aliases: list[str], queues: list[str] | None, options: dict[str, Any]) -> int:
        processes = options["processes"] or current().PROCESSES
        given: dict[str, Any] = {
            **{name: options[name] for name in ("workers", "poll_interval", "drain_timeout")},
            "max_events": options["max_events"] or None,
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


def chosen_queues(options: dict[str, Any]) -> list[str] | None:
    """Return the queues to serve; None: all.

    Raises ``CommandError`` for a queue that ``OUTBOX["QUEUES"]`` does not have, and if none is
    left.
    """
    known, excluded = [*current().queues], options["excluded_queues"]
    if not (options["queues"] or excluded):
        return None
    unknown = dict.fromkeys(each for each in (*options["queues"], *excluded) if each not in known)
    expected = f"expected one of {', '.join(known)}"
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise CommandError(f'OUTBOX["QUEUES"] does not have {names}; {expected}.')
    given = dict.fromkeys(options["queues"] or known)
    if not (left := [each for each in given if each not in excluded]):
        raise CommandError(f"--exclude-queue leaves no queue to serve; {expected}.")
    return left


def metrics_at(address: tuple[str, int] | None, *, processes: int) -> Metrics | None:
    """Return the function that serves metrics on the port; None without an ``address``.

    Raises ``ImproperlyConfigured`` for faults that would otherwise recur in a child process.
    """
    if address is None:
        return None
    prometheus.ensure_installed()
    directory = os.environ.get(DIRECTORY)
    if processes > 1 and not directory:
        raise ImproperlyConfigured(
            f"The metrics of {processes} processes are summed up in a directory. Set the "
            f"environment variable {DIRECTORY} to one that is empty, before the command starts."
        )
    if directory and not Path(directory).is_dir():
        raise ImproperlyConfigured(f"{DIRECTORY} is {directory!r}; expected a directory. Make it.")
    host, port = address
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server(address, family=family).close()
    except OSError as error:
        raise ImproperlyConfigured(
            f"The metrics port {port} of {host} cannot be opened: {error}"
        ) from error
    return partial(prometheus.serve, port, host)


def banner(aliases: list[str], queues: list[str] | None, interval: float | None) -> Iterator[str]:
    """Yield what the worker serves and what it waits for, for people."""
    settings, titles = current(), [each.title for each in registry.listeners()]
    yield "The worker starts. Stop it with Ctrl-C."
    yield from text_lines(
        {
            "delivers from": aliases,
            "queues": queues or [*settings.queues],
            "listeners": titles or "none; put one in listeners.py of an app in INSTALLED_APPS",
            "polls every": interval or settings.POLL_INTERVAL,
        }
    )


def log_to_console(*, as_json: bool) -> None:
    """Log on standard error: with ``as_json`` one object a line, and there alone.

    Otherwise, under DEBUG and without LOGGING, log each delivery and whole tracebacks.
    """
    logger, output = logging.getLogger("django_outbox"), logging.StreamHandler()
    if as_json:
        output.setFormatter(JSONFormatter())
        logger.handlers, logger.propagate = [output], False
        logger.setLevel(logger.level or logging.INFO)
    elif django_settings.DEBUG and not logger.hasHandlers():
        output.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(output)
        logger.setLevel(logging.DEBUG)
