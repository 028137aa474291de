"""Runs the workers of ``outbox_worker`` until a signal, in one process or several."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from http.server import HTTPServer
from math import inf
from typing import Any

from django.db import connections
from django.utils.autoreload import file_changed, get_child_arguments, get_reloader

from ..worker.threads import Health, combine
from ..worker.worker import Worker
from .probes import Probes
from .supervisor import PASSED_ON, STOPPING, HealthPipe, Signals, Supervisor

logger = logging.getLogger("django_outbox")

# Objects that exist more than at the last collection of young ones: with Python's 700, each claim
# caused two, and they took 3 % of a drain.
YOUNG_OBJECTS = 10_000
HAND_BACK_DELAY = 1.0  # seconds until handed-back events are due; this process has ended by then

Metrics = Callable[[], tuple[HTTPServer, threading.Thread]]  # opens a port, served by a thread


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
    signals, output = Signals(), probes or Probes()
    signals.install(*STOPPING)
    output.open()
    if processes == 1:
        return serve(aliases, signals, output, metrics=metrics, **options)
    signals.install(PASSED_ON)
    connections.close_all()  # a fork must not share database connections

    def deliver(pipe: HealthPipe) -> int:
        return serve(aliases, signals, pipe, **options)

    def serve_metrics(pipe: HealthPipe) -> int:
        """Serve metrics from a separate process: the supervisor forks, so it has no threads."""
        with _serving(metrics):
            while not signals.wait(pipe.interval):
                pipe.publish(Health)
        return 0

    mains = [*[deliver] * processes, *([serve_metrics] if metrics else [])]
    return Supervisor(mains, signals, output).run()


def serve(
    aliases: Sequence[str | None],
    signals: Signals,
    output: Probes | HealthPipe,
    *,
    metrics: Metrics | None = None,
    **options: Any,
) -> int:
    """Run one worker per alias; return the exit code. The process must end right afterwards."""
    gc.freeze()  # each full collection walked through all that Django has loaded
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    workers = [Worker(using=alias, **options) for alias in aliases]
    try:
        with _serving(metrics):
            finished = _work(workers, signals, output)
    finally:
        _hand_back(workers)
    return 0 if finished and not signals.hurry() else 1


def _work(workers: Sequence[Worker], signals: Signals, output: Probes | HealthPipe) -> bool:
    """Deliver until a signal, or until a worker must be replaced; return whether all drained."""

    def get_health() -> Health:
        return combine(worker.health() for worker in workers)

    def lost() -> list[str]:
        return [reason for each in workers for reason in each.lost_threads]

    spent, reasons = False, list[str]()
    try:
        for worker in workers:
            worker.start()
        while not (reasons or spent or signals.wait(output.interval)):
            output.publish(get_health)
            spent, reasons = any(each.is_spent for each in workers), lost()
        if reasons:
            logger.error("threads lost, the process ends reason=%s", "; ".join(reasons))
    finally:
        since = inf if spent and not reasons else time.monotonic()
        with ThreadPoolExecutor(len(workers)) as stopping:  # drain all at the same time
            ends = [
                stopping.submit(
                    each.finish, partial(is_late, signals, each.settings.DRAIN_TIMEOUT, since)
                )
                for each in workers
            ]
            while wait(ends, timeout=output.interval).not_done:
                output.publish(get_health)
    # Threads may come back while others drain; the process is replaced all the same.
    return all(each.result() for each in ends) and not reasons and not lost()


def is_late(signals: Signals, seconds: float, since: float) -> bool:
    """Return whether to stop waiting for running listeners.

    It is after the second signal, or ``seconds`` after ``since`` (monotonic) or the first one.
    """
    return signals.hurry() or time.monotonic() > min(since, signals.first_at) + seconds


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


def run_reloading(
    aliases: Sequence[str | None], *, probes: Probes | None = None, **options: Any
) -> int:
    """Run workers in this process; when code changes, drain and execute the command anew.

    Django's own ``run_with_reloader`` kills its child when it receives a signal itself.
    """
    signals, output, changed = Signals(), probes or Probes(), threading.Event()
    signals.install(*STOPPING)
    output.open()

    def on_change(**kwargs: Any) -> bool:
        if not changed.is_set():
            changed.set()
            signals.receive()
        return True  # or the reloader calls sys.exit(), which ends only its own thread

    file_changed.connect(on_change)
    run_reloader, main_thread = get_reloader().run, threading.main_thread()
    threading.Thread(
        target=run_reloader, args=(main_thread,), name="outbox-reloader", daemon=True
    ).start()
    code = serve(aliases, signals, output, **options)
    if changed.is_set() and not signals.hurry():
        command = get_child_arguments()
        os.execv(command[0], command)  # noqa: S606 - the command that runs now
    return code
