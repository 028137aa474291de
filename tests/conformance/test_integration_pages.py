"""Samples whose SQL is PostgreSQL's."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.utils import NotSupportedError, ProgrammingError

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests.table import insert, listening, now, statuses, write
from tests.test_integration_pages import ARCHIVE, Shop, archive, shop, sql

pytestmark = pytest.mark.django_db(transaction=True)


__all__ = ["archive", "shop"]  # fixtures

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


def archived() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM outbox_event_archive")
        return int(cursor.fetchone()[0])


@on_postgres
def test_the_command_moves_what_was_delivered_and_nothing_else(archive: Any) -> None:
    ended = now() - timedelta(hours=2)
    done = {"due": None, "status": OutboxEvent.Status.DONE}
    insert(3000, made=7200, done_at=ended, payload='{"n":1}', **done)
    kept = insert(5, made=60, done_at=now(), **done)  # delivered a minute ago
    kept += insert(1, made=7200, done_at=ended, unique_key="k", **done)
    kept += insert(5, made=7200, due=None, status=OutboxEvent.Status.DEAD, done_at=ended)
    kept += insert(5, made=7200)  # pending
    [own] = insert(1, made=7200, done_at=ended, **done)
    OutboxEvent.objects.filter(pk=own).update(event_id="zz-own-id")
    assert archive(batch=700) == "moved=3000 dropped=None"
    assert {*OutboxEvent.objects.values_list("pk", flat=True)} == {*kept, "zz-own-id"}
    assert archive() == "moved=0 dropped=None"
    assert archive(all_ids=True, keep_unique_days=0) == "moved=2 dropped=None"
    assert archived() == 3002
    with connection.cursor() as cursor:
        cursor.execute("SELECT DISTINCT payload FROM outbox_event_archive WHERE unique_key IS NULL")
        assert ('{"n":1}',) in cursor.fetchall()


@on_postgres
def test_the_command_drops_old_partitions(archive: Any) -> None:
    with connection.cursor() as cursor:
        for day in (date(2026, 1, 1), now().date() - timedelta(days=90)):
            archive.module.Command().create_partition(cursor, day)
        cursor.execute(
            "INSERT INTO outbox_event_archive (archived_on, event_id, event_type, aggregate_type, "
            "payload, occurred_at, created_at, done_at, attempts) "
            "VALUES ('2026-01-01', '1', 'x', 'y', '{}', now(), now(), now(), 0)"
        )
        assert archived() == 1
        assert archive(drop_after_days=90) == "moved=0 dropped=outbox_event_archive_20260101"
        assert archived() == 0
        cursor.execute(archive.module.PARTITIONS)
        assert len(cursor.fetchall()) == 2  # the 90th day is kept, and today's is there


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
    [alter] = [each for each in sql(ARCHIVE) if each.startswith("ALTER TABLE")]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(alter)
        cursor.execute("SELECT reloptions FROM pg_class WHERE oid = 'outbox_event'::regclass")
        assert "autovacuum_vacuum_cost_delay=0" in cursor.fetchone()[0]
        transaction.set_rollback(True)
