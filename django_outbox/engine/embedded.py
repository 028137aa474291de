"""A worker inside the process that writes: once per pid, at its first request or first write."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from django.core.signals import request_started
from django.db import connections, router

from ..hooks import slot
from ..models import OutboxEvent
from .worker import Worker

logger = logging.getLogger("django_outbox")

# As the standard library ends its thread pools, and before it does: async listeners still need
# them, and once atexit runs no thread can be started any more.
at_exit = getattr(threading, "_register_atexit", atexit.register)

_workers: list[Worker] = []  # of this process; a worker that a fork inherited holds nothing
_resting: list[str] = []  # aliases whose workers a fork has stopped; owner: the thread that forks


def install() -> None:
    """Have the slot start a worker when it is first asked; nothing is started here."""
    slot.start = start
    request_started.connect(_at_request, dispatch_uid="django_outbox.embedded")
    request_started.connect(_at_first_request, dispatch_uid="django_outbox.embedded.signals")


def uninstall() -> None:
    slot.start = None
    request_started.disconnect(dispatch_uid="django_outbox.embedded")
    request_started.disconnect(dispatch_uid="django_outbox.embedded.signals")


def start(alias: str) -> None:
    """Start the worker of this process; a failure is logged, for the table keeps every event."""
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
    """Stop the workers on SQLite, which remembers locks by process.

    A child that is made while another thread writes takes it that the lock is held, for good.
    """
    if threading.current_thread().name.startswith("outbox-"):
        return  # a listener forks, and its worker cannot end before it has
    for worker in [*_workers]:
        if connections[worker.alias].vendor == "sqlite":
            _workers.remove(worker)
            worker.stop()
            _resting.append(worker.alias)


def _after_fork() -> None:
    while _resting:
        start(_resting.pop())


def _in_child() -> None:
    _resting.clear()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _at_request(**kwargs: Any) -> None:
    slot.queue(router.db_for_write(OutboxEvent))


async def _at_first_request(**kwargs: Any) -> None:
    """An async receiver, because an ASGI server runs it where signals can be set: its main thread.

    Such a server ends by the signal itself, so that nothing registered for the exit is run.
    """
    request_started.disconnect(dispatch_uid="django_outbox.embedded.signals")
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            _stop_before(number)


def _stop_before(number: int) -> None:
    """Stop the workers at this signal, and then let whoever handled it before have it."""
    former = signal.getsignal(number)
    if not callable(former) or not _is_a_servers(former):
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


def _is_a_servers(handler: Callable[..., Any]) -> bool:
    """Python's own for Ctrl-C is not, and asyncio hears its signals another way."""
    return handler is not signal.default_int_handler and handler.__module__ != "asyncio.unix_events"
