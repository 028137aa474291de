"""SQL for MySQL and MariaDB: no partial indexes or UPDATE … RETURNING; scanned rows are locked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import IntegrityError, OperationalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import index_name, table_name
from .dialect import Dialect
from .numbering import Places, due_of_followers, upsert_values
from .values import Claim, Read

DUPLICATE_ENTRY = 1062
ALL = 2**31  # rows: a LIMIT that cuts nothing
IDLE = 10  # seconds that a transaction of an engine thread may be idle


class MySQL(Dialect):
    now = "UTC_TIMESTAMP(6)"
    plus = "UTC_TIMESTAMP(6) + INTERVAL %s SECOND"
    shared = " LOCK IN SHARE MODE"  # MySQL 8 knows FOR SHARE, MariaDB does not
    # UNIX_TIMESTAMP() would read the session's local time, in which one hour a year repeats.
    micros = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"

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
        streams, key = self._streams(connection)
        row = f"(%s, LAST_INSERT_ID({self.micros} + %s), {self.now})"
        # MySQL warns about VALUES() on each statement; MariaDB has no row alias.
        is_mariadb = connection.mysql_is_mariadb  # type: ignore[attr-defined]
        alias, seq = ("", "VALUES(seq)") if is_mariadb else (" AS new", "new.seq")
        sql = (
            f"INSERT INTO {streams} ({key}, seq, due_at) VALUES {', '.join([row] * len(places))}"
            f"{alias} ON DUPLICATE KEY UPDATE "
            f"seq = LAST_INSERT_ID({streams}.seq + 1 + {seq} - {self.micros}), "
            f"due_at = {due.format(row=f'{streams}.', now=self.now)}"
        )
        return sql, upsert_values(places)

    def _conditions(self, statuses: Sequence[int]) -> list[str]:
        # One per status: the index is by status too, so rows of several would need a sort.
        return [f"status = {int(status)}" for status in statuses]

    def estimated_rows(self, connection: BaseDatabaseWrapper) -> int:
        sql = (
            "SELECT table_rows FROM information_schema.tables "
            "WHERE table_schema = database() AND table_name = %s"
        )
        return self._estimate(connection, sql, [table_name("outbox_event")])

    def _by_death(self, connection: BaseDatabaseWrapper) -> str:
        return self._by_stream(connection)

    def lately_dead(
        self, connection: BaseDatabaseWrapper, *, most: int, among: int
    ) -> tuple[list[str], bool]:
        # Those with a key are in the index among all that are done: 1 s for half a million.
        by_death, by_id = self._by_death(connection), self._by_key(connection)
        key = self._streams(connection)[1]
        unkeyed = (
            f"SELECT event_id, 1 FROM {by_death} WHERE {self._deaths(connection)[0]} "
            f"ORDER BY event_id DESC LIMIT {int(most)}"
        )
        keyed = (
            f"SELECT event_id, 1 FROM (SELECT event_id, status, {key} FROM {by_id} "
            f"ORDER BY event_id DESC LIMIT {int(among)}) newest "
            f"WHERE status = 3 AND {key} IS NOT NULL LIMIT {int(most)}"
        )
        beyond = (
            f"SELECT event_id, 0 FROM {by_id} ORDER BY event_id DESC LIMIT 1 OFFSET {int(among)}"
        )
        with connection.cursor() as cursor:
            cursor.execute(f"({unkeyed}) UNION ALL ({keyed}) UNION ALL ({beyond})", [])
            found = cursor.fetchall()
        ids = {event_id for event_id, is_dead in found if is_dead}
        return sorted(ids, reverse=True)[:most], all(is_dead for _, is_dead in found)

    def _deaths(self, connection: BaseDatabaseWrapper) -> Sequence[str]:
        # Those without a key are adjacent in the index, newest last; all others there are read.
        key = self._streams(connection)[1]
        return [f"{key} IS NULL AND status = 3 AND seq IS NULL", f"{key} > '' AND status = 3"]

    def failing_isolation(self, connection: BaseDatabaseWrapper) -> str | None:
        with connection.cursor() as cursor:  # MySQL 8 and MariaDB name the level differently
            cursor.execute(
                "SHOW VARIABLES WHERE variable_name IN "
                "('transaction_isolation', 'tx_isolation', 'innodb_snapshot_isolation')"
            )
            found = dict(cursor.fetchall())
        if found.pop("innodb_snapshot_isolation", "OFF") == "OFF":  # MariaDB's default before 11.6
            return None
        level = str(next(iter(found.values()))).replace("-", " ")
        return level if level in ("REPEATABLE READ", "SERIALIZABLE") else None

    def largest_statement(self, connection: BaseDatabaseWrapper) -> int | None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@max_allowed_packet")
            return int(cursor.fetchone()[0])

    def _update_unlocked(
        self, connection: BaseDatabaseWrapper, name: str, assignments: str, values: Sequence[Any],
        where: str, params: Sequence[Any],
    ) -> int:  # fmt: skip
        # LIMIT keeps the locking subquery from being merged into the UPDATE, and STRAIGHT_JOIN
        # puts it first. Otherwise a small table may be scanned.
        key, table = self._primary_key(connection, name), self._by_key(connection, name)
        lock = self._skip(connection) or " FOR UPDATE"
        sql = (
            f"UPDATE (SELECT {key} AS id, locked_by AS was FROM {table} WHERE {where} LIMIT %s"
            f"{lock}) AS unlocked STRAIGHT_JOIN {table} "
            f"ON {self._table(connection, name)}.{key} = unlocked.id SET {assignments}"
        )
        return self._run(connection, sql, [*params, ALL, *values])

    def _lease(self, claim: Claim, *, was: str = "was") -> tuple[str, list[Any]]:
        return super()._lease(claim, was=was)  # a joined UPDATE assigns columns in any order

    def _by_key(self, connection: BaseDatabaseWrapper, name: str = "outbox_event") -> str:
        # The optimizer would scan a small table, and so wait for all locked rows.
        return f"{self._table(connection, name)} FORCE INDEX (PRIMARY)"

    def _delete_by_key(self, connection: BaseDatabaseWrapper, name: str = "outbox_event") -> str:
        return f"DELETE {self._table(connection, name)} FROM {self._by_key(connection, name)}"

    def _by_stream(self, connection: BaseDatabaseWrapper) -> str:
        # For a key with half of all rows, the optimizer would scan and sort them despite LIMIT.
        return f"{self._table(connection)} FORCE INDEX ({index_name('outbox_event_key')})"

    def _stream_by_due(self, connection: BaseDatabaseWrapper) -> str:
        return f"{self._streams(connection)[0]} FORCE INDEX ({index_name('outbox_stream_due')})"

    def _branches(self, read: Read) -> Sequence[str]:
        due = f" AND deliver_at <= {self.now}" if read.only_due_retries else ""
        dead = ["status = 3"] if read.dead_too else []
        return ["status = 0", f"status = 2{due}", *dead]

    def _branch(self, select: str) -> str:
        return f"({select})"

    @contextmanager
    def read_committed(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._begin_read_committed(connection))
            except OperationalError:  # the session ended while idle: nothing was run
                if connection.in_atomic_block:
                    raise
                connection.close()
                stack.enter_context(self._begin_read_committed(connection))
            yield

    @contextmanager
    def _begin_read_committed(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        if not connection.in_atomic_block:  # for the next transaction only
            self._run(connection, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", [])
        with transaction.atomic(using=connection.alias):
            yield

    def prepare_engine(self, settings: dict[str, Any], *, lock_wait: float) -> None:
        # At REPEATABLE READ, gap locks of claims made 13 % of business transactions deadlock.
        options = {**settings.get("OPTIONS", {}), "isolation_level": "read committed"}
        # A worker that is suspended inside a transaction must not keep its locks. MySQL has no such
        # limit, and reads this as a comment.
        idle = f"/*M!100300 , SESSION idle_transaction_timeout = {IDLE} */"
        wait = f"SET SESSION innodb_lock_wait_timeout = {max(round(lock_wait), 1)} {idle}"
        options["init_command"] = "; ".join(filter(None, [options.get("init_command"), wait]))
        settings["OPTIONS"] = options
