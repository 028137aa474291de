"""MySQL and MariaDB: questions to the server, searches for dead events, engine connections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import OperationalError

from ..conf import table_name
from .inspection import Inspection
from .upkeep import Upkeep
from .values import marks

WHOLE = ("utf8mb4", "gb18030")  # charsets that have every character
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


class MySQLServer(Upkeep, Inspection):
    # A DELETE would scan a small table, and so wait for all locked rows. MariaDB obeys FORCE INDEX
    # there only if it tests more than the key, though it be a condition that always holds.
    always = {
        "outbox_event": " AND status >= 0",
        "outbox_stream": " AND seq >= 0",
        "outbox_inbox": " AND received_at IS NOT NULL",
        "outbox_statistics": " AND id > 0",
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
        if charset in WHOLE:
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
        return next((each for each in found if each not in WHOLE), None)

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

    # -- inspection --------------------------------------------------------------------------------

    def _conditions(self, statuses: Sequence[int]) -> list[str]:
        # One per status: the index is by status too, so rows of several would need a sort.
        return [f"status = {int(status)}" for status in statuses]
