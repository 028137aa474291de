"""Leases of events without a key: claim, renew, release. Each database has its own statements."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ...events import SINGLE_NODE_KEY, stored_instant
from ..values import Claim, Claimed, RescueState, marks, to_database
from .statements import Statements


class EventLeases(Statements):
    @abstractmethod
    def claim(self, connection: BaseDatabaseWrapper, claim: Claim) -> Claimed:
        """Lease due rows; return their ``claim.columns`` + TAIL, oldest due first.

        A row that another worker has locked is skipped. A row whose lease has expired counts a
        rescue.
        """

    @abstractmethod
    def renew(
        self, connection: BaseDatabaseWrapper, *, me: str, ids: Sequence[str], lease: float
    ) -> tuple[set[str], set[str]]:
        """Renew ``me``'s leases of these rows for ``lease`` seconds; return (renewed, still held).

        Locked rows are skipped, because they are just being settled.
        """

    @abstractmethod
    def release(
        self, connection: BaseDatabaseWrapper, *, me: str, ids: Collection[str],
        after: float | None = 0.0,
    ) -> int:  # fmt: skip
        """Release leases without counting an attempt; return how many ``me`` held.

        The rows are due ``after`` seconds from now; with None, when their leases would have ended.
        Locked rows stay leased.
        """

    @abstractmethod
    def unclaim(
        self, connection: BaseDatabaseWrapper, *, me: str, due: Sequence[tuple[str, datetime]]
    ) -> int:
        """Release leases, each with the due time that its event had before the claim.

        Return how many ``me`` held. Locked rows stay leased.
        """

    def lost_events(
        self, connection: BaseDatabaseWrapper, *, me: str, limit: int
    ) -> tuple[datetime | None, bool, float]:
        """Scan the ``limit`` rows due first for those whose workers were lost.

        Return the latest due time of rows that were lost once, whether there is a suspect, and the
        seconds that the first row of all has been due.
        """
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT MAX(CASE WHEN {RescueState.LOST.value} THEN available_at END), "
                f"MAX(CASE WHEN {RescueState.SUSPECT.value} THEN 1 ELSE 0 END), "
                f"MIN(available_at), {self.now} FROM ("
                f"SELECT rescues, locked_by, available_at FROM {self._event(connection)} "
                f"WHERE available_at <= {self.now} ORDER BY available_at, event_id LIMIT %s) due",
                [me, me, limit],
            )
            until, suspect, *first_and_now = cursor.fetchone()
        first, now = map(stored_instant, first_and_now)
        waited = (now - first).total_seconds() if first is not None and now is not None else 0.0
        return stored_instant(until), bool(suspect), waited

    def seconds_to_next_due(
        self, connection: BaseDatabaseWrapper, *, since: float = 0.0
    ) -> float | None:
        """Return the seconds until the next row, stream or lease end is due; None if there is none.

        What became due in the last ``since`` seconds, after the previous claim, counts too.
        """
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT (SELECT available_at FROM {self._event(connection)} "
                f"WHERE available_at > {self.now_plus} ORDER BY available_at LIMIT 1), "
                f"(SELECT due_at FROM {self._streams_by_due(connection)} "
                f"WHERE due_at > {self.now_plus} AND {self.key} <> %s ORDER BY due_at LIMIT 1), "
                f"{self.now}",
                [-since, -since, SINGLE_NODE_KEY],
            )
            *found, now = map(stored_instant, cursor.fetchone())
        due = [each for each in found if each is not None]
        return (min(due) - now).total_seconds() if due and now is not None else None

    def _due(self, connection: BaseDatabaseWrapper, claim: Claim) -> tuple[str, list[Any]]:
        """Return the condition of the rows that a claim wants, and its parameters."""
        where, params = [f"available_at <= {self.now}"], []
        if claim.at is not None:
            where, params = ["available_at <= %s"], [to_database(claim.at, connection)]
        if claim.since is not None:
            where.append(f"available_at >= {self.now_plus}")
            params.append(-claim.since)
        if claim.ids is not None:
            one_of, ids = self._one_of(claim.ids)
            where.append(one_of)
            params += ids
        if claim.skip_recent:
            where.append(f"created_at <= {self.now_plus}")
            params.append(-claim.skip_recent)
        if claim.exclude:
            one_of, ids = self._one_of(claim.exclude)
            where.append(f"NOT ({one_of})")
            params += ids
        where.append(claim.state.value)
        return " AND ".join(where), [*params, claim.me]

    def _one_of(self, ids: Collection[str]) -> tuple[str, list[Any]]:
        """Return the condition that a row is one of these, and its parameters."""
        return f"event_id IN ({marks(ids)})", [*ids]

    def _streams_by_due(self, connection: BaseDatabaseWrapper) -> str:
        """Return the stream table for a SELECT by due time, with an index hint if it needs one."""
        return self._stream(connection)
