"""SQL that settles events, fenced: only the owner settles, and only what is not settled yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..listeners.outcomes import DONE, Decision, Status
from .statements import Statements
from .values import AsRead, Hold, marks, plain


class Settling(Statements):
    def settle_done(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        ids: Sequence[str],
        hold: Hold = Hold.ROW,
        as_read: AsRead | None = None,
    ) -> int:
        """Mark rows DONE; return how many ``me`` still held. Repeating it changes nothing."""
        among, params = self._among(ids)
        same, read = self._same(as_read)
        return self._run(
            connection,
            f"UPDATE {self._by_key(connection)} SET status = 1, done_at = {self.now}, "
            f"available_at = NULL, locked_by = NULL, locked_at = NULL "
            f"WHERE {among} AND {self._fence(connection, hold)}{same}",
            [*params, me, *read],
        )

    def delete_done(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        ids: Sequence[str],
        hold: Hold = Hold.ROW,
        as_read: AsRead | None = None,
    ) -> int:
        """Delete rows that are done; keep those with a unique key, which must stay reserved."""
        among, params = self._among(ids)
        same, read = self._same(as_read)
        return self._run(
            connection,
            f"{self._delete_by_key(connection)} WHERE {among} "
            f"AND {self._fence(connection, hold)}{same} AND unique_key IS NULL",
            [*params, me, *read],
        )

    def delete(self, connection: BaseDatabaseWrapper, *, ids: Sequence[str]) -> int:
        """Delete rows that the caller has locked; return how many."""
        among, params = self._among(ids)
        # MariaDB obeys FORCE INDEX in a DELETE only if it tests more than the key.
        sql = f"{self._delete_by_key(connection)} WHERE {among} AND status >= 0"
        return self._run(connection, sql, params)

    def forget(self, connection: BaseDatabaseWrapper, *, ids: Sequence[int]) -> int:
        """Delete received messages that the caller has locked; return how many."""
        table = self._delete_by_key(connection, "outbox_inbox")
        sql = f"{table} WHERE id IN ({marks(ids)}) AND received_at IS NOT NULL"  # as in delete
        return self._run(connection, sql, ids)

    def trim(self, connection: BaseDatabaseWrapper, *, ids: Sequence[int]) -> int:
        """Delete statistics that the caller has locked; return how many."""
        table = self._delete_by_key(connection, "outbox_statistics")
        sql = f"{table} WHERE id IN ({marks(ids)}) AND span > 0"  # as in delete
        return self._run(connection, sql, ids)

    def settle_all(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        decisions: Sequence[tuple[str, Decision]],
        hold: Hold = Hold.ROW,
        delete_done: bool = False,
        as_read: AsRead | None = None,
    ) -> int:
        """Write decisions of any kind; return how many rows ``me`` still held.

        A group commit needs no ``as_read``: the decision of an abandoned thread never leaves it.
        An atomic listener needs it: its own transaction could still commit after that.
        """

        def ends(decision: Decision) -> bool:
            """Return whether only the row's end is to be written, or the row is deleted."""
            return decision is DONE or (delete_done and decision.status is Status.DONE)

        done = [event_id for event_id, decision in decisions if ends(decision)]
        others = [each for each in decisions if not ends(each[1])]
        count = 0
        if done and delete_done:
            count = self.delete_done(connection, me=me, ids=done, hold=hold, as_read=as_read)
        if count < len(done):
            count += self.settle_done(connection, me=me, ids=done, hold=hold, as_read=as_read)
        if others:
            count += self.settle(connection, me=me, decisions=others, hold=hold, as_read=as_read)
        return count

    def settle(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        decisions: Sequence[tuple[str, Decision]],
        hold: Hold = Hold.ROW,
        as_read: AsRead | None = None,
    ) -> int:
        """Write retries, deferrals and dead events; return how many rows ``me`` still held."""
        settled = 0
        for start in range(0, len(decisions), self.bound):
            some = decisions[start : start + self.bound]
            settled += self._settle(connection, me, some, hold, as_read)
        return settled

    def _settle(
        self,
        connection: BaseDatabaseWrapper,
        me: str,
        decisions: Sequence[tuple[str, Decision]],
        hold: Hold,
        as_read: AsRead | None,
    ) -> int:
        same, read = self._same(as_read)
        case = "CASE event_id " + "WHEN %s THEN %s " * len(decisions)
        times = "CASE event_id " + f"WHEN %s THEN {self.plus} " * len(decisions) + "END"
        ids = [event_id for event_id, _ in decisions]
        # By id: MariaDB's sql_mode decides if another assigned column has its old or new value.
        ended = [event_id for event_id, decision in decisions if decision.delay is None]
        end = f"CASE WHEN event_id IN ({marks(ended)}) THEN {self.now} END" if ended else "NULL"

        def each(name: str) -> list[Any]:
            pairs = [(event_id, getattr(decision, name)) for event_id, decision in decisions]
            return [value for pair in pairs for value in pair]

        return self._run(
            connection,
            f"UPDATE {self._by_key(connection)} SET "
            f"status = {case}END, attempts = attempts + {case}END, rescues = 0, "
            f"{hold.value} = {times}, "
            f"done_at = {end}, "
            f"last_error = COALESCE({case}END, last_error), "
            f"progress = COALESCE({case}END, progress), locked_by = NULL, locked_at = NULL "
            f"WHERE event_id IN ({marks(ids)}) AND {self._fence(connection, hold)}{same}",
            [
                *map(plain, each("status")), *each("spent"), *each("delay"), *ended,
                *each("error"), *each("progress"), *ids, me, *read,
            ],
        )  # fmt: skip

    def keep_progress(
        self,
        connection: BaseDatabaseWrapper,
        *,
        me: str,
        event_id: str,
        progress: str,
        as_read: AsRead,
        hold: Hold = Hold.ROW,
    ) -> bool:
        """Write a fan-out's progress; return whether ``me`` still held the row, and as read."""
        same, read = self._same(as_read)
        sql = (
            f"UPDATE {self._by_key(connection)} SET progress = %s WHERE event_id = %s "
            f"AND {self._fence(connection, hold)}{same}"
        )
        return self._run(connection, sql, [progress, event_id, me, *read]) == 1

    @contextmanager
    def read_committed(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        """Open a transaction in which a fenced UPDATE sees a lease that was renewed meanwhile."""
        with transaction.atomic(using=connection.alias):
            yield
