"""What the dashboard shows, read once every few seconds for all who refresh it.

It is kept in the memory of the process: a shared cache would need settings of the project, and a
dashboard that works while other services are down must not depend on one. So each process of the
web server reads once per ``MAX_AGE``, however many tabs are open.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from django.db import router

from ..clocks import monotonic
from ..inspection.causes import Causes
from ..inspection.overview import Overview, load_overview
from ..models import OutboxEvent

MAX_AGE: Final = 5.0  # seconds
MAX_STALE: Final = 60.0  # seconds; age of what is shown while another thread reads
MAX_CAUSES_AGE: Final = 30.0  # seconds; to group many dead events takes long


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The data of one page; it depends neither on the user nor on the language."""

    overview: Overview
    read_at: float  # monotonic
    causes_read_at: float  # monotonic

    def is_younger(self, seconds: float) -> bool:
        return monotonic() - self.read_at < seconds


_latest: dict[str, Snapshot] = {}  # by database alias
_lock = threading.Lock()  # held by the thread that reads for the others


def fresh_snapshot() -> Snapshot:
    """Read the data now, and keep it for the next refresh."""
    return _read(causes=None, causes_read_at=monotonic())


def recent_snapshot() -> Snapshot:
    """Return data that is at most ``MAX_AGE`` old, or older while another thread reads."""
    alias = router.db_for_write(OutboxEvent)
    known = _latest.get(alias)
    if known is not None and known.is_younger(MAX_AGE):
        return known
    can_wait = known is None or not known.is_younger(MAX_STALE)
    if not _lock.acquire(blocking=can_wait):
        assert known is not None
        return known
    try:
        known = _latest.get(alias)
        if known is not None and known.is_younger(MAX_AGE):
            return known
        if known is None or monotonic() - known.causes_read_at >= MAX_CAUSES_AGE:
            return fresh_snapshot()
        return _read(causes=known.overview.causes, causes_read_at=known.causes_read_at)
    finally:
        _lock.release()


def _read(*, causes: Causes | None, causes_read_at: float) -> Snapshot:
    alias = router.db_for_write(OutboxEvent)
    overview = load_overview(alias, causes=causes)
    found = Snapshot(overview=overview, read_at=monotonic(), causes_read_at=causes_read_at)
    _latest[alias] = found
    return found
