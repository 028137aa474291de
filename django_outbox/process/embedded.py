"""Runs a worker in the process that writes: one per pid, from its first request or write on."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

from django.core.signals import request_started
from django.db import connections, router

from ..conf import current
from ..models import OutboxEvent, live_workers
from ..signals import event_written
from ..worker.worker import Worker
from ..writing.on_commit import hot_queues

logger = logging.getLogger("django_outbox")

# Registers what runs just before the standard library ends its thread pools. Async listeners still
# need these, and no thread can be started once atexit runs.
at_exit = getattr(threading, "_register_atexit", atexit.register)

_workers: list[Worker] = []  # of this process; an inherited worker has no leases
_to_restart: list[str] = []  # aliases whose workers a fork stopped; used only by the forking thread


def install() -> None:
    """Have the first use of the hot queue start a worker; nothing is started here.

    Without ``OUTBOX["EMBEDDED"]``, have the first write of a development server log what to do.
    """
    if not current().EMBEDDED:
        event_written.connect(advise)
        return
    hot_queues.start_worker = start
    request_started.connect(_at_request, dispatch_uid="django_outbox.embedded")
    request_started.connect(_at_first_request, dispatch_uid="django_outbox.embedded.signals")


def advise(sender: str, **kwargs: Any) -> None:
    """Log at the first write of a development server that no worker is alive, if so."""
    event_written.disconnect(advise)
    if not live_workers(sender):
        logger.warning(
            "events wait, no worker is alive; run manage.py outbox_worker, or set "
            'OUTBOX["EMBEDDED"] = True in development alias=%s',
            sender,
        )


def start(alias: str) -> None:
    """Start the worker of this process; only log a failure, since the table keeps every event."""
    try:
        worker = Worker(using=alias)
        worker.start()
    except Exception:
        logger.exception("embedded worker did not start alias=%s", alias)
        return
    _workers.append(worker)
    at_exit(worker.stop)


def stop() -> None:
    """Stop the workers of this process, for good."""
    for worker in _workers:
        worker.stop()
    _workers.clear()


def _before_fork() -> None:
    """Stop the workers on SQLite, which remembers its locks per process.

    A child that is forked while another thread writes would consider the lock held forever.
    """
    if threading.current_thread().name.startswith("outbox-"):
        return  # a listener forks, and its worker cannot stop before it ends
    for worker in [*_workers]:
        if connections[worker.alias].vendor == "sqlite":
            _workers.remove(worker)
            worker.stop()
            _to_restart.append(worker.alias)


def _after_fork() -> None:
    while _to_restart:
        start(_to_restart.pop())


def _in_child() -> None:
    _to_restart.clear()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _at_request(**kwargs: Any) -> None:
    hot_queues.of(router.db_for_write(OutboxEvent))


async def _at_first_request(**kwargs: Any) -> None:
    """Install signal handlers once. Async, so that an ASGI server runs it in its main thread.

    Handlers can be set only there. Such a server dies of the signal itself, so functions that are
    registered for the exit do not run.
    """
    request_started.disconnect(dispatch_uid="django_outbox.embedded.signals")
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            _stop_before(number)


def _stop_before(number: int) -> None:
    """Stop the workers at this signal, and then pass it to the handler that a server set before.

    Python sets its own for Ctrl-C. Asyncio's does not count: it receives signals another way.
    """
    former = signal.getsignal(number)
    if not callable(former) or former is signal.default_int_handler:
        return
    if former.__module__ == "asyncio.unix_events":
        return
    stopping: list[threading.Thread] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if stopping:
            former(number, frame)
            return
        thread = threading.Thread(target=stop_then_pass_on, name="outbox-embedded-stop")
        stopping.append(thread)
        thread.start()

    def stop_then_pass_on() -> None:
        try:
            stop()
        finally:
            os.kill(os.getpid(), number)

    signal.signal(number, receive)
