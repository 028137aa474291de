"""Fixtures of the tests on each database: a server of the test's own, which it may break."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connection, connections

from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream
from django_outbox.sql import dialect_of
from tests import databases, debian, servers
from tests.servers import Server

ALIAS = "own"


@pytest.fixture(scope="session", autouse=True)
def nothing_in_the_background(django_db_setup: None, django_db_blocker: Any) -> None:
    """Have the server learn and vacuum only when a test says so: plans and locks depend on it."""
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            for model in apps.get_app_config("django_outbox").get_models():
                table = connection.ops.quote_name(model._meta.db_table)
                cursor.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        elif connection.vendor == "mysql":
            cursor.execute("SET GLOBAL innodb_stats_auto_recalc = OFF")


@pytest.fixture
def emptied(transactional_db: None) -> None:
    """Begin with tables that hold no deleted rows: MariaDB counts reading those, until its purge.

    Django empties a small table of MySQL by a DELETE.
    """
    if connection.vendor == "mysql":
        with connection.cursor() as cursor:
            for model in (OutboxEvent, OutboxStream, OutboxPause):
                cursor.execute(f"TRUNCATE {connection.ops.quote_name(model._meta.db_table)}")


@pytest.fixture(autouse=True)
def no_lock_wait_remembered() -> Iterator[None]:
    """Forget a lock wait: for five minutes after one, claims on MySQL are another statement."""
    yield
    if connection.vendor == "mysql":
        type(dialect_of(connection))._skips_until = 0.0  # type: ignore[attr-defined]


@pytest.fixture
def server() -> Iterator[Server]:
    try:
        servers.prepare(databases.vendor())
    except debian.Unavailable as error:
        pytest.skip(f"a server of the test's own is needed: {error}")
    # Not in tmp_path: a socket's path must be short, and every other pytest that starts denies
    # access to that directory to the user as whom PostgreSQL runs if we are root.
    with tempfile.TemporaryDirectory(prefix="outbox-", ignore_cleanup_errors=True) as directory:
        server = servers.make(databases.vendor(), Path(directory))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def alias(server: Server, django_db_blocker: pytest.FixtureRequest) -> Iterator[str]:
    """Yield an alias for the server, with the outbox's tables."""
    settings = copy.deepcopy(connections.settings["default"])
    settings.update(databases._settings(server.url))
    with django_db_blocker.unblock():  # type: ignore[attr-defined]
        connections.settings[ALIAS] = settings
        call_command("migrate", "django_outbox", database=ALIAS, verbosity=0)
        yield ALIAS
        connections[ALIAS].close()
        del connections[ALIAS], connections.settings[ALIAS]
