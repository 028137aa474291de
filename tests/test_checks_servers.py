"""System checks of servers and drivers: unknown, too old, or compatible in protocol only."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction

from django_outbox import write
from django_outbox.checks import servers
from django_outbox.models import OutboxEvent
from django_outbox.sql import DIALECTS
from tests.cases import cases

pytestmark = pytest.mark.django_db


def found(*ids: str) -> list[CheckMessage]:
    tags = ["django_outbox", "database"]
    messages = run_checks(tags=tags, databases=["default"])
    return [each for each in messages if each.id in {f"django_outbox.{name}" for name in ids}]


class Answering:
    """A connection to a server that returns this text for VERSION()."""

    def __init__(self, vendor: str, name: str, version_text: str, version: tuple[int, ...]) -> None:
        self.alias, self.vendor, self.display_name = "default", vendor, name
        self._version_text, self._version = version_text, version
        self.variables = list[tuple[str, str]]()
        self.Database: Any = SimpleNamespace(__name__="psycopg", __version__="3.2.0")

    @contextmanager
    def cursor(self) -> Any:
        asks = list[str]()
        yield SimpleNamespace(
            execute=lambda sql, params: asks.append(sql),
            fetchall=lambda: (
                [(self._version_text,)] if asks[-1] == "SELECT VERSION()" else self.variables
            ),
        )

    def get_database_version(self) -> tuple[int, ...]:
        return self._version


def asked(server: Any) -> list[CheckMessage]:
    return list(servers.of_server(server))


def test_193_there_is_sql_for_these_vendors() -> None:
    assert {*DIALECTS} == {"postgresql", "mysql", "sqlite"}  # mysql includes MariaDB
    assert connection.vendor in DIALECTS


def test_it_is_found_by_the_checks_of_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "vendor", "oracle")
    assert [each.is_serious() for each in found("E024")] == [True]


PROTOCOL = "'default' is {}, which speaks the protocol of {}"
OLD = "The database 'default' is {}; expected {} or later."


@cases(
    ("vendor", "name", "version_text", "version", "found", "says"),
    [
        ("oracle", "Oracle", "23.5", (23, 5), "E024", "'default' is Oracle"),
        # Servers that only speak the protocol of another.
        ("mysql", "MySQL", "8.0.11-TiDB-v8.5.0", (8, 0, 11), "E028", "TiDB"),
        ("mysql", "MySQL", "5.7.25-OceanBase-v4.2.1.0", (5, 7, 25), "E028", "OceanBase"),
        ("postgresql", "PostgreSQL", "PostgreSQL 15.2-YB-2024.2", (15, 2), "E028", "YugabyteDB"),
        ("postgresql", "PostgreSQL", "CockroachDB CCL v24.1.0", (13, 0), "E028", "CockroachDB"),
        # Old servers.
        ("postgresql", "PostgreSQL", "14.13", (14, 13), "W025", "15"),
        ("mysql", "MySQL", "8.0.40", (8, 0, 40), "W025", "8.4"),
        ("mysql", "MariaDB", "10.6.20", (10, 6, 20), "W025", "10.11"),
        ("sqlite", "SQLite", "3.34.1", (3, 34, 1), "W025", "3.35"),
        # Supported builds, Percona's among them.
        ("postgresql", "PostgreSQL", "PostgreSQL 16.4 on aarch64", (16, 4), "", ""),
        ("mysql", "MySQL", "8.4.3", (8, 4, 3), "", ""),
        ("mysql", "MySQL", "8.4.3-3", (8, 4, 3), "", ""),
        ("mysql", "MariaDB", "10.11.6-MariaDB-0+deb12u1", (10, 11, 6), "", ""),
    ],
    ids=str,
)
def test_193_268_unknown_incompatible_and_old_servers_are_reported(
    vendor: str, name: str, version_text: str, version: tuple[int, ...], found: str, says: str
) -> None:
    messages = asked(Answering(vendor, name, version_text, version))
    assert [each.id for each in messages] == [f"django_outbox.{found}"] * bool(found)
    for each in messages:
        old = OLD.format(f"{name} {version_text}", says)
        assert {"E028": PROTOCOL.format(says, name), "W025": old}.get(found, says) in each.msg
        assert (each.is_serious(), bool(each.hint)) == (found[0] == "E", True)


@cases(
    ("variables", "says"),
    [
        ([("wsrep_on", "ON")], "Galera"),
        ([("wsrep_on", "OFF")], ""),
        ([("group_replication_single_primary_mode", "OFF")], "Group Replication"),
        ([("group_replication_single_primary_mode", "ON")], ""),
        ([], ""),
    ],
    ids=str,
)
def test_a_cluster_whose_nodes_all_take_writes_is_warned_of(
    variables: list[tuple[str, str]], says: str
) -> None:
    server = Answering("mysql", "MySQL", "8.4.3", (8, 4, 3))
    server.variables = variables
    messages = asked(server)
    assert [each.id for each in messages] == ["django_outbox.W061"] * bool(says)
    assert all(f"is a {says} cluster" in each.msg and each.hint for each in messages)


@pytest.mark.parametrize(
    ("driver", "version", "warned"),
    [
        ("psycopg", "3.1.18", True),
        ("psycopg2", "2.9.10 (dt dec pq3 ext lo64)", True),
        ("psycopg", "3.2.0", False),
        ("psycopg", "3.10.0.dev1", False),
    ],
)
def test_a_driver_of_postgresql_that_hears_nothing_is_warned_of(
    driver: str, version: str, warned: bool
) -> None:
    server = Answering("postgresql", "PostgreSQL", "PostgreSQL 18.1", (18, 1))
    server.Database = SimpleNamespace(__name__=driver, __version__=version)
    messages = asked(server)
    assert [each.id for each in messages] == ["django_outbox.W054"] * warned
    if messages:
        assert not messages[0].is_serious()
        assert f"reached by {driver} {version}; expected psycopg 3.2 or later" in messages[0].msg
        assert "pip install" in str(messages[0].hint)


def test_193_an_unknown_database_is_refused_before_any_sql(
    monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: Any
) -> None:
    expected = r"'default' is Oracle, .* Route django_outbox to PostgreSQL"
    with transaction.atomic():
        with monkeypatch.context() as patched, django_assert_num_queries(0):
            patched.setattr(connection, "vendor", "oracle")
            patched.setattr(connection, "display_name", "Oracle")
            with pytest.raises(ImproperlyConfigured, match=expected):
                write("x")
        assert not OutboxEvent.objects.exists()
