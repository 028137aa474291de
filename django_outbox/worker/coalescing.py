"""Coalescing at the claim: of the pending rows of a slot the newest runs, and the others end.

A slot has the rows of one listener that were written with the same ``coalesce=``. Writers only
insert. The rule, for a claim that has rows of a slot:

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

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from ..clocks import monotonic
from ..delivery.lease import Lease, lease_from_row, row_run
from ..sql.slots import MOST_ROWS
from ..sql.values import FULL
from .effects import Steps, ask
from .held import Held
from .rescues import report_rescues
from .routing import complete

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
            lease = lease_from_row(found, FULL, run=run, me=one.owner)
            lease.queue, lease.slot = replaced.queue, replaced.slot
            slots[replaced.slot or ""][lease.id] = lease
