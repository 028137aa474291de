"""The lease of the mode ``single_node``: one worker is active, the others stand by."""

from __future__ import annotations

import logging
from typing import Final

from .leader_lease import Leader

logger = logging.getLogger("django_outbox")

NAME: Final = "single_node"  # of the lease


class ActiveLease:
    """Takes and renews the lease that makes a worker the active one."""

    def __init__(self, *, alias: str, me: str, lease: float, poll: float) -> None:
        self._leader, self._me = Leader(alias=alias, me=me, name=NAME, lease=lease), me
        self._pause = min(lease / 6, poll)
        self._held: bool | None = None  # as last logged; None: not yet

    def __call__(self) -> bool:
        """Return whether this worker may claim."""
        return self._leader.holds

    def step(self) -> float:
        held = self._leader.take()
        if held is not self._held:
            self._held = held
            logger.info("active id=%s" if held else "standing by id=%s", self._me)
        return self._pause

    def release(self) -> None:
        """Let a standby take over at once. Call it in the thread of ``step``."""
        self._leader.close("")
