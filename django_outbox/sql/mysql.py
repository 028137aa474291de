"""MySQL and MariaDB: no partial indexes, no UPDATE … RETURNING, and scanned rows are locked."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from django.db import IntegrityError, OperationalError

from ..conf import index_name, table_name
from ..log import first_line
from .claim import WHOLE, Gap
from .dialect import Dialect
from .insert import Places, due_of_followers
from .values import EVENTS, SQL, Claim, EachUpdate, Row, Table, key_of, marks

WHOLE_CHARSETS = ("utf8mb4", "gb18030")  # charsets that have every character
# Errors: a deadlock, which is also what Galera says of a transaction that another node has beaten;
# a row that has changed since the snapshot; a COMMIT refused by Galera, or by Group Replication.
CONFLICTS = (1213, 1020, 1180, 3101)
WAITED = ((1205,), (1969,))  # errors: a lock wait timed out, or MariaDB's max_statement_time
MARKS = ("wsrep_on", "group_replication_single_primary_mode")
CLUSTERS = {  # what has a statement wait for what other nodes have committed: reads and writes
    "Galera": "wsrep_sync_wait = 7",
    "Group Replication": "group_replication_consistency = 'BEFORE'",
}
NO_SUCH_TABLE = 1146
NOT_BY_KEY = 1175  # refused by a session with sql_safe_updates
IDLE = 10  # seconds that a transaction of an engine thread may be idle


logger = logging.getLogger("django_outbox")
NOT_LOCKED = (1205, 1213)  # errors: a lock wait timed out; a deadlock
SKIP_FOR = 300.0  # seconds after a lock wait in which claims skip locked rows, at some cost
ALL = 2**31  # rows: a LIMIT that cuts nothing
DUPLICATE_ENTRY = 1062


class MySQL(Dialect):
    now = "UTC_TIMESTAMP(6)"
    now_plus = "UTC_TIMESTAMP(6) + INTERVAL %s SECOND"
    # UNIX_TIMESTAMP() would read the session's local time, in which one hour a year repeats.
    now_micros = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    key = "`key`"
    # MariaDB sorted all rows of the queue: the name is a literal of the connection's collation, so
    # it does not take the column for constant.
    by_queue = ""
    rows_at_once = 100  # a CASE with a branch per row makes the cost quadratic
    _skips_until = 0.0  # monotonic
    has_due_time = "1 = 1"  # the index has all rows, those without a due time first
    by_id = "{0} e FORCE INDEX (PRIMARY)"
    deleted_by_id = f"e FROM {by_id}"
    shared_lock = " LOCK IN SHARE MODE"  # MySQL 8 knows FOR SHARE, MariaDB does not
    joined = "CONCAT({}, {})"
    on_conflict = "ON DUPLICATE KEY UPDATE"
    noted = "LAST_INSERT_ID({})"
    skip_known = " ON DUPLICATE KEY UPDATE id = VALUES(id)"

    # The claim without locks was 1.6 to 2.1 times as fast as SELECT … FOR UPDATE SKIP LOCKED.

    def _select_due(self, claim: Claim, *, skip_locked: bool = False) -> tuple[list[Row], set[str]]:
        # Writers lock streams until they commit, and a claim must not wait for them.
        may_wait = not self.connection.in_atomic_block and time.monotonic() >= self._skips_until
        skip_locked = skip_locked or claim.table is not EVENTS or not may_wait
        return super()._select_due(claim, skip_locked=skip_locked)

    def _take(self, table: Table, changes: SQL, where: SQL) -> int:
        if table is not EVENTS:
            return super()._take(table, changes, where)
        # One table: a join that skips locked rows makes a temporary table.
        sql = f"UPDATE {self._event_by_id} SET {changes[0]} WHERE {where[0]}"
        try:
            return self._run(sql, [*changes[1], *where[1]])
        except OperationalError as error:  # it has changed nothing
            if error.args[0] not in NOT_LOCKED or self.connection.in_atomic_block:
                raise
            if getattr(self.connection, "is_clustered", False) and self.is_conflict(error):
                logger.debug("claim beaten error=%s", first_line(error))  # by one of another node
                return 0
            type(self)._skips_until = time.monotonic() + SKIP_FOR
            logger.warning("claim failed error=%s skip_for=%d", first_line(error), SKIP_FOR)
            return 0

    def _update_unlocked(self, table: str, *, changes: SQL, where: SQL) -> int:
        return self._run(*self._unlocked(table, changes, where))

    def _unlocked(self, table: str, changes: SQL, where: SQL) -> SQL:
        # LIMIT keeps the locking subquery from being merged into the UPDATE, and STRAIGHT_JOIN puts
        # it first. Otherwise a small table may be scanned.
        name, key = self._table(table), key_of(table)
        sql = f"""UPDATE (
                SELECT {key} FROM {name} e FORCE INDEX (PRIMARY)
                WHERE {where[0]} LIMIT %s{self._skip_locked}
            ) unlocked STRAIGHT_JOIN {name} e FORCE INDEX (PRIMARY) ON e.{key} = unlocked.{key}
            SET {changes[0]}"""
        return sql, [*where[1], ALL, *changes[1]]

    def _update_each(self, update: EachUpdate) -> SQL:
        changes, where = self._spelled(update)
        sql = f"""UPDATE {self._table(update.table)} e FORCE INDEX (PRIMARY)
            SET {changes[0]} WHERE {where[0]}"""
        return sql, [*changes[1], *where[1]]

    def _update_each_unlocked(self, update: EachUpdate) -> SQL:
        return self._unlocked(update.table, *self._spelled(update))

    def _spelled(self, update: EachUpdate) -> tuple[SQL, SQL]:
        """Return the changes and the condition of an update, with the rows' values in them."""
        # A CASE for each value: a join with VALUES makes a temporary table. FORCE INDEX: the
        # optimizer would scan a small table, and so wait for all locked rows.
        keys, columns = update.given[0].values, {each.name: each for each in update.given}
        key = update.given[0].name

        def spelled(sql: str, params: Sequence[Any] = ()) -> SQL:
            left, values = iter(params), list[Any]()

            def one(found: re.Match[str]) -> str:
                if found[0] == "%s":
                    values.append(next(left))
                    return "%s"
                case, column = "%s", columns[found[1]]
                if len({*column.values}) == 1:
                    values.append(column.values[0])
                else:
                    values.extend(chain.from_iterable(zip(keys, column.values, strict=True)))
                    case = f"CASE e.{key} {'WHEN %s THEN %s ' * len(keys)}END"
                return f"CAST({case} AS DATETIME(6))" if column.kind == "timestamptz" else case

            return re.sub(r"%s|\bv\.(\w+)", one, sql), values

        fence, params = spelled(*update.where)
        mine = f"e.{key} IN ({marks(keys)}) AND {fence}", [*keys, *params]
        return spelled(update.changes), mine

    def queues_besides(self, known: Collection[str], within: Sequence[Gap] = WHOLE) -> list[str]:
        # Finished rows are in the indexes too, without a due time.
        found = super().queues_besides(known, within)
        return sorted({row[0] for row in self._first_of_each(found, after=("'1000-01-01'", []))})

    def _by_due(self, table: Table) -> str:
        hint = f"FORCE INDEX ({index_name(f'{table.name}_queue')})"
        return f"{self._table(table.name)} {hint}"

    @property
    def _skip_locked(self) -> str:
        can_skip = self.connection.features.has_select_for_update_skip_locked
        return " FOR UPDATE SKIP LOCKED" if can_skip else " FOR UPDATE"  # MariaDB before 10.6

    @contextmanager
    def read_committed(self) -> Iterator[None]:
        for_next = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"  # transaction only
        if not self.connection.in_atomic_block:
            try:
                self._run(for_next, [])
            except OperationalError:  # the session ended while idle: nothing was run
                self.connection.close()
                self._run(for_next, [])
        with super().read_committed():
            yield

    def _insert(self, sql: str, params: list[Any], *, may_clash: bool) -> int:
        # INSERT IGNORE would hide other errors too; error 1062 leaves the transaction usable.
        try:
            return super()._insert(sql, params, may_clash=False)
        except IntegrityError as error:
            if may_clash and error.args[0] == DUPLICATE_ENTRY:
                return 0
            raise

    def _number(self, places: Places) -> Mapping[str, int]:
        with self.connection.cursor() as cursor:
            cursor.execute(*self._upsert(places, due=due_of_followers()))
            if len(places) == 1:
                return {places[0][0]: int(cursor.lastrowid)}
        one_of, streams = self._one_of([stream for stream, *_ in places], "stream")
        return dict(self._rows(f"SELECT stream, seq FROM {self._stream} WHERE {one_of}", streams))

    @property
    def _new_row(self) -> tuple[str, str]:
        # MySQL warns about VALUES() on each statement; MariaDB has no row alias.
        is_mariadb = self.connection.mysql_is_mariadb  # type: ignore[attr-defined]
        return ("", "VALUES({})") if is_mariadb else (" AS new", "new.{}")

    @property
    def _events_in_order(self) -> str:
        # For a key with half of all rows, the optimizer would scan and sort them despite LIMIT.
        return f"{self._event} FORCE INDEX ({index_name('outbox_event_stream')})"

    # -- the server, and sessions of the engine ----------------------------------------------------

    # A DELETE would scan a small table, and so wait for all locked rows. MariaDB obeys FORCE INDEX
    # there only if it tests more than the key, though it be a condition that always holds.
    always = {
        "outbox_event": " AND status >= 0",
        "outbox_stream": " AND seq >= 0",
        "outbox_inbox": " AND received_at IS NOT NULL",
        "outbox_statistics": " AND id > 0",
        "outbox_operation": " AND id > 0",
    }

    def _run(self, sql: str, params: Sequence[Any]) -> int:
        try:
            return super()._run(sql, params)
        except OperationalError as error:  # it has changed nothing
            if error.args[0] != NOT_BY_KEY:
                raise
        super()._run("SET sql_safe_updates = 0", [])
        try:
            return super()._run(sql, params)
        finally:
            super()._run("SET sql_safe_updates = 1", [])

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        is_mariadb = self.connection.mysql_is_mariadb  # type: ignore[attr-defined]
        name = "max_statement_time" if is_mariadb else "max_execution_time"
        before = self._rows(f"SELECT @@{name}")[0][0]
        self._run(f"SET {name} = %s", [seconds if is_mariadb else int(seconds * 1000)])
        try:
            yield
        finally:
            self._run(f"SET {name} = %s", [before])

    def _estimate(self) -> tuple[str, list[Any]]:
        sql = """SELECT table_rows FROM information_schema.tables
            WHERE table_schema = database() AND table_name = %s"""
        return sql, [table_name("outbox_event")]

    def is_conflict(self, error: BaseException) -> bool:
        return isinstance(error, OperationalError) and error.args[0] in CONFLICTS

    def is_lock_wait(self, error: BaseException) -> bool:
        return isinstance(error, OperationalError) and error.args[:1] in WAITED

    def is_missing_table(self, error: BaseException) -> bool:
        return error.args[:1] == (NO_SUCH_TABLE,)

    def failing_isolation(self) -> str | None:
        levels = "transaction_isolation", "tx_isolation"
        found = self.variables(*levels, "innodb_snapshot_isolation")
        if found.pop("innodb_snapshot_isolation", "OFF") == "OFF":  # MariaDB's default before 11.6
            return None
        level = str(next(iter(found.values()))).replace("-", " ")
        return level if level in ("REPEATABLE READ", "SERIALIZABLE") else None

    def unstorable(self, texts: Iterable[str]) -> str | None:
        driver: Any = self.connection.connection
        charset = driver.character_set_name()
        if charset in WHOLE_CHARSETS:
            return None
        for text in texts:
            if charset in ("utf8", "utf8mb3"):
                if (found := max(text, default="")) > "\uffff":
                    return found
                continue
            try:
                text.encode(driver.encoding)
            except UnicodeEncodeError as error:
                return text[error.start]
        return None

    def weak_charset(self) -> str | None:
        [found] = self._rows("SELECT @@character_set_client, @@character_set_connection")
        return next((each for each in found if each not in WHOLE_CHARSETS), None)

    def variables(self, *names: str) -> dict[str, str]:
        sql = f"SHOW VARIABLES WHERE variable_name IN ({marks(names)})"
        return dict(self._rows(sql, names))

    def prepare_engine(self, settings: dict[str, Any], *, lock_wait: float) -> None:
        # At REPEATABLE READ, gap locks of claims made 13 % of business transactions deadlock.
        options = {**settings.get("OPTIONS", {}), "isolation_level": "read committed"}
        # Errors of listeners hold any character. What a column lacks is refused, and then stored in
        # ASCII; a session that is not strict would store question marks and say nothing.
        options["charset"] = "utf8mb4"
        strict = "SET sql_safe_updates = 0, sql_mode = CONCAT(@@sql_mode, ',STRICT_TRANS_TABLES')"
        # A worker that is suspended inside a transaction must not keep its locks. MySQL has no such
        # limit, and reads this as a comment.
        idle = f", wait_timeout = 86400 /*M!100300 , SESSION idle_transaction_timeout = {IDLE} */"
        wait = f"SET SESSION innodb_lock_wait_timeout = {max(round(lock_wait), 1)} {idle}"
        begin = [options.get("init_command"), strict, wait]
        options["init_command"] = "; ".join(filter(None, begin))
        settings["OPTIONS"] = options

    def begin_session(self) -> bool:
        # A node has what others have committed only after a moment. A claim that does not wait for
        # that takes what another worker has: 1 to 14 % of events ran twice.
        if (cluster := self.cluster()) is not None:
            self._run(f"SET SESSION {CLUSTERS[cluster]}", [])
        return cluster is not None

    def cluster(self) -> str | None:
        galera, group = MARKS
        found = self.variables(*MARKS)
        if found.get(galera) == "ON":
            return "Galera"
        return "Group Replication" if found.get(group) == "OFF" else None

    def _conditions(self, statuses: Sequence[int]) -> list[str]:
        # One per status: the index is by status too, so rows of several would need a sort.
        return [f"status = {int(status)}" for status in statuses]
