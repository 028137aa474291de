"""What every statement needs: the clock, the names of the tables, the fence, a transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import table_name
from ..events import stored_instant
from .values import (
    SQL,
    EachUpdate,
    LeaseKind,
    Leases,
    Row,
    Table,
    in_parts,
    instant,
    key_of,
    marks,
    to_database,
)

TOGETHER = 50  # SELECTs in a UNION: with more, each costs twice as much to plan


class Statements(ABC):
    now: str  # SQL for the database's clock
    now_plus: str  # SQL for its clock plus %s seconds
    now_micros: str  # SQL for its clock in microseconds since 1970
    in_utc = "{}"  # SQL that selects an instant, so that drivers return it in UTC
    key: str = "key"  # the column's name, as SQL has to spell it
    # Start of an ORDER BY of one queue's rows, where the planner needs it to choose the index.
    by_queue: str = "queue, "
    rows_at_once: int = 500  # that an UPDATE changes, each by values of its own
    united, first_united = " UNION ALL ", ""  # between the parts of a UNION, and before the first
    by_id = "{0} AS e"  # a table for an UPDATE by primary key, with any index hint it needs
    deleted_by_id = "FROM {0} AS e"  # what a DELETE by primary key deletes
    owned_by_key: str = ""  # end of the fence's subquery, where the planner needs one

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection

    def clock(self) -> datetime:
        """Return the database's current time, aware."""
        now = stored_instant(self._rows(f"SELECT {self.in_utc.format(self.now)}")[0][0])
        assert now is not None
        return now

    def version_text(self) -> str:
        """Return the version text that the server reports; empty where there is no server."""
        return str(self._rows("SELECT VERSION()")[0][0])

    @abstractmethod
    def is_conflict(self, error: BaseException) -> bool:
        """Return whether another transaction was first; this one has changed nothing."""

    @abstractmethod
    def is_lock_wait(self, error: BaseException) -> bool:
        """Return whether a statement failed because it took too long, as a rule for a lock."""

    @abstractmethod
    def is_missing_table(self, error: BaseException) -> bool:
        """Return whether a statement failed because a table of it does not exist."""

    def _run(self, sql: str, params: Sequence[Any]) -> int:
        """Execute one statement; return how many rows it changed."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            return int(cursor.rowcount)

    def _rows(self, sql: str, params: Sequence[Any] = ()) -> list[Row]:
        """Execute one statement; return its rows."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            return [*cursor.fetchall()]

    def _rows_of_each(self, selects: Sequence[SQL], *, kept: int = 1) -> list[Row]:
        """Execute several statements together; return the rows of all.

        Each ``kept`` of them, from the first, are executed in one statement.
        """
        found = list[Row]()
        for some in in_parts(selects, TOGETHER // kept * kept):
            found += self._rows(*self._union(some))
        return found

    def _union(self, selects: Sequence[SQL]) -> SQL:
        """Return one statement with the rows of all these."""
        if len(selects) == 1:
            return selects[0]
        sql = self.united.join([f"({sql})" for sql, _ in selects])
        return self.first_united + sql, [value for _, params in selects for value in params]

    def _table(self, name: str) -> str:
        return str(self.connection.ops.quote_name(table_name(name)))

    @property
    def _event(self) -> str:
        return self._table("outbox_event")

    @property
    def _stream(self) -> str:
        return self._table("outbox_stream")

    def _columns(self, names: Iterable[str], of: str = "") -> str:
        """Return columns of a SELECT; ``of``: the table's alias and a point, if it needs one."""
        return ", ".join(self._column(each, of) for each in names)

    def _column(self, name: str, of: str) -> str:
        return of + (self.key if name == "key" else name)

    def _by_due(self, table: Table) -> str:
        """Return a table for a SELECT by queue and due time, with an index hint if it needs one."""
        return self._table(table.name)

    def _until(self, at: datetime | None) -> SQL:
        """Return until when rows are due: the database's now, or ``at`` instead."""
        return (self.now, []) if at is None else ("%s", [to_database(at, self.connection)])

    def _in_queue(
        self, queue: str, *, column: str, after: SQL | None = None, until: SQL | None = None
    ) -> SQL:
        """Return the condition of a queue's rows whose due time is in these bounds, both included.

        Order by queue and due time: together they are the index.
        """
        bounds = [(f"{column} >= ", after), (f"{column} <= ", until)]
        given = [(sign + each[0], each[1]) for sign, each in bounds if each is not None]
        params = [value for _, some in given for value in some]
        return " AND ".join(["queue = %s", *(sql for sql, _ in given)]), [queue, *params]

    def _due_first(
        self, table: Table, queue: str, columns: str, *, more: str = "", **bounds: SQL | None
    ) -> SQL:
        """Return the SELECT of a queue's rows in these bounds, those due first, without a LIMIT."""
        due, given = self._in_queue(queue, column=table.due, **bounds)
        sql = f"""SELECT {columns} FROM {self._by_due(table)} WHERE {due}{more}
            ORDER BY {self.by_queue}{table.order}"""
        return sql, given

    def _now_due(self, table: Table, queue: str, columns: str) -> SQL:
        """Return the SELECT of a queue's rows that are due, those due first, without a LIMIT."""
        return self._due_first(table, queue, columns, until=(self.now, []))

    def _fence(self, me: str, leased_at: SQL | None, kind: LeaseKind = LeaseKind.ROW) -> SQL:
        """Return the condition that ``me`` leases the row ``e``, unsettled, by the lease it got.

        A worker that has lost a lease changes nothing, even if it has leased the row anew.
        ``leased_at`` follows ``locked_at``; without it, any lease of ``me`` will do.
        """
        mine, params = "{0}.locked_by = %s", list[Any]()
        if leased_at is not None:
            mine, params = f"{mine} AND {{0}}.locked_at {leased_at[0]}", leased_at[1]
        if kind is LeaseKind.STREAM:
            # EXISTS, because a join would wait for streams that writers lock.
            mine = (
                f"EXISTS (SELECT 1 FROM {self._stream} owned "
                f"WHERE owned.stream = e.stream AND {mine.format('owned')}"
                f"{self.owned_by_key})"
            )
        return f"e.status IN (0, 2) AND {mine.format('e')}", [me, *params]

    def _held(self, me: str, leases: Leases, kind: LeaseKind = LeaseKind.ROW) -> SQL:
        """Return the condition that rows are among these, and leased by these leases of ``me``."""
        one_of, ids = self._one_of(leases)
        fence, params = self._fence(me, self._any_of(leases), kind)
        return f"{one_of} AND {fence}", [*ids, *params]

    def _leased(self, table: str, me: str, leases: Leases) -> SQL:
        """Return the condition that rows of a table are leased by these leases of ``me``."""
        one_of, keys = self._one_of(leases, key_of(table))
        leased_at, instants = self._any_of(leases)
        return f"{one_of} AND locked_by = %s AND locked_at {leased_at}", [*keys, me, *instants]

    def _one_of(self, keys: Collection[str], column: str = "id") -> SQL:
        """Return the condition that a row is one of these, and its parameters."""
        return f"{column} IN ({marks(keys)})", [*keys]

    def _any_of(self, leases: Leases) -> SQL:
        """Return the condition on ``locked_at`` for any of these leases."""
        instants = {instant(each, self.connection) for each in {*leases.values()}}
        return f"IN ({marks(instants)})", [*instants]

    @abstractmethod
    def _update_unlocked(self, table: str, *, changes: SQL, where: SQL) -> int:
        """Change the rows of a table by primary key, but not locked ones; return how many."""

    @abstractmethod
    def _update_each(self, update: EachUpdate) -> SQL:
        """Return the statement of such an update."""

    def _update_each_unlocked(self, update: EachUpdate) -> SQL:
        """Return the statement of such an update, which skips locked rows."""
        return self._update_each(update)

    def _after(self, seconds: str) -> str:
        """Return SQL for the database's clock plus the seconds that this SQL says."""
        return self.now_plus.replace("%s", seconds)


@contextmanager
def single_transaction(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Run the block in a transaction of this connection, unless one is open.

    ``atomic()`` finds a connection by its alias, where an engine's connection need not be.
    """
    if connection.in_atomic_block:
        yield
        return
    connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
    try:
        yield
        connection.commit()
    except BaseException:
        with suppress(Exception):  # the first error is more useful
            connection.rollback()
        raise
    finally:
        connection.set_autocommit(True)


@contextmanager
def all_or_nothing(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Run the block in a transaction of this connection, or in a savepoint of the open one."""
    if connection.in_atomic_block:  # of the alias's connection, then
        with transaction.atomic(using=connection.alias):
            yield
    else:
        with single_transaction(connection):
            yield
