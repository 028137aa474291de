"""Leases of streams (the events of one key). Each database has its own statements.

A worker touches a stream's row only to claim, renew or release it. Business transactions lock the
row from their write to their commit, so locked rows are skipped.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper

from ..values import SQL, Claimed, Release, StreamClaim, StreamQuery, StreamRows, marks
from .statements import Statements


class StreamLeases(Statements):
    @abstractmethod
    def claim_streams(self, connection: BaseDatabaseWrapper, claim: StreamClaim) -> Claimed:
        """Lease due streams, oldest due first; return (name, previous owner, queue) of each."""

    @abstractmethod
    def read_streams(self, connection: BaseDatabaseWrapper, read: StreamQuery) -> list[StreamRows]:
        """Read those of ``read.keys`` that ``read.me`` holds, and their next events in order.

        A stream's version is never newer than its events. So an event written meanwhile makes the
        release fail, and the stream is read again.
        """

    def _routed_until(self, connection: BaseDatabaseWrapper, stream: str) -> str:
        """Return the SQL of the first place of a key whose event is about to be routed, or NULL.

        Events behind it have to wait: it may belong before them. One that no worker could route is
        not about to be. ``stream`` is the SQL of the name under which the key's events wait.
        """
        # The index is partial: a query has to repeat its condition.
        return f"""(SELECT MIN(u.seq) FROM {self._event(connection)} u WHERE u.stream = {stream}
            AND u.status IN (0, 2) AND u.status IN (0, 2, 3)
            AND (u.available_at <= {self.now} OR u.locked_by IS NOT NULL))"""

    @abstractmethod
    def next_retries(
        self, connection: BaseDatabaseWrapper, read: StreamQuery
    ) -> dict[str, datetime]:
        """Return when the next failed event of each key is due, for keys that have one.

        If dead events block a stream, failed events behind the first dead one do not count.
        """

    @abstractmethod
    def note_starts(self, connection: BaseDatabaseWrapper, *, me: str, ids: Sequence[str]) -> int:
        """Count a rescue of events that are about to run; return how many ``me`` still holds."""

    @abstractmethod
    def take_back_starts(
        self, connection: BaseDatabaseWrapper, *, me: str, ids: Sequence[str]
    ) -> int:
        """Undo ``note_starts`` for events that were not started, or end with an orderly stop."""

    @abstractmethod
    def renew_streams(
        self, connection: BaseDatabaseWrapper, *, me: str, keys: Sequence[str], lease: float
    ) -> tuple[set[str], set[str]]:
        """Renew ``me``'s leases of these streams for ``lease`` seconds; return (renewed, held)."""

    @abstractmethod
    def release_streams(
        self, connection: BaseDatabaseWrapper, *, me: str, streams: Sequence[Release]
    ) -> set[str]:
        """Release streams whose version and lease are those that were read; return their keys.

        It queries no events: the statement's snapshot of them may be older than the row's lock.
        """

    @abstractmethod
    def hand_back_streams(
        self, connection: BaseDatabaseWrapper, *, me: str, keys: Sequence[str], after: float | None
    ) -> int:
        """Release streams whose events still run; return how many ``me`` held, if not locked.

        They are due ``after`` seconds from now; with None, when their leases would have ended.
        """

    @abstractmethod
    def move_streams(
        self, connection: BaseDatabaseWrapper, *, of: str, queue: str, limit: int
    ) -> int:
        """Move unlocked streams that are due from one queue to another; return how many."""

    def _branches_of_streams(
        self, connection: BaseDatabaseWrapper, claim: StreamClaim
    ) -> list[SQL]:
        """Return the condition of each branch of a claim, followed by its order."""
        until, found, excluded = self._until(connection, claim.at), [], [*claim.exclude]
        others = f" AND stream NOT IN ({marks(excluded)})" if excluded else ""
        for branch in claim.branches:
            after = None if branch.since is None else (self.now_plus, [-branch.since])
            due, params = self._in_queue(branch.queue, column="due_at", after=after, until=until)
            sql = f"{due}{others} ORDER BY {self.by_queue}due_at LIMIT %s"
            found.append((sql, [*params, *excluded, branch.limit]))
        return found
