"""Checks for calls of listeners that last too long, from a thread that needs no database."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

logger = logging.getLogger("django_outbox")

CHECK_INTERVAL = 0.25  # seconds between two checks


class Watchdog:
    """Calls each function of ``watch`` a few times a second; logs what one raises."""

    def __init__(self, alias: str, *, watch: Sequence[Callable[[], None]]) -> None:
        self._watch = watch
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"outbox-{alias}-watchdog", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; may be called again."""
        self._stopping.set()

    def join(self, timeout: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def dead_reason(self, longest: float) -> str | None:
        """Return a reason if its thread has ended without being asked to."""
        ended = self._thread.ident and not self._thread.is_alive() and not self._stopping.is_set()
        return f"{self._thread.name} has ended" if ended else None

    def _run(self) -> None:
        while not self._stopping.wait(CHECK_INTERVAL):
            for check in self._watch:
                try:
                    check()
                except Exception:
                    logger.exception("watchdog failed")
