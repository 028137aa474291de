"""A worker inside the process that writes: once per pid, at its first request or first write."""

from __future__ import annotations

import atexit
import logging
import threading
from typing import Any

from django.core.signals import request_started
from django.db import router

from ..hooks import slot
from ..models import OutboxEvent
from .worker import Worker

logger = logging.getLogger("django_outbox")

# As the standard library ends its thread pools, and before it does: async listeners still need
# them, and once atexit runs no thread can be started any more.
at_exit = getattr(threading, "_register_atexit", atexit.register)


def install() -> None:
    """Have the slot start a worker when it is first asked; nothing is started here."""
    slot.start = start
    request_started.connect(_at_request, dispatch_uid="django_outbox.embedded")


def uninstall() -> None:
    slot.start = None
    request_started.disconnect(dispatch_uid="django_outbox.embedded")


def start(alias: str) -> None:
    """Start the worker of this process; a failure is logged, for the table keeps every event."""
    try:
        worker = Worker(using=alias)
        worker.start()
    except Exception:
        logger.exception("embedded worker did not start alias=%s", alias)
        return
    at_exit(worker.stop)


def _at_request(**kwargs: Any) -> None:
    slot.queue(router.db_for_write(OutboxEvent))
