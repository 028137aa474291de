"""Settle the events of a batch in the transaction of their atomic listener."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections

from ..conf import Settings
from ..events import stored_instant
from ..listeners.outcomes import UNSETTLED, Decision
from ..listeners.registry import Listener
from ..models import OutboxEvent, OutboxStream
from ..sql.halving import settle_within
from ..sql.values import Ending, LeaseKind
from .lease import Lease
from .member import Member


def settle_together(
    listener: Listener,
    ends: Sequence[tuple[Member, Decision]],
    *,
    alias: str,
    settings: Settings,
    seconds: float,
) -> bool:
    """Write decisions on the listener's connection; return whether all leases were still ours.

    ``seconds``: how long the call took.
    """
    by_kind: dict[LeaseKind, list[Ending]] = {}
    for member, decision in ends:
        lease = member.lease
        failure = lease.failure(
            decision, listener=listener.title, number=member.attempts + 1, seconds=seconds
        )
        by_kind.setdefault(lease.kind, []).append(lease.ending(decision, failure))
    for kind, endings in by_kind.items():
        settled = settle_within(
            connections[alias],
            endings,
            me=ends[0][0].lease.owner,
            kind=kind,
            delete_done=settings.RETENTION_DONE == 0,
        )
        if settled < len(endings):
            return False
    return True


def owned(leases: Sequence[Lease], *, alias: str) -> set[str]:
    """Return the ids of the events whose leases this worker still has."""
    ids = [each.id for each in leases]
    streams = [each.stream for each in leases if each.stream is not None]
    rows = OutboxEvent.objects.using(alias).filter(pk__in=ids, status__in=UNSETTLED)
    events = {pk: lease for pk, *lease in rows.values_list("pk", "locked_by", "locked_at")}
    found = OutboxStream.objects.using(alias).filter(pk__in=streams)
    by_name = {pk: lease for pk, *lease in found.values_list("pk", "locked_by", "locked_at")}
    return {
        each.id
        for each in leases
        if each.id in events
        and (events[each.id] if each.stream is None else by_name.get(each.stream))
        == [each.owner, stored_instant(each.locked_at)]
    }
