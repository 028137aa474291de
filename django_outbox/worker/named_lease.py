"""Leases by name, on what one worker at a time does for all; their rows store the progress."""

from __future__ import annotations

import logging
from typing import Final

from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..models import OutboxLease
from ..sql import dialect_of
from .effects import Steps
from .held import SAFE_PART

logger = logging.getLogger("django_outbox")

SINGLE_NODE: Final = "single_node"  # the name of the active worker's lease


class Leader:
    """Takes and renews the lease of one name, which ends by itself if its worker dies."""

    def __init__(self, *, me: str, name: str, lease: float) -> None:
        self._me, self._name, self.lease = me, name, lease  # seconds
        self._until = self._renewed_at = 0.0  # monotonic; until when it is certainly ours
        self._taken = False  # taken and not given back

    @property
    def holds(self) -> bool:
        return monotonic() < self._until

    def take(self, connection: BaseDatabaseWrapper) -> bool:
        """Take the lease if it is free; return whether it is ours."""
        started = monotonic()
        taken = dialect_of(connection).take_lease(name=self._name, me=self._me, lease=self.lease)
        return self._record(taken, started)

    def state(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return the progress as the last holder stored it."""
        row = OutboxLease.objects.using(connection.alias).filter(pk=self._name)
        return row.values_list("state", flat=True).first()

    def renew(self, state: str) -> Steps[bool]:
        """Renew the lease and store the progress, if it is time; return whether that was done."""
        started = monotonic()
        if started < self._renewed_at + self.lease / 3:
            return False
        renewed = yield lambda connection: self._write(connection, state, self.lease)
        return self._record(renewed, started)

    def release(self, state: str = "") -> Steps[None]:
        """Give the lease back, if we have it, and store the progress."""
        if self._taken:
            yield lambda connection: self._write(connection, state, None)
            self._record(False, 0.0)

    def _write(self, connection: BaseDatabaseWrapper, state: str, lease: float | None) -> bool:
        return dialect_of(connection).note_lease(
            name=self._name, me=self._me, lease=lease, state=state
        )

    def _record(self, held: bool, started: float) -> bool:
        self._taken, self._renewed_at = held, started
        self._until = started + SAFE_PART * self.lease if held else 0.0
        return held


class ActiveLease:
    """Takes and renews the lease that makes a worker the active one."""

    def __init__(self, *, me: str, lease: float, poll: float) -> None:
        self._me, self._pause = me, min(lease / 6, poll)
        self.leader = Leader(me=me, name=SINGLE_NODE, lease=lease)
        self._held: bool | None = None  # as last logged; None: not yet

    def step(self) -> Steps[float]:
        held = yield self.leader.take
        if held is not self._held:
            self._held = held
            logger.info("active id=%s" if held else "standing by id=%s", self._me)
        return self._pause
