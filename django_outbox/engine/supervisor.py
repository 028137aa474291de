"""What ``outbox_worker`` runs: workers until a signal, and the exit code."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from .worker import Worker

logger = logging.getLogger("django_outbox")


class Signals:
    """Counts SIGTERM and SIGINT: the first asks for a soft stop, the second for a quick one."""

    def __init__(self) -> None:
        self.first = threading.Event()
        self.second = threading.Event()

    def install(self) -> None:
        """Take the signals over, where this is the main thread and may."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._receive)
            signal.signal(signal.SIGINT, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        (self.second if self.first.is_set() else self.first).set()


def run(aliases: Sequence[str | None], **options: Any) -> int:
    """Run one worker per alias until a signal; return 0 when drained, 1 when work was abandoned."""
    signals = Signals()
    signals.install()
    workers = [Worker(using=alias, **options) for alias in aliases]
    try:
        for worker in workers:
            worker.start()
        while not signals.first.wait(1.0):
            pass
    finally:
        ends = [worker.stop(hurry=signals.second.is_set) for worker in workers]
    return 0 if all(ends) and not signals.second.is_set() else 1
