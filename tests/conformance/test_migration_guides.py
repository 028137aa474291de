"""The samples of the migration guides that need PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, connections

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests import samples
from tests.table import now, statuses
from tests.test_migration_guides import Shop, booked, installed, parcels, parents, shop, sql

pytestmark = pytest.mark.django_db(transaction=True)

PROCRASTINATE = "how-to/migrate-from-a-task-queue.md#procrastinate"


__all__ = ["parents", "shop"]  # fixtures

on_postgres = pytest.mark.skipif("connection.vendor != 'postgresql'", reason="it needs PostgreSQL")


Rows = list[dict[str, Any]]


def fetch(statement: str, using: str = "default") -> list[tuple[Any, ...]]:
    with connections[using].cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


@pytest.fixture
def jobs(shop: Shop) -> Iterator[Any]:
    """Lend the model of procrastinate's jobs, with its schema; the page's SQL removes it."""
    import_module("procrastinate")
    with installed("procrastinate.contrib.django"):
        app = import_module("procrastinate.contrib.django").app
        app.schema_manager.apply_schema()
        try:
            yield import_module("procrastinate.contrib.django.models").ProcrastinateJob
        finally:
            with connection.cursor() as cursor:
                cursor.execute(sql(PROCRASTINATE))
            current = import_module("procrastinate.contrib.django.procrastinate_app")
            current.current_app = current.FutureApp()
    for table, column in (("class", "rel"), ("proc", "pro"), ("type", "typ")):
        like = r"LIKE '\_?procrastinate\_%'"
        assert fetch(f"SELECT {column}name FROM pg_{table} WHERE {column}name {like}") == []


def run_procrastinate() -> None:
    """Run procrastinate's own worker until no job is due."""
    app = import_module("procrastinate.contrib.django").app
    with app.replace_connector(app.connector.get_worker_connector()) as worker:
        worker.run_worker(wait=False, install_signal_handlers=False, listen_notify=False)


def procrastinate_both(shop: Shop) -> Any:
    parcels(shop)
    shop.add("shop.listeners", samples.run(PROCRASTINATE, only="parcels.book(event.payload"))
    both = samples.run(PROCRASTINATE, only="    parcels.book(order_id)", __name__="shop.tasks")
    return shop.add("shop.tasks", both)


@on_postgres
@pytest.mark.parametrize("first", ["procrastinate", "outbox"])
def test_procrastinate_and_the_outbox_side_by_side(shop: Shop, jobs: Any, first: str) -> None:
    procrastinate_both(shop)
    block = samples.run(PROCRASTINATE, only='key=f"sku-{sku}")\n        book_parcel')
    order = shop.add("shop.views", block).place_order("teapot")
    runs: list[Callable[[], Any]] = [run_procrastinate, outbox.drain]
    for run in runs if first == "procrastinate" else reversed(runs):
        run()
    assert shop.carrier.booked == [("teapot", f"order-{order.pk}")]
    assert (jobs.objects.get().status, statuses()) == ("succeeded", {"DONE": 1})


@on_postgres
def test_after_the_cut_over_no_job_is_deferred(shop: Shop, jobs: Any) -> None:
    procrastinate_both(shop)
    block = samples.run(PROCRASTINATE, only='key=f"sku-{sku}")\n    return')
    shop.add("shop.views", block).place_order("teapot")
    assert not jobs.objects.exists()
    assert outbox.drain() == 1
    assert booked(shop) == ["teapot"]


@on_postgres
def test_a_roll_back_gives_the_work_to_procrastinate_again(shop: Shop, jobs: Any) -> None:
    procrastinate_both(shop)
    block = samples.run(PROCRASTINATE, only='key=f"sku-{sku}")\n    return')
    shop.add("shop.views", block).place_order("teapot")
    shop.add("shop.listeners", samples.run(PROCRASTINATE, only="def defer_book_parcel"))
    assert outbox.drain() == 1
    assert (booked(shop), jobs.objects.get().lock) == ([], "sku-teapot")
    run_procrastinate()
    assert booked(shop) == ["teapot"]


