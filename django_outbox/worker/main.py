"""Runs the workers of ``outbox_worker`` until a signal, in one process or several."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from django.db import connections
from django.utils.autoreload import (
    DJANGO_AUTORELOAD_ENV,
    file_changed,
    get_child_arguments,
    get_reloader,
)

from .health import Health, HealthOutput, HealthPipe, combine
from .probes import Probes
from .supervisor import Signals, Supervisor
from .worker import Worker

logger = logging.getLogger("django_outbox")

HAND_BACK_DELAY = 1.0  # seconds until handed-back events are due; this process has ended by then
RELOAD_EXIT_CODE = 3  # exit code of a process that asks for a restart, as with runserver


class Stoppable(Protocol):
    """The server that ``Metrics`` returns; the standard library's have this interface."""

    server_port: int

    def shutdown(self) -> None:
        """Stop serving requests."""

    def server_close(self) -> None:
        """Close the port."""


Metrics = Callable[[], tuple[Stoppable, threading.Thread]]  # opens a port, served by a thread


def run(
    aliases: Sequence[str | None],
    *,
    processes: int = 1,
    probes: Probes | None = None,
    metrics: Metrics | None = None,
    **options: Any,
) -> int:
    """Run workers until a signal; return 0 if all drained, 1 if work was abandoned.

    Raises ``ImproperlyConfigured`` if the port or the file of ``probes`` cannot be opened.
    """
    signals = Signals()
    signals.install()
    output = probes or Probes()
    output.open()
    if processes == 1:
        return serve(aliases, signals, output, metrics=metrics, **options)
    signals.install_passed_on()
    connections.close_all()  # a fork must not share database connections

    def deliver(pipe: HealthPipe) -> int:
        output.close()
        return _serve_as_child(aliases, signals, pipe, options)

    def serve_metrics(pipe: HealthPipe) -> int:
        """Serve metrics from a separate process: the supervisor forks, so it has no threads."""
        output.close()
        _begin_as_child(signals)
        with _serving(metrics):
            while not signals.wait(pipe.interval):
                pipe.publish(Health)
        return 0

    mains = [*[deliver] * processes, *([serve_metrics] if metrics else [])]
    return Supervisor(mains).run(signals, output)


def serve(
    aliases: Sequence[str | None],
    signals: Signals,
    output: HealthOutput,
    *,
    metrics: Metrics | None = None,
    **options: Any,
) -> int:
    """Run one worker per alias; return the exit code. The process must end right afterwards."""
    workers = [Worker(using=alias, **options) for alias in aliases]
    try:
        with _serving(metrics):
            finished = _work(workers, signals, output)
    finally:
        _hand_back(workers)
    return 0 if finished and not signals.hurry() else 1


def _work(workers: Sequence[Worker], signals: Signals, output: HealthOutput) -> bool:
    """Deliver until a signal, or until a worker must be replaced; return whether all drained."""

    def get_health() -> Health:
        return combine(worker.health() for worker in workers)

    def lost() -> list[str]:
        return [reason for each in workers for reason in each.lost_threads]

    spent, reasons = False, list[str]()
    try:
        for worker in workers:
            worker.start()
        while not signals.wait(output.interval):
            spent, reasons = any(each.is_spent for each in workers), lost()
            if reasons:
                logger.error("threads lost, the process ends reason=%s", "; ".join(reasons))
            if spent or reasons:
                break
            output.publish(get_health)
    finally:
        since = None if spent and not signals.received else time.monotonic()
        with ThreadPoolExecutor(len(workers)) as stopping:  # drain all at the same time
            ends = [
                stopping.submit(
                    each.finish, _give_up_after(signals, each.settings.DRAIN_TIMEOUT, since)
                )
                for each in workers
            ]
            while wait(ends, timeout=output.interval).not_done:
                output.publish(get_health)
    # Threads may come back while others drain; the process is replaced all the same.
    return all(each.result() for each in ends) and not reasons and not lost()


def _give_up_after(signals: Signals, seconds: float, since: float | None) -> Callable[[], bool]:
    """Return a function that returns whether to stop waiting for running listeners.

    It returns True ``seconds`` after ``since`` (monotonic; None: the first signal), or after the
    second signal.
    """

    def give_up() -> bool:
        nonlocal since
        if since is None and signals.received:
            since = time.monotonic()
        return signals.hurry() or (since is not None and time.monotonic() > since + seconds)

    return give_up


def _hand_back(workers: Sequence[Worker]) -> None:
    """Give back what still runs; the process must do nothing else afterwards.

    If one database does not answer, stop waiting before the events of another become due.
    """
    handing = ThreadPoolExecutor(len(workers))
    ends = [handing.submit(worker.hand_back, HAND_BACK_DELAY) for worker in workers]
    wait(ends, return_when=FIRST_COMPLETED)
    wait(ends, timeout=HAND_BACK_DELAY / 2)
    handing.shutdown(wait=False)


@contextmanager
def _serving(metrics: Metrics | None) -> Iterator[None]:
    """Serve metrics from a thread during the ``with`` block."""
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
    aliases: Sequence[str | None], signals: Signals, output: HealthOutput, options: dict[str, Any]
) -> int:
    _begin_as_child(signals)
    return serve(aliases, signals, output, **options)


def _begin_as_child(signals: Signals) -> None:
    """Handle signals in a child process; treat the parent's death as a signal.

    The count of signals is kept, because one may have come right after the fork.
    """
    signals.install(ignore_interrupt=True)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        signals.receive()  # the supervisor was killed; nothing else would stop this process

    threading.Thread(target=watch, name="outbox-parent-watch", daemon=True).start()


def run_reloading(
    aliases: Sequence[str | None],
    *,
    probes: Probes | None = None,
    metrics: Metrics | None = None,
    **options: Any,
) -> int:
    """Run one process that drains when code changes, and start it again then.

    Django's own ``run_with_reloader`` kills its child when it receives a signal itself.
    """
    signals = Signals()
    if os.environ.get(DJANGO_AUTORELOAD_ENV) == "true":
        output = probes or Probes()
        output.open()
        return _serve_until_changed(aliases, signals, output, {"metrics": metrics, **options})
    signals.install()
    code = RELOAD_EXIT_CODE
    while code == RELOAD_EXIT_CODE and not signals.received:
        environment = {**os.environ, DJANGO_AUTORELOAD_ENV: "true"}
        command = get_child_arguments()
        code = _attend(subprocess.Popen(command, env=environment), signals)  # noqa: S603 - ours
    return code


def _attend(child: subprocess.Popen[bytes], signals: Signals) -> int:
    """Wait for the child to end, and pass signals on; return its exit code."""
    forwarded = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(0.1)
            # Killed by the signal before it could install its handlers.
            return 0 if forwarded and code == -signal.SIGTERM else abs(code)
        if forwarded < signals.received:
            forwarded = signals.received
            child.terminate()


def _serve_until_changed(
    aliases: Sequence[str | None], signals: Signals, output: HealthOutput, options: dict[str, Any]
) -> int:
    changed = threading.Event()

    def on_change(**kwargs: Any) -> bool:
        if not changed.is_set():
            changed.set()
            signals.receive()
        return True  # or the reloader calls sys.exit(), which ends only its own thread

    file_changed.connect(on_change)
    watch = threading.Thread(
        target=get_reloader().run,
        args=(threading.main_thread(),),
        name="outbox-reloader",
        daemon=True,
    )
    watch.start()
    code = _serve_as_child(aliases, signals, output, options)
    return RELOAD_EXIT_CODE if changed.is_set() else code
