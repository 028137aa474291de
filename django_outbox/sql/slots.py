"""Slots (``coalesce=``): of the pending rows of one slot, the newest runs and the others end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..listeners.outcomes import COALESCED
from ..queue_settings import PARKED
from .inspection import Inspection
from .streams import StreamLeases
from .values import FULL, Row, in_parts, instant

MOST_ROWS = 1000  # of a slot that one statement reads, or that one ends
# Neither leased nor parked by a pause; no suspect either, which is claimed alone.
FREE = f"(locked_by IS NULL AND queue NOT LIKE '{PARKED}%%' AND rescues < 2)"


class Slots(StreamLeases, Inspection):
    def pending_in_slots(
        self, *, slots: Sequence[str], me: str
    ) -> dict[str, list[tuple[str, bool]]]:
        """Return the newest pending rows of each slot that are free or that ``me`` has leased.

        Each is an id and whether it is leased, the newest first. A slot is ordered by the clock of
        the writes, then by the ids.
        """
        selects = [
            f"SELECT stream, seq, id, locked_by FROM {self._events_in_order} "
            f"WHERE stream = %s AND {each} AND ({FREE} OR locked_by = %s) "
            f"ORDER BY seq DESC, id DESC LIMIT {MOST_ROWS}"
            for each in self._conditions([0, 2])
        ]
        found: dict[str, list[tuple[int, str, bool]]] = {}
        rows = self._rows_of_each([(sql, [slot, me]) for slot in slots for sql in selects])
        for slot, seq, row_id, owner in rows:
            found.setdefault(slot, []).append((seq, row_id, owner is not None))
        return {
            slot: [each[1:] for each in sorted(some, reverse=True)[:MOST_ROWS]]
            for slot, some in found.items()
        }

    def lease_free(
        self, *, me: str, ids: Sequence[str], locked_at: Any, lease: float, rescues: int
    ) -> list[Row]:
        """Lease those of these pending rows that are free, due or not; return their ``FULL``.

        The leases are those of the claim at ``locked_at``. Each row has at least ``rescues`` then,
        those of the row that it replaces.
        """
        one_of, given = self._one_of(ids)
        update = f"""rescues = CASE WHEN rescues < %s THEN %s ELSE rescues END,
            locked_by = %s, locked_at = %s, available_at = {self.now_plus}"""
        changes = update, [rescues, rescues, me, instant(locked_at, self.connection), lease]
        where = f"{one_of} AND status IN (0, 2) AND {FREE}", given
        self._update_unlocked("outbox_event", changes=changes, where=where)
        mine, params = self._held(me, dict.fromkeys(ids, locked_at))
        sql = f"SELECT {self._columns(FULL)} FROM {self._event_by_id} WHERE {mine}"
        return self._rows(sql, params)

    def end_coalesced(self, *, me: str, ids: Sequence[str], locked_at: Any) -> int:
        """End pending rows as done that are free or leased by ``me`` since then; return how many.

        Locked rows stay as they are.
        """
        update = f"""status = 1, done_at = {self.now}, available_at = NULL, result = %s,
            locked_by = NULL, locked_at = NULL"""
        mine = f"status IN (0, 2) AND ({FREE} OR (locked_by = %s AND locked_at = %s))"
        count, owner, ended = 0, [me, instant(locked_at, self.connection)], (update, [COALESCED])
        for some in in_parts(ids, MOST_ROWS):
            one_of, given = self._one_of(some)
            where = f"{one_of} AND {mine}", [*given, *owner]
            count += self._update_unlocked("outbox_event", changes=ended, where=where)
        return count
