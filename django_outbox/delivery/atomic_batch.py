"""Settle the events of a batch in the transaction of their atomic listener."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections

from ..conf import Settings
from ..listeners.outcomes import UNSETTLED, Decision
from ..listeners.registry import Listener
from ..models import OutboxEvent, OutboxStream
from ..sql.halving import settle_within
from ..sql.values import LeaseKind
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
    """Write decisions on the listener's connection; return whether all rows were ours, as read.

    ``seconds``: how long the call took.
    """
    connection = connections[alias]
    plain: dict[tuple[LeaseKind, int], list[tuple[str, Decision]]] = {}
    for member, decision in ends:
        lease = member.lease
        failure = lease.failure(
            decision, listener=listener.title, number=member.attempts + 1, seconds=seconds
        )
        group = plain.setdefault((lease.kind, lease.attempts), [])
        group.append((lease.id, lease.recorded(decision, failure)))
    for (kind, attempts), decisions in plain.items():
        settled = settle_within(
            connection,
            decisions,
            me=ends[0][0].lease.owner,
            kind=kind,
            delete_done=settings.RETENTION_DONE == 0,
            attempts=attempts,
        )
        if settled < len(decisions):
            return False
    return True


def owned(leases: Sequence[Lease], *, alias: str) -> set[str]:
    """Return the ids of the events whose leases this worker still has, with the rows as read."""
    me = leases[0].owner
    ids = [each.id for each in leases]
    rows = OutboxEvent.objects.using(alias).filter(pk__in=ids, status__in=UNSETTLED)
    found = {
        pk: (owner, attempts)
        for pk, owner, attempts in rows.values_list("pk", "locked_by", "attempts")
    }
    names = [each.stream for each in leases if each.kind is LeaseKind.STREAM]
    mine = OutboxStream.objects.using(alias).filter(pk__in=names, locked_by=me)
    streams = {*mine.values_list("pk", flat=True)} if names else set()
    return {
        each.id
        for each in leases
        if each.id in found
        and (found[each.id][0] == me if each.stream is None else each.stream in streams)
        and found[each.id][1] == each.attempts
    }
