"""The hot queues of this process's workers, where writers look them up by alias."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Protocol

from ..events import Event


class HotQueue(Protocol):
    """The interface of a worker to the writers in its process."""

    def serves(self, queue: str) -> bool:
        """Return whether the worker delivers events of this queue."""

    def offer(self, event: Event) -> bool:
        """Accept the event and return True, or return False; never block, never raise."""

    def poll(self) -> None:
        """Have the claimer poll the table, where an event is due now or later."""


class HotQueues:
    """The hot queues of this process's workers, by database alias; empty after a fork."""

    start_worker: Callable[[str], None] | None = None  # set by EMBEDDED; takes an alias

    def __init__(self) -> None:
        self.by_alias: dict[str, HotQueue] = {}
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def of(self, alias: str) -> HotQueue | None:
        """Return the hot queue of this process; with EMBEDDED the first call starts its worker."""
        if self.start_worker is not None and alias not in self._started:
            with self._lock:
                first = alias not in self._started
                self._started.add(alias)
            if first and alias not in self.by_alias:
                self.start_worker(alias)
        return self.by_alias.get(alias)

    def _reset(self) -> None:
        self.by_alias.clear()
        self._started: set[str] = set()
        self._lock = threading.Lock()


hot_queues = HotQueues()
