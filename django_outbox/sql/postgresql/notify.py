"""PostgreSQL: LISTEN and NOTIFY."""

from __future__ import annotations

import select

from django.db.backends.base.base import BaseDatabaseWrapper


def notify(connection: BaseDatabaseWrapper, channel: str) -> None:
    """Notify those that listen, now: a NOTIFY in a transaction would delay the writers' commits."""
    # A NOTIFY commits, but stores nothing. Not waiting for the WAL flush halves its time.
    ring = "SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, '')"
    with connection.cursor() as cursor:
        cursor.execute(ring, [channel])


def listen(connection: BaseDatabaseWrapper, channel: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"LISTEN {connection.ops.quote_name(channel)}")


def wait_for_notification(connection: BaseDatabaseWrapper, timeout: float) -> bool:
    """Wait up to ``timeout`` seconds for a notification; return whether one was received."""
    driver = connection.connection
    with connection.wrap_database_errors:
        if hasattr(driver, "notifies") and callable(driver.notifies):
            return bool([*driver.notifies(timeout=timeout, stop_after=1)])
        select.select([driver], [], [], timeout)  # psycopg2
        driver.poll()
        received, driver.notifies[:] = driver.notifies[:], []
        return bool(received)