@contextmanager
def old_table(name: str, statements: str, rows: Rows, using: str = "default") -> Iterator[None]:
    """Create a table of another outbox in a schema of its own, and fill it."""
    quote = connections[using].ops.quote_name
    with connections[using].cursor() as cursor:
        cursor.execute("CREATE SCHEMA older")
        # First the schema of the old table: on its own database it is the only one.
        cursor.execute(
            "SET search_path TO public, older" if using == "default" else "SET search_path TO older"
        )
        cursor.execute(statements.replace(f"TABLE {name}", f"TABLE older.{name}"))
        for row in rows:
            columns, marks = ", ".join(map(quote, row)), ", ".join(["%s"] * len(row))
            cursor.execute(f"INSERT INTO {name} ({columns}) VALUES ({marks})", [*row.values()])
    try:
        yield
    finally:
        with connections[using].cursor() as cursor:
            cursor.execute("DROP SCHEMA older CASCADE")
            cursor.execute("SET search_path TO DEFAULT")


def written() -> list[tuple[Any, ...]]:
    """Return what the events in the table say, oldest first."""
    rows = OutboxEvent.objects.order_by("created_at", "seq", "event_id")
    return [(row.event_type, json.loads(row.payload), row.key) for row in rows]


RELIABLE = """
CREATE TABLE reliable_outbox_outboxmessage (
    id bigint NOT NULL PRIMARY KEY GENERATED BY DEFAULT AS IDENTITY,
    message_id uuid NOT NULL UNIQUE,
    kind varchar(5) NOT NULL,
    name varchar(255) NOT NULL,
    payload jsonb NOT NULL,
    headers jsonb NOT NULL,
    key varchar(255) NULL,
    destination varchar(100) NOT NULL,
    status varchar(9) NOT NULL,
    attempts integer NOT NULL CHECK (attempts >= 0),
    max_attempts integer NOT NULL CHECK (max_attempts >= 0),
    backoff varchar(11) NOT NULL,
    run_at timestamp with time zone DEFAULT STATEMENT_TIMESTAMP() NOT NULL,
    locked_until timestamp with time zone NULL,
    locked_by varchar(100) NOT NULL,
    created_at timestamp with time zone DEFAULT STATEMENT_TIMESTAMP() NOT NULL,
    completed_at timestamp with time zone NULL,
    last_error text NOT NULL,
    last_traceback text NOT NULL
)
"""


def reliable_row(name: str, number: int, **columns: Any) -> dict[str, Any]:
    return {
        "message_id": str(uuid4()),
        "kind": "event",
        "name": name,
        "destination": "default",
        "payload": json.dumps({"order": number}),
        "headers": json.dumps({"tries": 1}),
        "status": "pending",
        "attempts": 0,
        "max_attempts": 10,
        "backoff": "exponential",
        "locked_by": "",
        "last_error": "",
        "last_traceback": "",
        **columns,
    }


@on_postgres
def test_pending_messages_of_reliable_outbox_move(parents: Any) -> None:
    soon = now() + timedelta(hours=1)
    rows = [
        reliable_row("order.placed", 1, key="k"),
        reliable_row("order.placed", 2, key="k"),
        reliable_row("order.placed", 3, run_at=soon),
        reliable_row("order.placed", 4, run_at=soon, key="later"),  # stays
        reliable_row("order.placed", 5, locked_until=soon),  # leased
        reliable_row("order.placed", 6, status="dead"),
        reliable_row("shop.jobs.book", 7, kind="job"),
    ]
    module = parents["shop.move_reliable_outbox"]
    with old_table("reliable_outbox_outboxmessage", RELIABLE, rows):
        assert (module.move_pending(), module.move_pending()) == (3, 0)
        select = "SELECT status, count(*) FROM reliable_outbox_outboxmessage GROUP BY 1"
        assert dict(fetch(select)) == {"delivered": 3, "pending": 3, "dead": 1}
    found = OutboxEvent.objects.order_by("payload")
    assert [json.loads(row.payload)["order"] for row in found] == [1, 2, 3]
    assert [row.key for row in found] == ["k", "k", None]
    assert (found[0].seq or 0) < (found[1].seq or 0)
    assert [row.pk for row in found] == [row["message_id"] for row in rows[:3]]
    assert json.loads(found[0].headers or "") == {"tries": "1"}
    assert found[2].deliver_at == soon
