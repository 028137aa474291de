"""Settle events in the transaction of their atomic listener."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections

from ..conf import Settings
from ..listeners.outcomes import Decision
from ..sql.halving import settle_within
from ..sql.values import Ending, LeaseKind
from .lease import Lease


def settle_together(
    ends: Sequence[tuple[Lease, Decision]], *, alias: str, settings: Settings
) -> bool:
    """Write decisions on the listener's connection; return whether all leases were still ours."""
    by_kind: dict[LeaseKind, list[Ending]] = {}
    for lease, decision in ends:
        by_kind.setdefault(lease.kind, []).append(lease.ending(decision))
    for kind, endings in by_kind.items():
        settled = settle_within(
            connections[alias],
            endings,
            me=ends[0][0].owner,
            kind=kind,
            delete_done=settings.RETENTION_DONE == 0,
        )
        if settled < len(endings):
            return False
    return True
