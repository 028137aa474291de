"""Fixtures of the tests on each database: a server of the test's own, which it may break."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connection, connections

from django_outbox.sql import dialect_of
from tests import databases, debian, servers
from tests.servers import Server

ALIAS = "own"


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
