"""What ``outbox_worker`` runs: workers until a signal, in one process or several; its exit code."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from django.db import connections
from django.utils.autoreload import (
    DJANGO_AUTORELOAD_ENV,
    file_changed,
    get_child_arguments,
    get_reloader,
)

from .worker import Worker

logger = logging.getLogger("django_outbox")

BACKOFF = (0.1, 30.0)  # seconds before a process that died is replaced, and at most
RELOAD = 3  # exit code by which a process asks to be started again, as with runserver
HEALTHY = 10.0  # seconds after which a process counts as well started


class Signals:
    """Counts SIGTERM and SIGINT: the first asks for a soft stop, the second for a quick one.

    The receiver runs between two bytecodes of the main thread, which may just be inside a lock's
    own code; so it touches nothing but a number and a queue that is safe to re-enter.
    """

    def __init__(self) -> None:
        self.received = 0
        self._news: SimpleQueue[None] = SimpleQueue()

    def install(self, *, ignore_interrupt: bool = False) -> None:
        """Take the signals over, where this is the main thread and may."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.receive)
            # Ctrl-C reaches every process of the terminal, but children are told by their parent.
            signal.signal(signal.SIGINT, signal.SIG_IGN if ignore_interrupt else self.receive)

    def receive(self, number: int = 0, frame: FrameType | None = None) -> None:
        self.received += 1
        self._news.put(None)

    def wait(self, timeout: float) -> bool:
        """Wait for the first signal, at most ``timeout`` seconds; say whether it came."""
        if not self.received:
            with suppress(Empty):
                self._news.get(timeout=timeout)
        return self.received > 0

    def hurry(self) -> bool:
        """Say whether the second signal came."""
        return self.received > 1


def run(aliases: Sequence[str | None], *, processes: int = 1, **options: Any) -> int:
    """Run workers until a signal; return 0 when drained, 1 when work was abandoned."""
    signals = Signals()
    signals.install()
    if processes == 1:
        return serve(aliases, signals, **options)
    connections.close_all()  # nothing of the database may be shared by a fork
    return Supervisor(processes, lambda: _serve_as_child(aliases, signals, options)).run(signals)


def serve(aliases: Sequence[str | None], signals: Signals, **options: Any) -> int:
    """Run one worker per alias in this process."""
    workers = [Worker(using=alias, **options) for alias in aliases]
    try:
        for worker in workers:
            worker.start()
        while not signals.wait(0.5) and not any(worker.is_spent for worker in workers):
            pass
    finally:
        with ThreadPoolExecutor(len(workers)) as stopping:  # none goes on while another drains
            ends = [*stopping.map(lambda worker: worker.stop(hurry=signals.hurry), workers)]
    return 0 if all(ends) and not signals.hurry() else 1


def _serve_as_child(
    aliases: Sequence[str | None], signals: Signals, options: dict[str, Any]
) -> int:
    """Go on with the parent's count: a signal that came right after the fork is in it."""
    signals.install(ignore_interrupt=True)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        signals.receive()  # the supervisor was killed; nobody would ever stop us

    threading.Thread(target=watch, name="outbox-parent-watch", daemon=True).start()
    return serve(aliases, signals, **options)


def run_reloading(aliases: Sequence[str | None], **options: Any) -> int:
    """Run one process that ends softly when code changes, and start it again then.

    Django's own ``run_with_reloader`` kills its child when it is told to end itself.
    """
    signals = Signals()
    if os.environ.get(DJANGO_AUTORELOAD_ENV) == "true":
        return _serve_until_changed(aliases, signals, options)
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
    aliases: Sequence[str | None], signals: Signals, options: dict[str, Any]
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
    code = _serve_as_child(aliases, signals, options)
    return RELOAD if changed.is_set() else code


class Supervisor:
    """Keeps a number of processes alive: replaces the dead with backoff, passes signals on."""

    def __init__(self, processes: int, main: Callable[[], int]) -> None:
        self._main = main
        self._slots = [_Slot() for _ in range(processes)]

    def run(self, signals: Signals) -> int:
        logger.info("supervisor started pid=%d processes=%d", os.getpid(), len(self._slots))
        while not signals.wait(0.05):
            for slot in self._slots:
                slot.tend(self._main)
        for slot in self._slots:
            slot.code = 0  # how processes ended before is told already
            slot.tell(signal.SIGTERM)
        while any(slot.is_alive() for slot in self._slots):
            time.sleep(0.02)
            if signals.hurry():  # again and again, for two at once arrive as one
                for slot in self._slots:
                    slot.tell(signal.SIGTERM)
        return 1 if any(slot.code for slot in self._slots) else 0


class _Slot:
    """The place of one process."""

    def __init__(self) -> None:
        self.code = 0  # of the last process that ended
        self._pid = 0  # 0: none
        self._started_at = 0.0  # monotonic
        self._not_before = 0.0  # monotonic
        self._deaths = 0  # in a row, each soon after its start

    def tend(self, main: Callable[[], int]) -> None:
        if not self.is_alive() and time.monotonic() >= self._not_before:
            self._fork(main)

    def is_alive(self) -> bool:
        if not self._pid:
            return False
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._note_end(os.waitstatus_to_exitcode(status))
        return not pid

    def tell(self, number: int) -> None:
        if self._pid:
            os.kill(self._pid, number)

    def _fork(self, main: Callable[[], int]) -> None:
        self._started_at = time.monotonic()
        self._pid = os.fork()
        if self._pid:
            return
        code = 1
        try:
            code = main()
        except BaseException:
            logger.exception("worker process failed")
        finally:
            os._exit(code)  # the parent's cleanup is not ours

    def _note_end(self, code: int) -> None:
        now = time.monotonic()
        self._deaths = 0 if code == 0 or now - self._started_at > HEALTHY else self._deaths + 1
        first, most = BACKOFF
        pause = min(first * 2.0 ** min(self._deaths, 10), most) if self._deaths else 0.0
        if code:
            logger.error("worker process ended pid=%d code=%d next=%.1fs", self._pid, code, pause)
        self._pid, self._not_before, self.code = 0, now + pause, abs(code)
