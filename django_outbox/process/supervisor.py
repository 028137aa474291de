"""Keeps the processes of ``outbox_worker`` alive, and stops them on signals."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Final

import msgspec

from ..conf import current
from ..worker.threads import Health, combine
from .probes import Probes

logger = logging.getLogger("django_outbox")

BACKOFF = (0.1, 30.0)  # seconds before a dead process is replaced: at first, and at most
HEALTHY_AFTER: Final = 10.0  # seconds after which a process counts as successfully started
REPORT_INTERVAL: Final = 1.0  # seconds between two reports to the supervisor
# Seconds without a report after which a process counts as dead, if leases are not longer.
SILENCE_LIMIT: Final = 5.0
MAX_REPORT: Final = 65_536  # bytes
STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_ON: Final = signal.SIGUSR2  # from a supervisor to its children: stop


class Signals:
    """Counts signals such as SIGTERM: the first asks for a graceful stop, the second hurries it.

    A supervisor passes requests on to its children by another signal, which is counted separately:
    if systemd has sent SIGTERM to every process, the two must not count as two requests.

    ``receive`` runs between two bytecodes of the main thread, perhaps inside the code of a lock. So
    it uses only numbers and a queue that is safe to re-enter.
    """

    def __init__(self) -> None:
        self._direct = self._passed_on = 0
        self.first_at = inf  # monotonic; when the first came
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    def install(self, *numbers: int) -> None:
        """Count these signals; outside the main thread, do nothing.

        A hangup that is ignored stays so, as ``nohup`` wants it.
        """
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self.receive)

    def install_in_child(self) -> None:
        """Count them in a child process, for which its parent's death is one, too.

        The count so far is kept, because one may have come right after the fork.
        """
        self.install(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread():
            # These reach every process of the terminal, but the parent signals its children.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        parent = os.getppid()

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(0.5)
            self.receive()  # the supervisor was killed; nothing else would stop this process

        threading.Thread(target=watch, name="outbox-parent-watch", daemon=True).start()

    def receive(self, number: int = 0, frame: FrameType | None = None) -> None:
        self.first_at = min(self.first_at, time.monotonic())
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

    def __init__(
        self, mains: Sequence[Callable[[HealthPipe], int]], signals: Signals, probes: Probes
    ) -> None:
        """``mains`` run in the child processes, and return their exit codes."""
        self._slots = [_Slot(main, self._begin_child) for main in mains]
        self._signals, self._probes = signals, probes

    def run(self) -> int:
        """Supervise until a signal, then until all have ended; return the exit code."""
        logger.info("supervisor started pid=%d processes=%d", os.getpid(), len(self._slots))
        while not self._signals.wait(0.05):
            for slot in self._slots:
                slot.check()
            self._probes.publish(lambda: combine(slot.health() for slot in self._slots))
        for slot in self._slots:
            slot.code = 0  # earlier exit codes are logged already
            slot.pass_on()
        while any(slot.is_alive() for slot in self._slots):
            time.sleep(0.02)
            self._probes.publish(lambda: Health(unready=("draining",)))
            if self._signals.hurry():  # repeatedly, because two at once arrive as one
                for slot in self._slots:
                    slot.pass_on()
        return 1 if any(slot.code for slot in self._slots) else 0

    def _begin_child(self) -> None:
        self._probes.close()
        self._signals.install_in_child()


class HealthPipe:
    """Reports the health of a process to its supervisor, which reads the latest report.

    Neither end ever blocks: a report that does not fit is dropped, because another one follows.
    """

    interval: Final = 0.5  # seconds between two calls of ``publish``

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair(type=socket.SOCK_DGRAM)
        self._next_at = 0.0  # monotonic
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def publish(self, get_health: Callable[[], Health]) -> None:
        """Report the health, about once a second."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + REPORT_INTERVAL
            with suppress(OSError):  # full, or the supervisor is gone
                self._writer.send(msgspec.json.encode(get_health()))

    def read_latest(self) -> Health | None:
        """Return the latest report; None if there was none since the last call."""
        report = None
        with suppress(BlockingIOError):
            while True:
                report = self._reader.recv(MAX_REPORT)
        return msgspec.json.decode(report, type=Health) if report else None

    def close(self) -> None:
        for end in (self._reader, self._writer):
            end.close()


class _Slot:
    """One process and, in turn, its replacements."""

    def __init__(self, main: Callable[[HealthPipe], int], begin: Callable[[], None]) -> None:
        self._main, self._begin = main, begin  # both run in the process
        self.code = 0  # of the last process that ended
        self._pid = 0  # 0: none
        self._restart_at = 0.0  # monotonic
        self._deaths = 0  # consecutive, each soon after its start
        self._pipe: HealthPipe  # of the last process
        self._started_at = self._reported_at = 0.0  # monotonic; of its latest report, too
        self._last_report = Health()

    def check(self) -> None:
        """Start a process if none runs, after the back-off; otherwise read its report."""
        if self.is_alive():
            if report := self._pipe.read_latest():
                self._reported_at, self._last_report = time.monotonic(), report
        elif time.monotonic() >= self._restart_at:
            self._fork()

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
        # What comes to the child before its interpreter is ready waits: it would be forgotten.
        signal.pthread_sigmask(signal.SIG_BLOCK, {PASSED_ON})
        self._pid = os.fork()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {PASSED_ON})
        if self._pid:
            return
        code = 1
        try:
            self._begin()
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
        self._pipe.close()
