"""What a claim does before its rows may run: it routes and coalesces them, and notes rescues.

Routing makes up for what an event's writer did not know of its listeners. A row that is not routed
becomes that of its first listener; the others get rows made from it. The receipt in each row of an
event says which listeners have been given it, so none is given it twice.

Coalescing: a slot has the rows of one listener that were written with the same ``coalesce=``.
Writers only insert. The rule, for a claim that has rows of a slot:

- The newest row runs that this claim has leased or that is free: pending, and neither leased nor
  parked. It runs now, even if it is due later, and has the rescues of the row that it replaces.
- The older ones end, if they are free or of this claim. They were committed before the newest was
  started, as they were read before: so each committed write is followed by a delivery that starts
  after its commit, with its own payload or with one that was written later.
- What another worker has leased is left alone, newer or older. Such a row may have been started
  before an older one was committed, so it never replaces one: both run.
- What is committed meanwhile stays pending. So does what another worker leased meanwhile.

If the worker is lost after it leased the newest, that row is rescued as any other, and replaced by
one that is newer then. A dead row is not pending: it ends nothing, and a replay makes it pending.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..delivery.lease import Lease, columns_of, lease_from_row, row_run
from ..events import SLOT_PREFIX, slot_of, stream_of
from ..listeners.history import Entry, with_entries
from ..listeners.queues import UNROUTED, Route, missing_of, receipt_of, routes_of
from ..log import first_line
from ..signals import announce, event_rescued
from ..sql import dialect_of
from ..sql.insert import Place
from ..sql.settle import MOST_ROWS
from ..sql.statements import all_or_nothing
from ..sql.values import FULL
from .effects import Steps, ask
from .held import Held, ids_and_leases

logger = logging.getLogger("django_outbox")

Mine = dict[str, Lease]  # rows of one slot that the claim has leased and not ended, by id


def coalesce_and_complete(leases: list[Lease], held: Held) -> Steps[tuple[list[Lease], set[str]]]:
    """Return what is left of a claim, with a row for each listener; and the queues that got rows.

    Rows that are not routed share a slot, and are coalesced there before they are routed.
    """
    coalesced = yield from _coalesce(leases, held)
    unrouted = [each for each in coalesced if each.listener is None and each.slot is not None]
    queues = yield from complete(coalesced)
    if unrouted:  # they are in other slots now
        coalesced = yield from _coalesce(coalesced, held)
        queues |= yield from complete(coalesced)
    return coalesced, queues


def _coalesce(leases: list[Lease], held: Held) -> Steps[list[Lease]]:
    """Return the leases with those of slots replaced by the newest of each."""
    slots: dict[str, Mine] = {}
    for lease in leases:
        # One that this worker has already may be running: it replaces none.
        if lease.slot is not None and held.get(lease.id) is None:
            slots.setdefault(lease.slot, {})[lease.id] = lease
    if not slots:
        return leases
    claimed = {row_id for mine in slots.values() for row_id in mine}
    yield from _end_older(slots, held)
    left = [lease for mine in slots.values() for lease in mine.values()]
    return [each for each in leases if each.id not in claimed] + left


def _end_older(slots: Mapping[str, Mine], held: Held) -> Steps[None]:
    """Leave the newest row in each slot, which is leased if it is free; end the older ones."""
    again = [*slots]
    one = next(iter(slots[again[0]].values()))  # all were leased together
    while again:
        found = yield ask("pending_in_slots", slots=again, me=one.owner)
        rows = {
            slot: [row_id for row_id, is_leased in each if not is_leased or row_id in slots[slot]]
            for slot, each in found.items()
        }
        yield from _lease_newest(slots, rows, held)
        older: list[str] = []
        lost: list[Lease] = []
        for slot, ids in rows.items():
            mine = slots[slot]
            newest = next((place for place, each in enumerate(ids) if each in mine), len(ids))
            older += ids[newest + 1 :]
            lost += [mine.pop(each) for each in ids[newest + 1 :] if each in mine]
        if rescued := [each for each in lost if each.rescued]:
            yield partial(report_rescues, leases=rescued)
        ended = yield ask("end_coalesced", me=one.owner, ids=older, locked_at=one.locked_at)
        again = [slot for slot, each in found.items() if ended and len(each) == MOST_ROWS]


def _lease_newest(
    slots: Mapping[str, Mine], rows: Mapping[str, Sequence[str]], held: Held
) -> Steps[None]:
    """Lease the newest row of each slot if it is free; another worker may be faster."""
    wanted: defaultdict[int, dict[str, Lease]] = defaultdict(dict)  # by rescues
    for slot, ids in rows.items():
        if ids and ids[0] not in slots[slot]:
            replaced = max(slots[slot].values(), key=lambda each: each.rescues)
            wanted[replaced.rescues][ids[0]] = replaced
    for rescues, by_id in wanted.items():
        deadline, one = held.deadline(monotonic()), next(iter(by_id.values()))
        given = {"me": one.owner, "locked_at": one.locked_at, "lease": held.lease}
        for row in (yield ask("lease_free", ids=[*by_id], rescues=rescues, **given)):
            replaced = by_id[row[0]]
            tail = (replaced.row[replaced.positions["due_at"]], None, replaced.locked_at)
            found = (*row, *tail)
            run = row_run(found, deadline=deadline, me=one.owner)
            lease = lease_from_row(found, columns_of(FULL), run=run, me=one.owner)
            lease.queue, lease.slot = replaced.queue, replaced.slot
            slots[replaced.slot or ""][lease.id] = lease


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
    whole: set[tuple[str, str, str | None, str | None]] = set()
    for lease in leases:
        given = lease.aggregate_type, lease.event_type, lease.listener, lease.routes
        if given in whole or is_whole(*given):
            whole.add(given)
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
            me=one.owner, leases=ids_and_leases(leases), route=first, receipt=receipt, kind=one.kind
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
        missing = missing_of(lease.aggregate_type, lease.event_type, lease.routes or "")
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


def report_rescues(connection: BaseDatabaseWrapper, leases: Sequence[Lease]) -> None:
    """Report events that were claimed from lost workers, and add them to their history."""
    alike: defaultdict[tuple[object, ...], list[Lease]] = defaultdict(list)
    for lease in leases:
        logger.warning(
            "rescued event_id=%s event_type=%s listener=%r rescues=%d", *lease.named, lease.rescues
        )
        announce(event_rescued, sender=connection.alias, event=lease.event, rescues=lease.rescues)
        alike[lease.kind, lease.rescues, lease.previous_owner].append(lease)
    for some in alike.values():
        _note(connection, some)


def _note(connection: BaseDatabaseWrapper, leases: Sequence[Lease]) -> None:
    """Add the same lost worker to the history of each event; they are delivered in any case."""
    first, rows = leases[0], ids_and_leases(leases)
    lost = Entry(at=first.database_now, kind="lost", number=first.rescues, by=first.previous_owner)
    try:
        with all_or_nothing(connection):
            dialect_of(connection).note_lost(
                me=first.owner, leases=rows, entry=lost, kind=first.kind
            )
    except Exception as error:  # noqa: BLE001
        reason = first_line(error)
        logger.warning("rescues missing in the history count=%d error=%s", len(rows), reason)
        return
    for each in leases:
        each.history = with_entries(each.history, [lost])
