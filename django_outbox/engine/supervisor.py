"""Processes of ``outbox_worker`` that are kept alive, and the signals that end them."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType

from ..conf import current
from .health import SILENT, Health, Report, Shown, together

logger = logging.getLogger("django_outbox")

BACKOFF = (0.1, 30.0)  # seconds before a process that died is replaced, and at most
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


class Supervisor:
    """Keeps processes alive: replaces the dead with backoff, passes signals on, answers for all."""

    def __init__(self, mains: Sequence[Callable[[Report], int]]) -> None:
        self._slots = [_Slot(main) for main in mains]
        self._draining = False

    def run(self, signals: Signals, shown: Shown) -> int:
        logger.info("supervisor started pid=%d processes=%d", os.getpid(), len(self._slots))
        while not signals.wait(0.05):
            for slot in self._slots:
                slot.tend()
            shown.show(self.health)
        self._draining = True
        for slot in self._slots:
            slot.code = 0  # how processes ended before is told already
            slot.tell(signal.SIGTERM)
        while any(slot.is_alive() for slot in self._slots):
            time.sleep(0.02)
            shown.show(self.health)
            if signals.hurry():  # again and again, for two at once arrive as one
                for slot in self._slots:
                    slot.tell(signal.SIGTERM)
        return 1 if any(slot.code for slot in self._slots) else 0

    def health(self) -> Health:
        """Say how all processes are; while they drain, only that."""
        if self._draining:
            return Health(unready=("draining",))
        return together(slot.health() for slot in self._slots)


class _Slot:
    """The place of one process."""

    def __init__(self, main: Callable[[Report], int]) -> None:
        self._main = main
        self.code = 0  # of the last process that ended
        self._pid = 0  # 0: none
        self._started_at = 0.0  # monotonic
        self._not_before = 0.0  # monotonic
        self._deaths = 0  # in a row, each soon after its start
        self._report: Report | None = None  # of the process that runs
        self._heard_at = 0.0  # monotonic; its last word, or its start
        self._word = Health(unready=("starting",))

    def tend(self) -> None:
        if not self.is_alive() and time.monotonic() >= self._not_before:
            self._fork()
        elif self._report and (word := self._report.hear()):
            self._heard_at, self._word = time.monotonic(), word

    def is_alive(self) -> bool:
        if not self._pid:
            return False
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._note_end(os.waitstatus_to_exitcode(status))
        return not pid

    def health(self) -> Health:
        """Say how the process is; one that died is being replaced, which is no reason to restart.

        One that has been silent for a lease is dead: what it held is somebody else's by now.
        """
        if not self._pid:
            return Health(unready=("a process died and is being replaced",))
        silent = time.monotonic() - self._heard_at
        if silent > max(current().LEASE, SILENT):
            word = Health(dead=(f"silent for {silent:.0f} s",))
        else:
            word = self._word
        return word.of(f"process {self._pid}")

    def tell(self, number: int) -> None:
        if self._pid:
            os.kill(self._pid, number)

    def _fork(self) -> None:
        self._started_at = self._heard_at = time.monotonic()
        self._word = Health(unready=("starting",))
        self._report = Report()
        self._pid = os.fork()
        if self._pid:
            self._report.keep_ear()
            return
        code = 1
        try:
            self._report.keep_mouth()
            code = self._main(self._report)
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
        if self._report:
            self._report.forget()
            self._report = None
