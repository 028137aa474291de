"""MySQL and MariaDB: sequence numbers and leases of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import IntegrityError
from django.db.backends.base.base import BaseDatabaseWrapper

from ...conf import index_name
from ...events import unrouted
from ..base.insert import Inserting
from ..base.sequence_numbers import (
    IF_IDLE,
    Places,
    due_of_followers,
    due_unless_left_out,
    upsert_values,
)
from ..base.streams import StreamLeases
from ..values import (
    KEYED,
    Claimed,
    Row,
    StreamClaim,
    StreamQuery,
    StreamRows,
    claimed,
    instant,
    marks,
)
from .claim import ALL, skip_locked, union

DUPLICATE_ENTRY = 1062
SELECTS = 50  # in a UNION: with more, each costs twice as much to plan


class MySQLStreams(StreamLeases, Inserting):
    # -- sequence numbers --------------------------------------------------------------------------

    def _insert(
        self, connection: BaseDatabaseWrapper, sql: str, params: list[Any], *, may_clash: bool
    ) -> int:
        # INSERT IGNORE would hide other errors too; error 1062 leaves the transaction usable.
        try:
            return super()._insert(connection, sql, params, may_clash=False)
        except IntegrityError as error:
            if may_clash and error.args[0] == DUPLICATE_ENTRY:
                return 0
            raise

    def _number(self, connection: BaseDatabaseWrapper, places: Places) -> Mapping[str, int]:
        if len(places) > 1:
            return super()._number(connection, places)
        sql, params = self._upsert(connection, places, due=due_of_followers())
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            return {places[0][0]: int(cursor.lastrowid)}  # part of the statement's response

    def _upsert(
        self, connection: BaseDatabaseWrapper, places: Places, *, due: str
    ) -> tuple[str, list[Any]]:
        stream = self._stream(connection)
        rows = ", ".join(
            f"(%s, %s, %s, LAST_INSERT_ID({self.now_micros} + %s), "
            f"{'NULL' if queue is None else self.now}, %s)"
            for _, _, queue in places
        )
        # MySQL warns about VALUES() on each statement; MariaDB has no row alias.
        is_mariadb = connection.mysql_is_mariadb  # type: ignore[attr-defined]
        alias, new = ("", "VALUES({})") if is_mariadb else (" AS new", "new.{}")
        idle = IF_IDLE.format(row=f"{stream}.", new=new.format("queue"))
        due = due_unless_left_out(due, places, new=new.format("due_at"))
        sql = (
            f"INSERT INTO {stream} (stream, `key`, lane, seq, due_at, queue) "
            f"VALUES {rows}{alias} ON DUPLICATE KEY UPDATE queue = {idle}, "
            f"seq = LAST_INSERT_ID({stream}.seq + 1 + {new.format('seq')} - {self.now_micros}), "
            f"due_at = {due.format(row=f'{stream}.', now=self.now)}"
        )
        return sql, upsert_values(places)

    # -- leases ------------------------------------------------------------------------------------

    def claim_streams(self, connection: BaseDatabaseWrapper, claim: StreamClaim) -> Claimed:
        stream, table = self._stream(connection), self._streams_by_due(connection)
        sql, params = union(
            [
                (
                    f"""SELECT stream, locked_by, queue, due_at, {self.now}
            FROM {table} WHERE {where}{skip_locked(connection)}""",
                    given,
                )
                for where, given in self._branches_of_streams(connection, claim)
            ]
        )
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            rows: list[Row] = [*cursor.fetchall()]
        if not rows:
            return Claimed([])
        rows.sort(key=lambda row: row[3])
        keys, newest = [row[0] for row in rows], instant(rows[-1][3], connection)
        leased_at = instant(rows[0][-1], connection)
        taken = self._run(
            connection,
            # A stream that was claimed since the SELECT is due later.
            f"""UPDATE (
                SELECT stream FROM {stream} FORCE INDEX (PRIMARY)
                WHERE stream IN ({marks(keys)}) AND due_at <= %s LIMIT %s{skip_locked(connection)}
            ) unlocked STRAIGHT_JOIN {stream} s FORCE INDEX (PRIMARY) ON s.stream = unlocked.stream
            SET s.due_at = {self.now_plus}, s.locked_by = %s, s.locked_at = %s""",
            [*keys, newest, ALL, claim.lease, claim.me, leased_at],
        )
        mine = set(keys)
        if taken < len(rows):
            with connection.cursor() as cursor:
                cursor.execute(
                    f"""SELECT stream FROM {stream} WHERE stream IN ({marks(keys)})
                    AND locked_by = %s AND locked_at = %s""",
                    [*keys, claim.me, leased_at],
                )
                mine = {row[0] for row in cursor.fetchall()}
        found = [(*row[:3], leased_at) for row in rows if row[0] in mine]
        return claimed(found, seen=rows, branches=claim.branches, due=3, queue=2)

    def read_streams(self, connection: BaseDatabaseWrapper, read: StreamQuery) -> list[StreamRows]:
        mine, params = self._leased(connection, "outbox_stream", read.me, read.streams)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT stream, seq, {self.now} FROM {self._stream(connection)} WHERE {mine}",
                params,
            )
            found = [StreamRows(*row) for row in cursor.fetchall()]
        events = self._heads(connection, read, [each.name for each in found])
        for each in found:
            rows = sorted(events.get(each.name, ()), key=lambda row: row[KEYED.index("seq")])
            each.rows = rows[: read.limit]
        return found

    def _heads(
        self, connection: BaseDatabaseWrapper, read: StreamQuery, keys: Sequence[str]
    ) -> dict[str, list[Row]]:
        """Return the first wanted events of each key, by status: the index is by status too."""
        due = f" AND deliver_at <= {self.now}" if read.only_due_retries else ""
        statuses = ["status = 0", f"status = 2{due}", *["status = 3"] * read.dead_too]
        columns = ", ".join(f"`{name}`" for name in KEYED)
        columns += f", {self._routed_until(connection, '%s')}"
        selects = [
            f"(SELECT {columns} FROM {self._events_in_order(connection)} "
            f"WHERE stream = %s AND {status} ORDER BY seq LIMIT %s)"
            for status in statuses
        ]
        found: dict[str, list[Row]] = {}
        at_once = SELECTS // len(selects)
        for start in range(0, len(keys), at_once):
            some = keys[start : start + at_once]
            with connection.cursor() as cursor:
                cursor.execute(
                    " UNION ALL ".join(selects * len(some)),
                    [
                        each
                        for key in some
                        for _ in selects
                        for each in (unrouted(key), key, read.limit)
                    ],
                )
                for row in cursor.fetchall():
                    found.setdefault(row[KEYED.index("stream")], []).append(row)
        return found

    def _events_in_order(self, connection: BaseDatabaseWrapper) -> str:
        # For a key with half of all rows, the optimizer would scan and sort them despite LIMIT.
        return f"{self._event(connection)} FORCE INDEX ({index_name('outbox_event_stream')})"

    def _streams_by_due(self, connection: BaseDatabaseWrapper) -> str:
        return f"{self._stream(connection)} FORCE INDEX ({index_name('outbox_stream_queue')})"
