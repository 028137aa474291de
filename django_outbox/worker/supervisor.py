"""Keeps the processes of ``outbox_worker`` alive, and stops them on signals."""

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
from .health import SILENCE_LIMIT, Health, HealthOutput, HealthPipe, combine

logger = logging.getLogger("django_outbox")

BACKOFF = (0.1, 30.0)  # seconds before a dead process is replaced: at first, and at most
PASSED_ON = signal.SIGUSR2  # from a supervisor to its children: stop
HEALTHY_AFTER = 10.0  # seconds after which a process counts as successfully started


class Signals:
    """Counts SIGTERM and SIGINT: the first asks for a graceful stop, the second for a quick one.

    A supervisor passes requests on to its children by another signal, which is counted separately:
    if systemd has sent SIGTERM to every process, the two must not count as two requests.

    ``receive`` runs between two bytecodes of the main thread, perhaps inside the code of a lock. So
    it uses only numbers and a queue that is safe to re-enter.
    """

    def __init__(self) -> None:
        self._direct = self._passed_on = 0
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    def install(self, *, ignore_interrupt: bool = False) -> None:
        """Install the signal handlers; outside the main thread, do nothing."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.receive)
            # Ctrl-C reaches every process of the terminal, but the parent signals its children.
            signal.signal(signal.SIGINT, signal.SIG_IGN if ignore_interrupt else self.receive)

    def install_passed_on(self) -> None:
        """Install the handler of what a supervisor passes on, which its children inherit."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(PASSED_ON, self.receive)

    def receive(self, number: int = 0, frame: FrameType | None = None) -> None:
        if number == PASSED_ON:
            self._passed_on += 1
        else:
            self._direct += 1
        self._wakeups.put(None)

    @property
    def received(self) -> int:
        """How many requests to stop have come."""
        return max(self._direct, self._passed_on)

    def wait(self, timeout: float) -> bool:
        """Wait for the first signal, at most ``timeout`` seconds; return whether it came."""
        if not self.received:
            with suppress(Empty):
                self._wakeups.get(timeout=timeout)
        return self.received > 0

    def hurry(self) -> bool:
        """Return whether a second signal came."""
        return self.received > 1


class Supervisor:
    """Replaces dead processes, with back-off; passes signals on; reports the health of all."""

    def __init__(self, mains: Sequence[Callable[[HealthPipe], int]]) -> None:
        self._slots = [_Slot(main) for main in mains]
        self._draining = False

    def run(self, signals: Signals, output: HealthOutput) -> int:
        logger.info("supervisor started pid=%d processes=%d", os.getpid(), len(self._slots))
        while not signals.wait(0.05):
            for slot in self._slots:
                slot.check()
            output.publish(self.health)
        self._draining = True
        for slot in self._slots:
            slot.code = 0  # earlier exit codes are logged already
            slot.pass_on()
        while any(slot.is_alive() for slot in self._slots):
            time.sleep(0.02)
            output.publish(self.health)
            if signals.hurry():  # repeatedly, because two at once arrive as one
                for slot in self._slots:
                    slot.pass_on()
        return 1 if any(slot.code for slot in self._slots) else 0

    def health(self) -> Health:
        """Return the health of all processes together; while they drain, only that they do."""
        if self._draining:
            return Health(unready=("draining",))
        return combine(slot.health() for slot in self._slots)


class _Slot:
    """One process and, in turn, its replacements."""

    def __init__(self, main: Callable[[HealthPipe], int]) -> None:
        self._main = main
        self.code = 0  # of the last process that ended
        self._pid = 0  # 0: none
        self._started_at = 0.0  # monotonic
        self._restart_at = 0.0  # monotonic
        self._deaths = 0  # consecutive, each soon after its start
        self._pipe: HealthPipe | None = None  # of the process that runs
        self._reported_at = 0.0  # monotonic; when it last reported, or started
        self._last_report = Health(unready=("starting",))

    def check(self) -> None:
        """Start a process if none runs, after the back-off; otherwise read its report."""
        if not self.is_alive() and time.monotonic() >= self._restart_at:
            self._fork()
        elif self._pipe and (report := self._pipe.read_latest()):
            self._reported_at, self._last_report = time.monotonic(), report

    def is_alive(self) -> bool:
        if not self._pid:
            return False
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._record_exit(os.waitstatus_to_exitcode(status))
        return not pid

    def health(self) -> Health:
        """Return the health of the process; one that died is only unready, as it is replaced.

        One that has not reported for the length of a lease is dead: others may have its leases.
        """
        if not self._pid:
            return Health(unready=("a process died and is being replaced",))
        silent = time.monotonic() - self._reported_at
        if silent > max(current().LEASE, SILENCE_LIMIT):
            report = Health(dead=(f"silent for {silent:.0f} s",))
        else:
            report = self._last_report
        return report.prefixed(f"process {self._pid}")

    def pass_on(self) -> None:
        """Pass a signal to stop on to the process."""
        if self._pid:
            os.kill(self._pid, PASSED_ON)

    def _fork(self) -> None:
        self._started_at = self._reported_at = time.monotonic()
        self._last_report = Health(unready=("starting",))
        self._pipe = HealthPipe()
        self._pid = os.fork()
        if self._pid:
            self._pipe.keep_reader()
            return
        code = 1
        try:
            self._pipe.keep_writer()
            code = self._main(self._pipe)
        except BaseException:
            logger.exception("worker process failed")
        finally:
            os._exit(code)  # a child must not run the parent's cleanup

    def _record_exit(self, code: int) -> None:
        now = time.monotonic()
        was_healthy = code == 0 or now - self._started_at > HEALTHY_AFTER
        self._deaths = 0 if was_healthy else self._deaths + 1
        first, most = BACKOFF
        pause = min(first * 2.0 ** min(self._deaths, 10), most) if self._deaths else 0.0
        if code:
            logger.error("worker process ended pid=%d code=%d next=%.1fs", self._pid, code, pause)
        self._pid, self._restart_at, self.code = 0, now + pause, abs(code)
        if self._pipe:
            self._pipe.close_reader()
            self._pipe = None
