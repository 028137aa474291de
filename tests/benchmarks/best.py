"""The best known statements of a drain, for each database: what a claim and a settle cost at least.

They do the work that a delivery needs and nothing else: each event's row gets an owner, the time of
its lease and a due time after it; its payload is read; at the end the row is DONE and has no due
time. Each is committed by itself. They keep no watermark, count no rescues, and know one queue.

What was tried besides, as a ratio to these (medians of five to seven rounds in turn):

- PostgreSQL: a join with a CTE instead of the array 0.83, the same prepared 0.82, in binary 0.82,
  by ctid 0.88; settle and next claim in one round trip 0.84 (psycopg's pipeline mode), in one
  transaction 0.81, in one statement 0.85. The array by ctid 0.98. Without locking the rows first
  1.05, but such a claim waits for rows that others lock, instead of skipping them.
- MariaDB and MySQL: without FORCE INDEX in the updates 0.95 and 0.92; settle and next claim in one
  transaction 0.96 and 0.97; SELECT … FOR UPDATE SKIP LOCKED 0.5 and 0.99. With ``queue`` first in
  ORDER BY, MariaDB sorts the whole backlog: 0.58 with 100,000 events.
- SQLite: UPDATE … RETURNING 0.94, the SELECT and the UPDATE in one IMMEDIATE transaction 0.89, with
  the settle before them in it 0.82, ids as one JSON array 0.96, rows as one JSON array 0.86.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from django_outbox.conf import index_name
from django_outbox.models import OutboxEvent

TABLE = OutboxEvent._meta.db_table
ME, LEASE, BATCH = "reference", 30, 500
COLUMNS = "id, event_type, aggregate_type, aggregate_id, payload, headers, attempts"
DONE = "status = 1, available_at = NULL, locked_by = NULL, locked_at = NULL"


class Statements(Protocol):
    """One database's statements, with the driver's cursor."""

    def claim(self, cursor: Any) -> Sequence[Sequence[Any]]:
        """Lease the events due first, and return them; the id is the first column."""

    def settle(self, cursor: Any, ids: list[str]) -> int:
        """Mark events DONE, if they are still ours; return how many."""


class PostgreSQL:
    """The subquery locks the rows; an array of its ids makes the UPDATE one index scan."""

    def claim(self, cursor: Any) -> Sequence[Sequence[Any]]:
        cursor.execute(
            f"""UPDATE {TABLE} SET locked_by = %s, locked_at = now(),
                available_at = now() + %s * interval '1 second'
            WHERE id = ANY(ARRAY(
                SELECT id FROM {TABLE}
                WHERE queue = 'default' AND available_at <= now()
                ORDER BY queue, available_at, id LIMIT %s FOR UPDATE SKIP LOCKED))
            RETURNING {COLUMNS}""",
            [ME, LEASE, BATCH],
        )
        rows: Sequence[Sequence[Any]] = cursor.fetchall()
        return rows

    def settle(self, cursor: Any, ids: list[str]) -> int:
        cursor.execute(
            f"""UPDATE {TABLE} SET {DONE}, done_at = now()
            WHERE id = ANY(%s) AND status IN (0, 2) AND locked_by = %s""",
            [ids, ME],
        )
        return int(cursor.rowcount)


class MySQL:
    """A SELECT without locks, and updates by primary key. Whoever updates first has the lease."""

    now = "UTC_TIMESTAMP(6)"

    def claim(self, cursor: Any) -> Sequence[Sequence[Any]]:
        cursor.execute(
            f"""SELECT {COLUMNS}, available_at
            FROM {TABLE} FORCE INDEX ({index_name("outbox_event_queue")})
            WHERE queue = 'default' AND available_at <= {self.now}
            ORDER BY available_at, id LIMIT %s""",
            [BATCH],
        )
        rows: Sequence[Sequence[Any]] = cursor.fetchall()
        if rows:
            cursor.execute(
                f"""UPDATE {TABLE} FORCE INDEX (PRIMARY) SET locked_by = %s,
                    locked_at = {self.now}, available_at = {self.now} + INTERVAL %s SECOND
                WHERE id IN ({marks("%s", rows)}) AND available_at <= %s""",
                [ME, LEASE, *(row[0] for row in rows), rows[-1][-1]],
            )
            assert cursor.rowcount == len(rows)
        return rows

    def settle(self, cursor: Any, ids: list[str]) -> int:
        cursor.execute(
            f"""UPDATE {TABLE} FORCE INDEX (PRIMARY) SET {DONE}, done_at = {self.now}
            WHERE id IN ({marks("%s", ids)}) AND status IN (0, 2) AND locked_by = %s""",
            [*ids, ME],
        )
        return int(cursor.rowcount)


class SQLite:
    """A SELECT and an UPDATE by primary key, each in a transaction of its own."""

    now = "strftime('%Y-%m-%d %H:%M:%f000', 'now')"
    lease_end = f"strftime('%Y-%m-%d %H:%M:%f000', 'now', '{LEASE} seconds')"

    def claim(self, cursor: Any) -> Sequence[Sequence[Any]]:
        cursor.execute(
            f"""SELECT {COLUMNS}, available_at FROM {TABLE}
            WHERE queue = 'default' AND available_at <= {self.now}
            ORDER BY queue, available_at, id LIMIT ?""",
            [BATCH],
        )
        rows: Sequence[Sequence[Any]] = cursor.fetchall()
        if rows:
            cursor.execute(
                f"""UPDATE {TABLE} SET locked_by = ?, locked_at = {self.now},
                    available_at = {self.lease_end}
                WHERE id IN ({marks("?", rows)}) AND +available_at <= ?""",
                [ME, *(row[0] for row in rows), rows[-1][-1]],
            )
            assert cursor.rowcount == len(rows)
        return rows

    def settle(self, cursor: Any, ids: list[str]) -> int:
        cursor.execute(
            f"""UPDATE {TABLE} SET {DONE}, done_at = {self.now}
            WHERE id IN ({marks("?", ids)}) AND status IN (0, 2) AND locked_by = ?""",
            [*ids, ME],
        )
        return int(cursor.rowcount)


BEST: dict[str, Statements] = {"postgresql": PostgreSQL(), "mysql": MySQL(), "sqlite": SQLite()}


def marks(mark: str, values: Sequence[Any]) -> str:
    return ", ".join([mark] * len(values))
