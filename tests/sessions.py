"""The sessions that a server has on the database of the tests."""

from __future__ import annotations

from contextlib import suppress

from django.db import OperationalError, connection


def processes() -> str:
    """Return what to SELECT the sessions of MySQL or MariaDB from: id, db, command and info.

    MySQL's list of processes cannot be read while a statement of another has an emoji (error 3854).
    """
    if getattr(connection, "mysql_is_mariadb", False):
        return "information_schema.processlist"
    return (
        "(SELECT processlist_id AS id, processlist_db AS db, processlist_command AS command, "
        "processlist_info AS info FROM performance_schema.threads WHERE type = 'FOREGROUND')"
    )


def terminate_other_sessions() -> int:
    """End every other session of this database; return how many."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() "
                "AND backend_type = 'client backend'"
            )
            return int(cursor.fetchone()[0])
        cursor.execute(
            f"SELECT id FROM {processes()} p WHERE db = database() AND id <> connection_id()"
        )
        ids = [int(each[0]) for each in cursor.fetchall()]
        for number in ids:
            with suppress(OperationalError):  # gone meanwhile
                cursor.execute(f"KILL {number}")
        return len(ids)


def waiters(table: str = "") -> int:
    """How many sessions wait for somebody's lock in this database, in statements on that table."""
    is_mariadb = getattr(connection, "mysql_is_mariadb", False)
    queries = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND wait_event_type = 'Lock' AND position(%s IN query) > 0",
        "mysql": "SELECT count(*) FROM performance_schema.data_lock_waits JOIN "
        "performance_schema.data_locks ON engine_lock_id = requesting_engine_lock_id "
        "WHERE object_schema = database() AND locate(%s, object_name) > 0",
        # innodb_trx would answer from its cache for as long as it is asked again and again.
        "mariadb": "SELECT count(*) FROM information_schema.processlist WHERE db = database() AND "
        "command = 'Query' AND id <> connection_id() AND time_ms > 200 AND locate(%s, info) > 0",
    }
    with connection.cursor() as cursor:
        cursor.execute(queries["mariadb" if is_mariadb else connection.vendor], [table])
        return int(cursor.fetchone()[0])


def sessions() -> int:
    """How many sessions the server has on this database, ours included; 0 on SQLite."""
    if connection.vendor == "sqlite":
        return 0
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            where = "pg_stat_activity WHERE datname = current_database()"
        else:
            where = f"{processes()} p WHERE db = database()"
        cursor.execute(f"SELECT count(*) FROM {where}")
        return int(cursor.fetchone()[0])
