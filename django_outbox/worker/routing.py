"""Routing at the claim: what an event's writer did not know of its listeners is made up for.

A row that is not routed becomes that of its first listener; the others get rows made from it. The
receipt in each row of an event says which listeners have been given it, so none is given it twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from django.db.backends.base.base import BaseDatabaseWrapper

from ..delivery.lease import Lease, of_rows
from ..events import SLOT_PREFIX, slot_of, stream_of
from ..listeners.queues import UNROUTED, Route, missing_of, receipt_of, routes_of
from ..sql import dialect_of
from ..sql.sequence_numbers import Place
from ..sql.transactions import all_or_nothing
from .effects import Steps


def is_whole(
    aggregate_type: str, event_type: str, listener: str | None, routes: str | None
) -> bool:
    """Return whether an event was given to all listeners that this process has for it."""
    if listener is None and routes_of(aggregate_type, event_type)[0] != UNROUTED:
        return False
    return not missing_of(aggregate_type, event_type, routes or "")


def complete(leases: Iterable[Lease]) -> Steps[set[str]]:
    """Give events to the listeners that they lack; return the queues that got rows.

    A row with a key that was not routed is in a stream afterwards, and not leased any more.
    """
    queues: set[str] = set()
    unrouted: defaultdict[tuple[str, str, str], list[Lease]] = defaultdict(list)
    for lease in leases:
        if is_whole(lease.aggregate_type, lease.event_type, lease.listener, lease.routes):
            continue
        if lease.listener is None:
            kind = lease.aggregate_type, lease.event_type, lease.run.queue
            unrouted[kind].append(lease)
        else:
            queues |= yield partial(_complete, lease=lease)
    for some in unrouted.values():
        queues |= yield partial(_route, leases=some)
    return queues


def _route(connection: BaseDatabaseWrapper, leases: Sequence[Lease]) -> set[str]:
    """Route rows of one type that are not routed."""
    one = leases[0]
    routes = routes_of(one.aggregate_type, one.event_type)
    receipt = receipt_of(one.aggregate_type, one.event_type)
    first = next((each for each in routes if each.queue == one.run.queue), routes[0])
    dialect, ids = dialect_of(connection), [each.id for each in leases]
    with all_or_nothing(connection):
        dialect.touch(_places(leases, routes))
        dialect.route_rows(
            me=one.owner, leases=of_rows(leases), route=first, receipt=receipt, kind=one.kind
        )
        for each in routes:
            if each is not first:
                dialect.add_rows(ids=ids, route=each, receipt=receipt)
    for lease in leases:
        lease.listener, lease.routes = first.title, receipt
        if lease.key is not None:
            lease.stream = stream_of(first.lane, lease.key)
        if lease.slot is not None:
            lease.slot = slot_of(first.digest, lease.slot[SLOT_PREFIX:])
    return {each.queue for each in routes}


def _complete(connection: BaseDatabaseWrapper, lease: Lease) -> set[str]:
    """Give one event to the listeners that it lacks.

    All its rows are locked in one order: what other workers have added is in the receipt of each.
    """
    dialect = dialect_of(connection)
    with all_or_nothing(connection):
        missing = missing_of(lease.aggregate_type, lease.event_type, lease.routes)
        dialect.touch(_places([lease], missing))
        receipts = dialect.lock_event(lease.event_id)
        given = {each for text in receipts.values() for each in text.split()}
        missing = missing_of(lease.aggregate_type, lease.event_type, " ".join(given))
        receipt = " ".join(sorted({*given, *(each.entry for each in missing)}))
        if lease.id in receipts:
            dialect.note_receipt(ids=[*receipts], receipt=receipt)
            for each in missing:
                dialect.add_rows(ids=[lease.id], route=each, receipt=receipt)
    lease.routes = receipt
    return {each.queue for each in missing}


def _places(leases: Sequence[Lease], routes: Sequence[Route]) -> list[Place]:
    """Return the streams in which the rows of events with a key are to wait."""
    keys = dict.fromkeys(each.key for each in leases if each.key is not None)
    return [(stream_of(each.lane, key), 1, each.queue) for key in keys for each in routes]
