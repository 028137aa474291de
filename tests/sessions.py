"""The sessions that a server has on the database of the tests."""

from __future__ import annotations

from contextlib import suppress

from django.db import connection


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
            "SELECT id FROM information_schema.processlist "
            "WHERE db = database() AND id <> connection_id()"
        )
        ids = [int(each[0]) for each in cursor.fetchall()]
        for number in ids:
            with suppress(connection.Database.OperationalError):  # gone meanwhile
                cursor.execute(f"KILL {number}")
        return len(ids)


def sessions() -> int:
    """How many sessions the server has on this database, ours included; 0 on SQLite."""
    queries = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()",
        "mysql": "SELECT count(*) FROM information_schema.processlist WHERE db = database()",
    }
    if connection.vendor not in queries:
        return 0
    with connection.cursor() as cursor:
        cursor.execute(queries[connection.vendor])
        return int(cursor.fetchone()[0])
