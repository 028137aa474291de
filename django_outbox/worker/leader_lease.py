"""Leases by name, on what one worker at a time does for all; their rows store the progress."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.db import connections

from ..clocks import monotonic
from ..models import OutboxLease
from ..models.fields import DatabaseNow
from ..sql import dialect_of
from .held import SAFE_PART

logger = logging.getLogger("django_outbox")

SINGLE_NODE: Final = "single_node"  # the name of the active worker's lease


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease as read from the table."""

    now: datetime  # by the database's clock
    state: str | None = None  # as its last holder left it
    locked_for: float = 0.0  # seconds until another worker's lease ends, unless it is renewed


class Leader:
    """Takes and renews the lease of one name, which ends by itself if its worker dies."""

    def __init__(self, *, alias: str, me: str, name: str, lease: float) -> None:
        """``lease``: seconds."""
        self._alias, self._me, self._name, self._lease = alias, me, name, lease
        self._until = self._renewed_at = 0.0  # monotonic; until when it is certainly ours
        self._taken = False  # taken and not given back

    @property
    def holds(self) -> bool:
        return monotonic() < self._until

    def read(self) -> LeaseRow:
        rows = OutboxLease.objects.using(self._alias).filter(pk=self._name)
        found = rows.annotate(now=DatabaseNow()).values_list(
            "now", "state", "locked_by", "locked_until"
        )
        for now, state, owner, until in found:
            if owner in (None, self._me) or until is None:
                return LeaseRow(now, state, 0.0)
            return LeaseRow(now, state, (until - now).total_seconds())
        connection = connections[self._alias]
        return LeaseRow(dialect_of(connection).clock())

    def take(self) -> bool:
        """Take the lease if it is free; return whether it is ours."""
        connection, started = connections[self._alias], monotonic()
        taken = dialect_of(connection).take_lease(name=self._name, me=self._me, lease=self._lease)
        return self._record(taken, started)

    def renew(self, state: str) -> bool:
        """Renew the lease and store the progress, if it is time; return whether that was done."""
        started = monotonic()
        if started < self._renewed_at + self._lease / 3:
            return False
        return self._record(self._write(state, self._lease), started)

    def release(self, state: str) -> None:
        """Give the lease back and store the progress."""
        if self._taken:
            self._write(state, None)
            self._record(False, 0.0)

    def close(self, state: str) -> None:
        """Give the lease back when the worker stops; an error is only logged."""
        try:
            self.release(state)
        except Exception as error:  # noqa: BLE001 - the lease ends by itself
            logger.warning("release of a lease failed name=%s error=%s", self._name, error)

    def _write(self, state: str, lease: float | None) -> bool:
        connection = connections[self._alias]
        return dialect_of(connection).note_lease(
            name=self._name, me=self._me, lease=lease, state=state
        )

    def _record(self, held: bool, started: float) -> bool:
        self._taken, self._renewed_at = held, started
        self._until = started + SAFE_PART * self._lease if held else 0.0
        return held


class ActiveLease:
    """Takes and renews the lease that makes a worker the active one."""

    def __init__(self, *, alias: str, me: str, lease: float, poll: float) -> None:
        self._leader, self._me = Leader(alias=alias, me=me, name=SINGLE_NODE, lease=lease), me
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
