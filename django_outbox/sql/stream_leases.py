"""SQL that leases streams (the events of one key) like single rows, without waiting for locks.

A worker touches a stream's row only to claim, renew or release it. Business transactions lock the
row from their write to their commit, so locked rows are skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..events import ACTIVE, stored_instant
from .statements import Statements
from .values import (
    KEYED,
    Claimed,
    Found,
    Hold,
    Read,
    Release,
    Row,
    StreamClaim,
    claimed,
    marks,
    renewed_of,
    to_database,
)

TOGETHER = 50  # UNION branches per statement; with more, each costs twice as much to plan


class StreamLeases(Statements):
    streams_bound = 100  # streams per release: a CASE per stream makes the cost quadratic

    def claim_streams(self, connection: BaseDatabaseWrapper, claim: StreamClaim) -> Claimed:
        """Lease due streams, oldest due first; return (key, previous owner) of each."""
        rows = self._look_at_streams(connection, claim)
        if not rows:
            return Claimed([], more=False)
        _, key = self._streams(connection)
        keys, newest = [row[0] for row in rows], stored_instant(rows[-1][2])
        assert newest is not None
        taken = self._update_unlocked(
            connection, "outbox_stream",
            f"due_at = {self.plus}, locked_by = %s, locked_at = {self.now}",
            [claim.lease, claim.me],
            # A stream that was claimed since the SELECT is due later.
            f"{key} IN ({marks(keys)}) AND due_at <= %s", [*keys, to_database(newest, connection)],
        )  # fmt: skip
        mine = set(keys)
        if taken < len(rows):
            mine = self._owned_streams(connection, claim.me, keys, also=f"AND due_at > {self.now}")
        found = [row[:2] for row in rows if row[0] in mine]
        return claimed(found, seen=rows, limit=claim.limit, due=2)

    def _look_at_streams(self, connection: BaseDatabaseWrapper, claim: StreamClaim) -> list[Row]:
        _, key = self._streams(connection)
        where, params = self._due_streams(connection, claim)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {key}, locked_by, due_at, {self.now} "
                f"FROM {self._stream_by_due(connection)} "
                f"WHERE {where} ORDER BY due_at LIMIT %s{self._skip(connection)}",
                [*params, claim.limit],
            )
            return list(cursor.fetchall())

    def _due_streams(
        self, connection: BaseDatabaseWrapper, claim: StreamClaim
    ) -> tuple[str, list[Any]]:
        due = self.now if claim.at is None else "%s"
        at = [] if claim.at is None else [to_database(claim.at, connection)]
        low = "" if claim.since is None else f"due_at >= {self.plus} AND "
        since = [] if claim.since is None else [-claim.since]
        _, key = self._streams(connection)
        out = [ACTIVE, *claim.exclude]
        where = f"due_at <= {due} AND {low}{key} NOT IN ({marks(out)})"
        return where, [*at, *since, *out]

    def read_streams(self, connection: BaseDatabaseWrapper, read: Read) -> list[Found]:
        """Read those of ``read.keys`` that ``read.me`` holds, and their next events in order.

        A stream's version is never newer than its events. So an event written meanwhile makes the
        release fail, and the stream is read again.
        """
        streams, key = self._streams(connection)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {key}, seq, {self.now} FROM {streams} "
                f"WHERE {key} IN ({marks(read.keys)}) AND locked_by = %s",
                [*read.keys, read.me],
            )
            found = [Found(*row) for row in cursor.fetchall()]
        events = self._pending(connection, read, [each.key for each in found])
        for each in found:
            rows = sorted(events.get(each.key, ()), key=lambda row: row[KEYED.index("seq")])
            each.rows = rows[: read.limit]
        return found

    def _branches(self, read: Read) -> Sequence[str]:
        """Return conditions that together find a key's rows, each by a range of the index."""
        return [f"status IN (0, 2, 3) AND {wanted(read, self.now)}"]

    def _pending(
        self, connection: BaseDatabaseWrapper, read: Read, keys: Sequence[str]
    ) -> dict[str, list[Row]]:
        _, key = self._streams(connection)
        columns = ", ".join(map(connection.ops.quote_name, KEYED))
        branches, found = self._branches(read), dict[str, list[Row]]()
        at_once = max(TOGETHER // len(branches), 1)
        for start in range(0, len(keys), at_once):
            some = keys[start : start + at_once]
            parts = [
                self._branch(
                    f"SELECT {columns} FROM {self._by_stream(connection)} "
                    f"WHERE {key} = %s AND {branch} ORDER BY seq LIMIT %s"
                )
                for branch in branches
            ]
            with connection.cursor() as cursor:
                cursor.execute(
                    " UNION ALL ".join(parts * len(some)),
                    [each for key in some for _ in parts for each in (key, read.limit)],
                )
                for row in cursor.fetchall():
                    found.setdefault(row[KEYED.index("key")], []).append(row)
        return found

    def _branch(self, select: str) -> str:
        return f"SELECT * FROM ({select})"

    def next_retries(self, connection: BaseDatabaseWrapper, read: Read) -> dict[str, datetime]:
        """Return when the next failed event of each key is due, for keys that have one.

        If dead events block a stream, failed events behind the first dead one do not count.
        """
        _, key = self._streams(connection)
        table = self._table(connection)
        reachable = (
            f" AND NOT EXISTS (SELECT 1 FROM {table} dead WHERE dead.{key} = {table}.{key} AND "
            f"dead.seq < {table}.seq AND dead.status = 3 AND dead.status IN (0, 2, 3))"
        ) * read.dead_too
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {key}, MIN(deliver_at) FROM {self._by_stream(connection)} WHERE {key} "
                f"IN ({marks(read.keys)}) AND status = 2 AND status IN (0, 2, 3){reachable} "
                f"GROUP BY {key}",
                [*read.keys],
            )
            found = {row[0]: stored_instant(row[1]) for row in cursor.fetchall()}
        return {key: instant for key, instant in found.items() if instant is not None}

    def note_starts(self, connection: BaseDatabaseWrapper, *, me: str, ids: Sequence[str]) -> int:
        """Count a rescue of events that are about to run; return how many ``me`` still holds."""
        among, params = self._among(ids)
        return self._run(
            connection,
            f"UPDATE {self._by_key(connection)} SET rescues = rescues + 1 "
            f"WHERE {among} AND {self._fence(connection, Hold.STREAM)}",
            [*params, me],
        )

    def take_back_starts(
        self, connection: BaseDatabaseWrapper, *, me: str, ids: Sequence[str]
    ) -> int:
        """Undo ``note_starts`` for events that were not started, or end with an orderly stop."""
        among, params = self._among(ids)
        # Not ``_update_unlocked``: MariaDB would wait for streams that business transactions lock.
        return self._run(
            connection,
            f"UPDATE {self._by_key(connection)} SET rescues = rescues - 1 "
            f"WHERE {among} AND rescues > 0 AND {self._fence(connection, Hold.STREAM)}",
            [*params, me],
        )

    def renew_streams(
        self, connection: BaseDatabaseWrapper, *, me: str, keys: Sequence[str], lease: float
    ) -> tuple[set[str], set[str]]:
        """Renew ``me``'s leases of these streams for ``lease`` seconds; return (renewed, held)."""
        streams, key = self._streams(connection)
        mine = f"{key} IN ({marks(keys)}) AND locked_by = %s"
        taken = self._update_unlocked(
            connection, "outbox_stream", f"due_at = {self.plus}", [lease], mine, [*keys, me]
        )
        if taken == len(keys):
            return set(keys), set(keys)
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {key}, due_at FROM {streams} WHERE {mine}", [*keys, me])
            return renewed_of(cursor.fetchall(), taken)

    def release_streams(
        self, connection: BaseDatabaseWrapper, *, me: str, streams: Sequence[Release]
    ) -> set[str]:
        """Release streams whose version is still the one that was read; return their keys.

        Do not query events: the statement's snapshot of them may be older than the row's lock.
        """
        released: set[str] = set()
        for start in range(0, len(streams), self.streams_bound):
            some = streams[start : start + self.streams_bound]
            released |= self._release_streams(connection, me, some)
        return released

    def _release_streams(
        self, connection: BaseDatabaseWrapper, me: str, streams: Sequence[Release]
    ) -> set[str]:
        _, key = self._streams(connection)
        keys = [each.key for each in streams]
        where = f"{key} IN ({marks(keys)}) AND locked_by = %s"
        params: list[Any] = [*keys, me]
        if read := [each for each in streams if each.seq is not None]:
            where += f" AND seq = CASE {key} " + "WHEN %s THEN %s " * len(read) + "ELSE seq END"
            params += [value for each in read for value in (each.key, each.seq)]
        due = f"CASE {key} " + f"WHEN %s THEN {self.plus} " * len(keys) + "END"
        taken = self._update_unlocked(
            connection, "outbox_stream",
            f"due_at = {due}, locked_by = NULL, locked_at = {self.now}",
            [value for each in streams for value in (each.key, each.delay)], where, params,
        )  # fmt: skip
        return set(keys) if taken == len(keys) else self._released(connection, me, keys, taken)

    def _released(
        self, connection: BaseDatabaseWrapper, me: str, keys: Sequence[str], taken: int
    ) -> set[str]:
        """Return which of these streams ``me`` has just released, ``taken`` in number."""
        streams, key = self._streams(connection)
        with connection.cursor() as cursor:
            sql = f"SELECT {key}, locked_by FROM {streams} WHERE {key} IN ({marks(keys)})"
            cursor.execute(sql, [*keys])
            others = {key: owner for key, owner in cursor.fetchall() if owner != me}
        if taken == len(others):  # some may have a new owner already
            return {*others}
        return {key for key, owner in others.items() if owner is None} if taken else set()

    def hand_back_streams(
        self, connection: BaseDatabaseWrapper, *, me: str, keys: Sequence[str], after: float | None
    ) -> int:
        """Give back streams whose events still run; return how many ``me`` held, if not locked.

        They are due ``after`` seconds from now; with None, when their leases would have ended.
        """
        _, key = self._streams(connection)
        due, values = ("", []) if after is None else (f"due_at = {self.plus}, ", [after])
        return self._update_unlocked(
            connection, "outbox_stream", f"{due}locked_by = NULL, locked_at = {self.now}", values,
            f"{key} IN ({marks(keys)}) AND locked_by = %s", [*keys, me],
        )  # fmt: skip

    # -- internal --------------------------------------------------------------------------------

    def _owned_streams(
        self, connection: BaseDatabaseWrapper, me: str, keys: Collection[str], *, also: str = ""
    ) -> set[str]:
        streams, key = self._streams(connection)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {key} FROM {streams} "
                f"WHERE {key} IN ({marks(keys)}) AND locked_by = %s {also}",
                [*keys, me],
            )
            return {row[0] for row in cursor.fetchall()}


def wanted(read: Read, now: str) -> str:
    """Return the condition of the rows that a read requests."""
    statuses = "status IN (0, 2, 3)" if read.dead_too else "status IN (0, 2)"
    due = f" AND (status <> 2 OR deliver_at <= {now})" if read.only_due_retries else ""
    return statuses + due
