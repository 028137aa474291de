"""The lease of the mode ``single_node``: one worker is active, the others stand by."""

from __future__ import annotations

import logging

from django.db import connections

from ..clocks import monotonic
from ..sql import dialect_of
from .queues import SAFE_PART

logger = logging.getLogger("django_outbox")


class ActiveLease:
    """Takes and renews the lease, a single row, that makes a worker the active one."""

    def __init__(self, *, alias: str, me: str, lease: float, poll: float) -> None:
        self._alias, self._me, self._lease = alias, me, lease
        self._pause = min(lease / 6, poll)
        self._until = 0.0  # monotonic; our own deadline, safely before others may take over
        self._held: bool | None = None  # as last logged; None: not yet

    def __call__(self) -> bool:
        """Return whether this worker may claim."""
        return monotonic() < self._until

    def step(self) -> float:
        connection, started = connections[self._alias], monotonic()
        held = dialect_of(connection).take_active(connection, me=self._me, lease=self._lease)
        self._until = started + SAFE_PART * self._lease if held else 0.0
        if held is not self._held:
            self._held = held
            logger.info("active id=%s" if held else "standing by id=%s", self._me)
        return self._pause

    def release(self) -> None:
        """Let a standby take over at once. Call it in the thread of ``step``."""
        self._until = 0.0
        connection = connections[self._alias]
        try:
            dialect_of(connection).release_active(connection, me=self._me)
        except Exception as error:  # noqa: BLE001 - the lease ends by itself
            logger.warning("release of the active lease failed error=%s", error)
