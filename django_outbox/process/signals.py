"""Counts the signals that ask a process to stop, and treats its parent's death as one."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Final

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
