"""Samples whose SQL is PostgreSQL's."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.utils import NotSupportedError, ProgrammingError

import django_outbox as outbox
from tests import samples
from tests.table import listening, statuses, write
from tests.test_integration_pages import Shop, shop

pytestmark = pytest.mark.django_db(transaction=True)


__all__ = ["shop"]  # a fixture

on_postgres = pytest.mark.skipif(
    "connection.vendor != 'postgresql'", reason="the SQL of the page is PostgreSQL's"
)


def test_a_listener_runs_in_the_schema_of_its_writer(
    shop: Shop, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection's methods are those of django-tenants; on PostgreSQL they set the path."""
    mine: Any = connections["default"]

    def set_schema(name: str) -> None:
        mine.schema_name = name
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(f"SET search_path = {name}, public")

    monkeypatch.setattr(mine, "schema_name", "south", raising=False)
    monkeypatch.setattr(mine, "set_schema", set_schema, raising=False)
    monkeypatch.setattr(mine, "set_schema_to_public", lambda: set_schema("public"), raising=False)
    given = vars(shop["settings"])["OUTBOX"]
    settings.OUTBOX = {name: given[name] for name in ("CONTEXT_PROVIDERS", "INTERCEPTORS")}
    seen: list[str] = []
    with listening(lambda event: seen.append(mine.schema_name), "customer.moved", atomic=True):
        write(1, "customer.moved")
        set_schema("public")
        outbox.drain()
    assert (seen, mine.schema_name, statuses()) == (["south"], "public", {"DONE": 1})


@on_postgres
def test_the_event_table_cannot_be_partitioned() -> None:
    """No partition key is in both unique indexes, as the page says."""
    like = "CREATE TABLE partitioned (LIKE outbox_event) PARTITION BY RANGE ({})"
    primary = "ALTER TABLE partitioned ADD PRIMARY KEY (event_id)"
    unique = "CREATE UNIQUE INDEX ON partitioned (unique_key) WHERE unique_key IS NOT NULL"
    refused = (NotSupportedError, ProgrammingError)
    for by, statements in {"created_at": [primary], "event_id": [primary, unique]}.items():
        with transaction.atomic(), connection.cursor() as cursor:
            for statement in [like.format(by), *statements[:-1]]:
                cursor.execute(statement)
            with (
                pytest.raises(refused, match="must include all partitioning"),
                transaction.atomic(),
            ):
                cursor.execute(statements[-1])
            transaction.set_rollback(True)


@on_postgres
def test_the_vacuum_settings_of_the_page_are_accepted() -> None:
    page = (samples.DOCS / "how-to" / "tune.md").read_text()
    found = re.findall(r"^ALTER TABLE .*?;$", page, re.MULTILINE | re.DOTALL)
    assert found
    with transaction.atomic(), connection.cursor() as cursor:
        for each in found:
            cursor.execute(each)
        cursor.execute("SELECT reloptions FROM pg_class WHERE oid = 'outbox_event'::regclass")
        assert "autovacuum_vacuum_cost_delay=0" in cursor.fetchone()[0]
        transaction.set_rollback(True)
