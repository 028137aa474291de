"""The samples of the migration guides that need PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from importlib import import_module
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, connections

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests import samples
from tests.migration_samples import GRUELBOX, NAMASTACK, OUTBOX_JAVA, RELIABLE, Shop, command
from tests.table import now, statuses
from tests.test_migration_guides import booked, installed, parcels, parents, shop, sql
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

PROCRASTINATE = "how-to/migrate-from-procrastinate.md"


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
def test_before_procrastinate_books_the_parcel(shop: Shop, jobs: Any) -> None:
    block = samples.run(PROCRASTINATE, only="carrier.book(Order", __name__="shop.tasks")
    shop.add("shop.tasks", block)
    block = samples.run(PROCRASTINATE, only="(sku=sku)\n        book_parcel")
    shop.add("shop.views", block).place_order("teapot")
    run_procrastinate()
    assert (booked(shop), jobs.objects.get().status) == (["teapot"], "succeeded")


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
def test_pending_jobs_move(shop: Shop, jobs: Any) -> None:
    task = procrastinate_both(shop).book_parcel
    ids = [Order.objects.create(sku=sku).pk for sku in ("teapot", "kettle", "cup", "jar", "pot")]
    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
    task.configure(lock="a").defer(order_id=ids[0])
    task.configure(lock="a", priority=1).defer(order_id=ids[1])
    task.configure(schedule_at=tomorrow).defer(order_id=ids[2])
    task.configure(lock="b", schedule_at=tomorrow).defer(order_id=ids[3])
    taken = task.defer(order_id=ids[4])
    with connection.cursor() as cursor:
        cursor.execute("UPDATE procrastinate_jobs SET status = 'doing' WHERE id = %s", [taken])
    module = shop.add("shop.move_jobs", samples.run(PROCRASTINATE, only="def move(job)"))
    assert command(module) == "moved 3, left 1"
    assert command(module) == "moved 0, left 1"
    found = jobs.objects.order_by("id").values_list("status", flat=True)
    assert [*found] == ["cancelled", "cancelled", "cancelled", "todo", "doing"]
    later = OutboxEvent.objects.get(deliver_at__isnull=False)
    assert later.deliver_at == tomorrow
    outbox.drain()
    assert booked(shop) == ["kettle", "teapot"]  # in the order of their lock


@on_postgres
def test_a_job_that_a_worker_takes_meanwhile_is_not_moved(shop: Shop, jobs: Any) -> None:
    task = procrastinate_both(shop).book_parcel
    task.defer(order_id=Order.objects.create(sku="teapot").pk)
    job = jobs.objects.get()
    run_procrastinate()
    module = shop.add("shop.move_jobs", samples.run(PROCRASTINATE, only="def move(job)"))
    assert module.move(job) is False
    assert (OutboxEvent.objects.count(), booked(shop)) == (0, ["teapot"])


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


def java_row(number: int, status: int, **columns: Any) -> dict[str, Any]:
    return {
        "event_id": f"01JAVA{number}",
        "event_type": "order.placed",
        "status": status,
        "payload": json.dumps({"order": number}),
        "available_at": now(),
        "created_at": now(),
        **columns,
    }


@on_postgres
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_pending_events_of_outbox_java_move_from_another_database(shop: Shop, parents: Any) -> None:
    """Its table has the name of ours, so it is in a database of its own."""
    tomorrow = now() + timedelta(days=1)
    about = {"aggregate_type": "Order", "aggregate_id": "17", "tenant_id": "north"}
    rows = [
        java_row(1, 0, headers=json.dumps({"a": "b"}), **about),
        java_row(2, 2),
        java_row(3, 0, available_at=tomorrow),
        java_row(4, 1),
        java_row(5, 3),
    ]
    module, move = parents["shop.move_outbox_java"], parents["shop.move_outbox"].move
    given = (module.PENDING, module.FINISH, module.make_event)
    with old_table("outbox_event", OUTBOX_JAVA, rows, using="other"):
        assert move(*given, using="other") == 3
        with connections["other"].cursor() as cursor:  # as if killed between the two commits
            cursor.execute("UPDATE outbox_event SET status = 0 WHERE event_id = '01JAVA1'")
        assert (move(*given, using="other"), move(*given, using="other")) == (1, 0)
        select = "SELECT status, count(*) FROM outbox_event GROUP BY status"
        assert dict(fetch(select, "other")) == {1: 4, 3: 1}
    first, second, third = OutboxEvent.objects.order_by("event_id")
    assert [first.pk, second.pk, third.pk] == ["01JAVA1", "01JAVA2", "01JAVA3"]
    assert (first.aggregate_type, first.aggregate_id, first.tenant_id) == ("Order", "17", "north")
    assert (second.aggregate_type, json.loads(first.headers or "")) == (outbox.GLOBAL, {"a": "b"})
    assert third.deliver_at == tomorrow
    assert outbox.drain() == 2
    assert booked(shop) == [1, 2]


def namastack_row(number: int, status: str, handler: str) -> dict[str, Any]:
    at = now() + timedelta(seconds=number)
    return {
        "id": f"n{9 - number}",
        "status": status,
        "record_key": "k",
        "record_type": "X",
        "payload": json.dumps({"order": number}),
        "context": json.dumps({"a": "b"}),
        "created_at": at,
        "failure_count": 0,
        "next_retry_at": at,
        "partition_no": 1,
        "handler_id": handler,
    }


@on_postgres
def test_pending_records_of_namastack_move(shop: Shop, parents: Any) -> None:
    module = parents["shop.move_namastack"]
    [handler] = module.TYPES
    rows = [
        namastack_row(2, "NEW", handler),
        namastack_row(1, "NEW", handler),
        namastack_row(3, "NEW", "another"),
        namastack_row(4, "COMPLETED", handler),
        namastack_row(5, "FAILED", handler),
    ]
    with old_table("outbox_record", NAMASTACK, rows):
        assert (module.move_pending(), module.move_pending()) == (2, 0)
        select = "SELECT status, count(*) FROM outbox_record GROUP BY status"
        assert dict(fetch(select)) == {"COMPLETED": 3, "NEW": 1, "FAILED": 1}
    event_type = "moved.book_parcel"
    assert written() == [(event_type, {"order": 1}, "k"), (event_type, {"order": 2}, "k")]
    assert outbox.drain() == 2
    assert booked(shop) == [1, 2]


def gruelbox_row(number: int, method: str = "book", **columns: Any) -> dict[str, Any]:
    call = {
        "c": "com.example.ParcelService",
        "m": method,
        "p": ["long"],
        "a": [{"t": "Long", "v": number}],
        "x": None,
        "s": None,
    }
    return {
        "id": f"g{number}",
        "invocation": json.dumps(call),
        "attempts": 0,
        "blocked": False,
        "processed": False,
        "version": 1,
        "nextattempttime": now().replace(tzinfo=None),
        **columns,
    }


@on_postgres
def test_pending_calls_of_gruelbox_move(shop: Shop, parents: Any) -> None:
    module = parents["shop.move_gruelbox"]
    tomorrow = (now() + timedelta(days=1)).replace(tzinfo=None)
    rows = [
        gruelbox_row(2, topic="t", seq=2),
        gruelbox_row(1, topic="t", seq=1, nextattempttime=tomorrow),
        gruelbox_row(3, nextattempttime=tomorrow),
        gruelbox_row(4, method="cancel"),
        gruelbox_row(5, blocked=True),
        gruelbox_row(6, processed=True),
    ]
    with old_table("TXNO_OUTBOX", GRUELBOX, rows):
        assert (module.move_pending(), module.move_pending()) == (3, 0)
        select = "SELECT id FROM txno_outbox WHERE processed AND version = 2 ORDER BY id"
        assert [id_ for (id_,) in fetch(select)] == ["g1", "g2", "g3"]
    later = OutboxEvent.objects.get(key=None)
    assert later.deliver_at == tomorrow.replace(tzinfo=timezone.utc)
    outbox.drain()
    assert booked(shop) == [1, 2]  # in the order of their topic


@on_postgres
def test_a_row_whose_move_fails_stays_with_all_others(parents: Any) -> None:
    rows = [gruelbox_row(1), gruelbox_row(2, invocation="no JSON")]
    module = parents["shop.move_gruelbox"]
    with old_table("TXNO_OUTBOX", GRUELBOX, rows):
        with pytest.raises(json.JSONDecodeError):
            module.move_pending()
        assert fetch("SELECT count(*) FROM txno_outbox WHERE processed") == [(0,)]
    assert not OutboxEvent.objects.exists()
