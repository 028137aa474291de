"""Options of ``outbox_worker`` for monitoring: metrics on a port, and log lines as JSON."""

from __future__ import annotations

import logging
import os
import socket
from functools import partial
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

from ..contrib import prometheus
from ..contrib.logs import JSONFormatter
from ..worker.main import Metrics

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


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


def log_as_json() -> None:
    """Send all logs of the outbox to standard error only, as one JSON object per line."""
    logger = logging.getLogger("django_outbox")
    output = logging.StreamHandler()
    output.setFormatter(JSONFormatter())
    logger.handlers, logger.propagate = [output], False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
