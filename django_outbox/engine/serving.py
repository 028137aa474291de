"""What ``outbox_worker`` runs: workers until a signal, in one process or several; its exit code."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from django.db import connections
from django.utils.autoreload import (
    DJANGO_AUTORELOAD_ENV,
    file_changed,
    get_child_arguments,
    get_reloader,
)

from .health import Health, Report, Shown, together
from .probes import Probes
from .supervisor import Signals, Supervisor
from .worker import Worker

logger = logging.getLogger("django_outbox")

RELOAD = 3  # exit code by which a process asks to be started again, as with runserver


class Stoppable(Protocol):
    """A server of the standard library, as ``Metrics`` starts one."""

    server_port: int

    def shutdown(self) -> None:
        """Serve no more."""

    def server_close(self) -> None:
        """Give the port back."""


Metrics = Callable[[], tuple[Stoppable, threading.Thread]]  # opens a port, and a thread to serve it


def run(
    aliases: Sequence[str | None],
    *,
    processes: int = 1,
    probes: Probes | None = None,
    metrics: Metrics | None = None,
    **options: Any,
) -> int:
    """Run workers until a signal; return 0 when drained, 1 when work was abandoned.

    ``ImproperlyConfigured`` if the port or the file of ``probes`` cannot be had.
    """
    signals = Signals()
    signals.install()
    shown = probes or Probes()
    shown.open()
    if processes == 1:
        with _serving(metrics):
            return serve(aliases, signals, shown, **options)
    connections.close_all()  # nothing of the database may be shared by a fork

    def deliver(report: Report) -> int:
        shown.close()
        return _serve_as_child(aliases, signals, report, options)

    def serve_metrics(report: Report) -> int:
        """In a process of its own: the supervisor may have no thread, for it forks."""
        shown.close()
        _begin_as_child(signals)
        with _serving(metrics):
            while not signals.wait(report.tick):
                report.show(Health)
        return 0

    mains = [*[deliver] * processes, *([serve_metrics] if metrics else [])]
    return Supervisor(mains).run(signals, shown)


def serve(aliases: Sequence[str | None], signals: Signals, shown: Shown, **options: Any) -> int:
    """Run one worker per alias in this process."""
    workers = [Worker(using=alias, **options) for alias in aliases]

    def look() -> Health:
        return together(worker.health() for worker in workers)

    try:
        for worker in workers:
            worker.start()
        while not signals.wait(shown.tick) and not any(worker.is_spent for worker in workers):
            shown.show(look)
    finally:
        with ThreadPoolExecutor(len(workers)) as stopping:  # none goes on while another drains
            ends = [stopping.submit(worker.stop, hurry=signals.hurry) for worker in workers]
            while wait(ends, timeout=shown.tick).not_done:
                shown.show(look)
    return 0 if all(each.result() for each in ends) and not signals.hurry() else 1


@contextmanager
def _serving(metrics: Metrics | None) -> Iterator[None]:
    """Have metrics served from a thread during a block."""
    if metrics is None:
        yield
        return
    server, thread = metrics()
    logger.info("metrics port open port=%d", server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _serve_as_child(
    aliases: Sequence[str | None], signals: Signals, shown: Shown, options: dict[str, Any]
) -> int:
    _begin_as_child(signals)
    return serve(aliases, signals, shown, **options)


def _begin_as_child(signals: Signals) -> None:
    """Go on with the parent's count: a signal that came right after the fork is in it."""
    signals.install(ignore_interrupt=True)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        signals.receive()  # the supervisor was killed; nobody would ever stop us

    threading.Thread(target=watch, name="outbox-parent-watch", daemon=True).start()


def run_reloading(
    aliases: Sequence[str | None],
    *,
    probes: Probes | None = None,
    metrics: Metrics | None = None,
    **options: Any,
) -> int:
    """Run one process that ends softly when code changes, and start it again then.

    Django's own ``run_with_reloader`` kills its child when it is told to end itself.
    """
    signals = Signals()
    if os.environ.get(DJANGO_AUTORELOAD_ENV) == "true":
        shown = probes or Probes()
        shown.open()
        with _serving(metrics):
            return _serve_until_changed(aliases, signals, shown, options)
    signals.install()
    code = RELOAD
    while code == RELOAD and not signals.received:
        environment = {**os.environ, DJANGO_AUTORELOAD_ENV: "true"}
        command = get_child_arguments()
        code = _attend(subprocess.Popen(command, env=environment), signals)  # noqa: S603 - ours
    return code


def _attend(child: subprocess.Popen[bytes], signals: Signals) -> int:
    """Wait for the child's end, passing signals on; return its exit code."""
    told = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(0.1)
            return 0 if told and code == -signal.SIGTERM else abs(code)  # told before it began
        if told < signals.received:
            told = signals.received
            child.terminate()


def _serve_until_changed(
    aliases: Sequence[str | None], signals: Signals, shown: Shown, options: dict[str, Any]
) -> int:
    changed = threading.Event()

    def note(**kwargs: Any) -> bool:
        if not changed.is_set():
            changed.set()
            signals.receive()
        return True  # else the reloader would end its thread, for it takes it for the main one

    file_changed.connect(note)
    watch = threading.Thread(
        target=get_reloader().run, args=(threading.main_thread(),), name="outbox-reloader",
        daemon=True,
    )  # fmt: skip
    watch.start()
    code = _serve_as_child(aliases, signals, shown, options)
    return RELOAD if changed.is_set() else code
